# Every target works on a checkout alone: virtualenvs are made, servers found or started.
.DEFAULT_GOAL := help
SHELL := /bin/sh

# The first of these that is Python 3.11 or later; PYTHON=… overrides it.
PYTHON ?= $(shell sh .ci/find-python python3 python3.11 python3.12 python3.13)
# A Python for Django 6, for the second round of tests; empty where there is none.
NEWEST ?= $(shell sh .ci/find-python --minor 13 || sh .ci/find-python --minor 12)

VENV := .venv
PY := $(VENV)/bin/python
WITH_SERVICES = $(PY) .ci/services.py
PYTEST = -m pytest -q -p tests.require_services
# Processes of pytest-xdist, for what does not start nodes of its own.
PARALLEL ?= -n 2
DATABASES ?= sqlite postgresql mariadb
INTEGRATION_TESTS ?= tests/integration
# What people see is the same on every database; `make test` looks at it on two of the three.
SHOWN := $(patsubst %,--ignore-glob=tests/integration/test_%.py, \
  admin* calendar_admin *pages* indonesian preview schedulerctl_looking schedulerctl_text)
SYSTEM_TESTS ?= tests/system
# What `make test` has time for; `make test-system` runs them all.
SYSTEM_SUBSET := $(patsubst %,tests/system/test_%.py, \
  cases checker deployment failpoints node_faults redis_faults shutdown) \
  tests/system/test_demo.py::test_a_bounded_demo_misses_nothing_and_survives_a_killed_node \
  $(addprefix tests/system/test_lock_cases.py::test_, \
    a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once \
    a_job_whose_lock_was_lost_succeeds_and_the_loss_is_noted_beside_it \
    a_node_that_comes_after_a_short_job_is_done_does_not_run_it_again \
    the_death_of_the_busiest_node_right_before_many_are_due_costs_none_of_them) \
  $(addprefix tests/system/test_lock_levels.py::test_, \
    a_holder_whose_lock_session_ends_is_told_and_nobody_runs_beside_it) \
  $(addprefix tests/system/test_policies.py::test_, \
    after_three_hours_without_a_node_one_late_occurrence_runs \
    occurrences_that_wait_run_in_their_order_and_the_queue_has_an_end \
    a_job_that_fails_twice_succeeds_in_its_third_attempt)

##@ Try it
.PHONY: demo demo-stop demo-clean
demo: ## run everything on this machine: a page, three nodes, a failover
	@exec $(or $(PYTHON),$(error Python 3.11 or later is needed)) -m project.demo.launch $(DEMO_ARGS)

demo-stop: ## stop the demo, also one that was killed
	@exec $(PYTHON) -m project.demo.launch --stop

demo-clean: ## stop the demo and remove .demo
	@exec $(PYTHON) -m project.demo.launch --clean

##@ Check it
.PHONY: test test-all lint migrations test-unit test-integration test-system test-newest test-browser \
  test-model test-storm test-scale
test: $(VENV)/.installed ## everything but the slowest system tests and the browser
	@$(WITH_SERVICES) $(MAKE) --no-print-directory test-all

# SQLite is the database of test-newest, where that can run.
test-all: lint migrations test-unit
	@$(MAKE) --no-print-directory test-integration DATABASES="$(if $(NEWEST),,sqlite) postgresql"
	@$(MAKE) --no-print-directory test-integration DATABASES=mariadb \
	  INTEGRATION_TESTS="tests/integration $(SHOWN)"
	@$(MAKE) --no-print-directory test-system SYSTEM_TESTS="$(PARALLEL) $(SYSTEM_SUBSET)"
	@$(MAKE) --no-print-directory test-newest

lint: $(VENV)/.installed ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy

migrations: $(VENV)/.installed ## no model change without its migration
	$(PY) manage.py makemigrations --check --dry-run
	$(PY) manage.py check

test-unit: $(VENV)/.installed ## unit tests, the protocol's model, the lock backends' contracts
	$(WITH_SERVICES) $(PY) $(PYTEST) $(PARALLEL) tests/unit tests/model tests/contracts

test-integration: $(VENV)/.installed ## integration tests on each of DATABASES
	@set -e; for database in $(DATABASES); do \
	  echo "tests/integration on $$database"; \
	  TEST_DATABASE=$$database $(WITH_SERVICES) $(PY) $(PYTEST) $(PARALLEL) $(INTEGRATION_TESTS); done

test-system: $(VENV)/.installed ## all system tests: real processes, killed and stopped
	$(WITH_SERVICES) $(PY) $(PYTEST) $(SYSTEM_TESTS)

test-storm: $(VENV)/.installed ## three nodes, 200 kills in five minutes; DISTCRON_STORM_SECONDS=, _KILLS=
	DISTCRON_STORM_SECONDS=$${DISTCRON_STORM_SECONDS:-300} DISTCRON_STORM_KILLS=$${DISTCRON_STORM_KILLS:-200} \
	  $(WITH_SERVICES) $(PY) $(PYTEST) -s tests/system/test_storm.py

test-scale: $(VENV)/.installed ## a million runs, 100,000 ticks, 1,000 schedules at one instant
	DISTCRON_SCALE=1 $(WITH_SERVICES) $(PY) $(PYTEST) -s tests/system/test_scale.py

test-newest: ## unit and integration tests on Django 6, on SQLite
	@if [ -z "$(NEWEST)" ]; then echo "Django 6 is not tested here: no Python 3.12 or 3.13."; else \
	  $(MAKE) --no-print-directory .venv-newest/.installed && \
	  .venv-newest/bin/python -c 'import django, sys; print("Python", sys.version.split()[0], "Django", django.__version__)' && \
	  TEST_DATABASE=sqlite .venv-newest/bin/python .ci/services.py \
	    .venv-newest/bin/python $(PYTEST) $(PARALLEL) tests/unit tests/integration; fi

test-model: $(VENV)/.installed ## the protocol's model in full, with its traces; some minutes
	DISTCRON_MODEL=deep $(PY) $(PYTEST) -s tests/model

test-browser: $(VENV)/.browser ## the pages in Chromium
	$(WITH_SERVICES) $(PY) $(PYTEST) tests/browser

##@ Measure it
.PHONY: bench-locks
bench-locks: $(VENV)/.bench ## the locks beside their peers, a JSON line each; BENCH_ARGS=p6
	@$(PY) -m benchmarks.locks $(BENCH_ARGS)

##@ Build it
.PHONY: wheel clean help
wheel: $(VENV)/.installed ## dist/distcron-….whl
	$(PY) -m build --wheel --no-isolation

clean: demo-clean ## remove what these targets made
	rm -rf .venv .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

$(VENV)/.installed: requirements.txt requirements-demo.txt requirements-dev.txt
	sh .ci/venv $(VENV) $(or $(PYTHON),$(error Python 3.11 or later is needed)) 'django>=5.2,<6'

.venv-newest/.installed: requirements.txt requirements-demo.txt requirements-dev.txt
	sh .ci/venv .venv-newest $(NEWEST) 'django>=6,<7'

$(VENV)/.browser: $(VENV)/.installed requirements-browser.txt
	sh .ci/venv $(VENV) $(PYTHON) 'django>=5.2,<6' -r requirements-browser.txt
	@touch $@

$(VENV)/.bench: $(VENV)/.installed requirements-bench.txt
	sh .ci/venv $(VENV) $(PYTHON) 'django>=5.2,<6' -r requirements-bench.txt
	@touch $@

help:
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile
