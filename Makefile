# Needs CPython 3.10 to 3.13, make and pip; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
# The variables reach the isolated build environment too, which -c does not (PIP_BUILD_CONSTRAINT from pip 25.3 on).
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test check guard docs pictures format install clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
	@echo '  PYTHON=python3.12 chooses the interpreter of a new .venv, WORKERS=2 the test processes,'
	@echo "  ARGS='-k plan' goes to the command of demo and test."

demo: .venv/installed ## train a small LongNet beside the same model with dense attention
	$(BIN)/python -m dilated_attention demo $(ARGS)

# One thread a process: the workers already fill the cores.
test: .venv/installed-dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: .venv/installed-dev ## format check, lint, types, documents, guard and tests: what CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory guard
	$(MAKE) --no-print-directory test

guard: .venv/installed ## compare ratios of time, memory and calls with results/baseline.json
	$(BIN)/python -m dilated_attention bench check

# Not --quiet: it hides the warnings from --strict. The variable silences a notice of the theme's authors.
docs: .venv/installed-dev ## build the documents into site/, every warning and dead link an error
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

pictures: .venv/installed-dev ## draw the pictures of the documents; needs chromium on PATH
	$(BIN)/python -m dilated_attention plot --patterns
	$(BIN)/python docs/tools/screenshots.py

format: .venv/installed-dev ## format the code and apply the safe lint fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

install: .venv/installed-dev ## make .venv without running anything

clean: ## remove .venv and the caches
	rm -rf .venv site .hypothesis .mypy_cache .pytest_cache .ruff_cache

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[cli]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@
