"""The app that the nodes of the system tests have installed."""
