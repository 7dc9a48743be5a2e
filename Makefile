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

.PHONY: help setup java demo test test-fast test-wheel lint format conformance bench clean

help: ## Show the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

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

test: setup ## Run all tests
	$(BIN)/python -m pytest

test-fast: setup ## Run the tests that need no Spark, no training and no server
	$(BIN)/python -m pytest -m 'not slow'

test-wheel: setup ## Run the fast tests against the built wheel, away from the source
	conf/test-wheel.sh $(BIN)/python

lint: setup ## Check format, style, types and import layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

conformance: setup ## Compare 2 workers with one process, case by case, and write docs/conformance.md
	DBX_TF_CONFORMANCE_TABLE=$(CURDIR)/docs/conformance.md $(BIN)/python -m pytest tests/conformance
	@sed -n 5p docs/conformance.md

bench: setup ## Measure what a run costs, and write docs/benchmarks.md
	$(BIN)/python -m tests.benchmarks.bench_overhead

clean: ## Remove what make has made
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
