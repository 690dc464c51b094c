# make demo | serve | test | quick | lint | package | docs | pictures | setup | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a terminal pip shows what it does.
PIP := quiet=$$([ -t 1 ] || echo --quiet); \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# What needs no server and no weights, but for the files that take longest or open a browser.
QUICK := tests/core tests/sched tests/routing tests/text tests/plan tests/bench/results \
	tests/test_imports.py tests/test_settings.py tests/test_recipes.py
SLOW := tests/sched/test_scheduler_machine.py tests/plan/test_loads.py tests/text/test_tokenizer.py \
	tests/plan/test_pareto.py

.PHONY: help setup demo serve test quick lint package docs pictures clean

help:
	@echo "make setup   a virtual environment in $(VENV) with tokenmill in it"
	@echo "make demo    chats with a real model on a prefill and a decode worker, then a quick MLPerf round"
	@echo "make serve   the OpenAI-compatible server on http://127.0.0.1:8000/v1; ARGS=\"--port 8080\""
	@echo "make test    lint, types and tests"
	@echo "make quick   lint, types and the fast tests, in under two minutes"
	@echo "make lint    lint and types only"
	@echo "make package the wheel and the sdist, each checked, and the wheel in an empty environment"
	@echo "make docs    the parts of the pages that are generated; make pictures: their pictures"
	@echo "make clean   remove what the others made"

# The last step makes the stamp, so an environment that was broken off half-way is made again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tokenmill needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
		|| { echo "$(PYTHON) cannot make $(VENV). On Debian: apt install python3-venv; with uv: uv venv --seed $(VENV)" >&2; exit 1; }
	@touch $@

$(VENV)/.setup: $(INPUTS) | $(VENV)/.made
	$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.test: $(INPUTS) | $(VENV)/.made
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

# With a fixed hash seed mypy works in the same order each time.
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONHASHSEED=0 $(BIN)/mypy

test: lint $(VENV)/.browser
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

quick: lint
	$(BIN)/pytest -n 2 --dist loadfile $(QUICK) $(SLOW:%=--ignore=%) $(ARGS)

package: $(VENV)/.test
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_package.py dist/*.whl

docs: $(VENV)/.test
	$(BIN)/python scripts/module_table.py
	$(BIN)/python scripts/grafana_dashboard.py
	$(BIN)/python scripts/isolation_matrix.py
	$(BIN)/tokenmill plan validate --json --markdown docs/validation.md > /dev/null
	$(BIN)/python scripts/page_outputs.py

pictures: $(VENV)/.browser
	$(BIN)/python scripts/screenshots.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results/demo
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
