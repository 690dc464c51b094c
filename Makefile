# make demo | serve | test | lint | setup | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help setup demo serve test lint clean

help:
	@echo "make setup   a virtual environment in $(VENV) with tokenmill in it"
	@echo "make demo    chats with a real model on a prefill and a decode worker, then a quick MLPerf round"
	@echo "make serve   the OpenAI-compatible server on http://127.0.0.1:8000/v1; ARGS=\"--port 8080\""
	@echo "make test    lint, types and tests"
	@echo "make lint    lint and types only"
	@echo "make clean   remove what the others made"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tokenmill needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.setup: $(INPUTS) | $(BIN)/python
	$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.test: $(INPUTS) | $(BIN)/python
	$(PIP) -e ".[test]"
	@touch $@ $(VENV)/.setup

# The tests of the report page need Chromium: one that is there, Playwright's or Debian's.
$(VENV)/.browser: $(VENV)/.test tests/browser.py
	@$(BIN)/python tests/browser.py
	@touch $@

setup: $(VENV)/.setup

demo: setup
	$(BIN)/python -m tokenmill.demo

serve: setup
	$(BIN)/tokenmill serve $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(VENV)/.browser
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results/demo
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
