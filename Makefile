# What you need is Python 3.11 or newer; `make demo` and `make test` set up the rest in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A byte-code cache makes `import tensorflow` four times cheaper, which every training process does.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/pycache
# A JVM that lives for a test does not repay its optimising compiler and its parallel collector.
export SPARK_SUBMIT_OPTS ?= -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(BIN)/python
export PATH := $(CURDIR)/$(BIN):$(PATH)

# A Databricks ML runtime whose packages `make test-runtime` installs, see conf/constraints-*.txt; they have Python 3.12.
RUNTIME ?= 17.3
RUNTIME_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
RUNTIME_BIN := .venv-$(RUNTIME)/bin

.PHONY: help setup java demo test test-fast test-table faults test-wheel runtime test-runtime lint format conformance \
  conformance-runtime bench clean

help: ## Show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

setup: $(STAMP) java ## Install everything into .venv (and Java 17, as root on Debian)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dbx_tf needs Python 3.11 or newer: make PYTHON=python3.12 " + "$(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

java:
	@command -v java >/dev/null || test -x "$$JAVA_HOME/bin/java" || conf/install-java.sh

demo: setup ## Train on two real workers of a local Spark; metrics and model go to a local MLflow store
	$(BIN)/dbx-tf demo

test: setup ## Run the tests, and of the conformance table its core
	$(BIN)/python -m pytest -m 'not table and not faults'

test-fast: setup ## Run the tests that need no Spark, no training and no server
	$(BIN)/python -m pytest -m 'not slow'

test-table: setup ## Run what `make test` leaves out of the conformance table
	$(BIN)/python -m pytest -m table

faults: setup ## Break trainings in every way, on one and on two hosts, FAULT_REPEATS times (5) each
	DBX_TF_FAULT_REPEATS=$(or $(FAULT_REPEATS),5) $(BIN)/python -m pytest tests/spark/test_faults.py

test-wheel: setup ## Run the fast tests against the built wheel, away from the source
	conf/test-wheel.sh $(BIN)/python

runtime: java
	test -d .venv-$(RUNTIME) || $(RUNTIME_PYTHON) -m venv .venv-$(RUNTIME)
	$(RUNTIME_BIN)/python -m pip install --quiet -c conf/constraints-$(RUNTIME).txt --editable '.[tf,test]' 'pyspark[connect]'

test-runtime conformance-runtime: export PYSPARK_PYTHON := $(CURDIR)/$(RUNTIME_BIN)/python
test-runtime conformance-runtime: export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(RUNTIME_BIN)/python

test-runtime: runtime ## Run the core tests with the packages of an older Databricks ML runtime (RUNTIME=17.3, 18 or 19)
	$(RUNTIME_BIN)/python -m pytest -m 'not table' tests/unit tests/spark/test_run.py tests/conformance

conformance-runtime: runtime ## The whole table with those packages, as docs/conformance-17.3.md
	DBX_TF_CONFORMANCE_TABLE=$(CURDIR)/docs/conformance-$(RUNTIME).md $(RUNTIME_BIN)/python -m pytest tests/conformance

lint: setup ## Check format, style, types and import layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

conformance: setup ## Compare 2 and 3 workers with one process, case by case, and write docs/conformance.md
	DBX_TF_CONFORMANCE_TABLE=$(CURDIR)/docs/conformance.md $(BIN)/python -m pytest tests/conformance
	@grep -A 2 '^## ' docs/conformance.md

bench: setup ## Measure what a run costs, and write docs/benchmarks.md
	$(BIN)/python -m tests.benchmarks

clean: ## Remove what make has made
	rm -rf $(VENV) .venv-* .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
