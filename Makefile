# make setup | demo | quick | test | test-all | test-turn | coverage | lint | docs | bench | report. Every target makes the environment first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.egeria-ready
DEMO_STAMP := $(VENV)/.egeria-demo
DOCS_STAMP := $(VENV)/.egeria-docs

# One more than there are cores: many tests wait, for processes they start, or for time to pass.
WORKERS = $(shell $(BIN)/python -c 'import os; print(1 + len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)))')

# Many tests start processes that import torch: compiled once, it takes half as long.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo quick test test-all test-turn coverage lint docs bench report clean
.DEFAULT_GOAL := test

setup: $(STAMP)

$(STAMP): EXTRA := dev
$(DEMO_STAMP): EXTRA := demo
$(DOCS_STAMP): EXTRA := dev,docs
$(STAMP) $(DEMO_STAMP) $(DOCS_STAMP): pyproject.toml constraints.txt build_kernel.py egeria_cache/store/kernel.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Egeria needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing PyTorch and what else is needed into $(VENV), once; half a minute to some minutes.'
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRA)]'
	@test $(EXTRA) = demo || $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@touch $@

# It needs little: a newcomer need not wait for the trainers that the tests want.
demo: $(DEMO_STAMP)
	@echo 'Starting: PyTorch is loaded, which takes some seconds the first time.'
	@$(BIN)/python examples/demo.py

# While you work: lint of what has changed since BASE, and the tests of its rooms; below a minute.
BASE ?= main
quick: setup
	@$(BIN)/python tools/quick.py $(BASE) --numprocesses $(WORKERS) --dist worksteal

test: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Everything, the long mode too.
test-all: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --timeout 1200 -m "long or not long"

# As much of the long mode as fits into MINUTES, beginning elsewhere for each number TURN.
TURN ?= 0
MINUTES ?= 10
test-turn: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist load --maxschedchunk 1 --timeout 1200 -m long --turn $(TURN) --minutes $(MINUTES)

# Tracing every line takes longer.
coverage: setup
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --timeout 1200 --cov --cov-report=term:skip-covered --cov-fail-under=90

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, with the gallery's notebooks run, in runs/site; a warning fails.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup
	$(BIN)/python -m benchmarks

report: setup
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) runs build dist *.egg-info
