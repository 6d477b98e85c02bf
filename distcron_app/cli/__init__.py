"""What ``manage.py schedulerctl`` is made of: one module per concern, one per group of verbs.

``arguments`` declares every verb and imports none of them, so that ``schedulerctl next``
loads neither Redis nor the operations; ``command`` of a verb is looked up by name.
Data goes to stdout, talk to stderr, and every exit code is named in ``exits``.
"""
