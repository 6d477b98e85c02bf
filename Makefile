# The first python of these that is 3.11 or later; PYTHON=… overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

.PHONY: demo demo-stop demo-clean

demo: ## Run everything on this machine: web page, three nodes, a failover
	@exec $(or $(PYTHON),$(error Python 3.11 or later is needed)) -m project.demo.launch $(DEMO_ARGS)

demo-stop: ## Stop the demo, also one that was killed
	@exec $(PYTHON) -m project.demo.launch --stop

demo-clean: ## Stop the demo and remove .demo
	@exec $(PYTHON) -m project.demo.launch --clean
