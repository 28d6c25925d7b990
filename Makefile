# Needs CPython 3.10 to 3.13, make and pip; everything else goes into .venv.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
VERSIONS ?=

VENV := .venv$(if $(VERSIONS),-$(VERSIONS))
CONSTRAINTS := constraints$(if $(VERSIONS),-$(VERSIONS)).txt
BIN := $(VENV)/bin
# The variables reach the isolated build environment too, which -c does not (PIP_BUILD_CONSTRAINT from pip 25.3 on).
INSTALL := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo compare test quick thorough check guard words docs pictures format install clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
	@echo '  PYTHON=python3.12 chooses the interpreter of a new .venv, WORKERS=2 the test processes,'
	@echo "  ARGS='-k plan' goes to the command of demo, compare and test."
	@echo '  VERSIONS=oldest or newest tests with the ends of the ranges in pyproject.toml, in a .venv of their own.'

demo: $(VENV)/installed ## recall over 32,768 tokens and a model of real text, in 5 minutes
	$(BIN)/dilated-attention demo $(ARGS)

compare: $(VENV)/installed ## every variant in one table, an hour; ARGS=--quick takes 2 minutes
	$(BIN)/dilated-attention compare $(ARGS)

MARKS := not thorough
# One thread a process: the workers already fill the cores.
test: $(VENV)/installed-dev ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m '$(MARKS)' $(ARGS)

quick: MARKS := not slow and not thorough
quick: test ## run the tests that are not in tests/slow.txt, in 2 minutes on two cores

thorough: MARKS := thorough
thorough: test ## run what `make test` leaves out: more shapes, ranks, GPUs and frameworks

check: $(VENV)/installed-dev ## format check, lint, types, words, documents, guard and tests: what CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) --no-print-directory words
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory guard
	$(MAKE) --no-print-directory test

guard: $(VENV)/installed ## compare ratios of time, memory and calls with results/baseline.json
	$(BIN)/dilated-attention bench check

words: $(VENV)/installed-dev ## count phrases that readers had to read twice; no count may rise
	$(BIN)/python docs/tools/words.py

# Not --quiet: it hides the warnings from --strict. The variable silences a notice of the theme's authors.
docs: $(VENV)/installed-dev ## build the documents into site/, every warning and dead link an error
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

pictures: $(VENV)/installed-dev ## draw the pictures of the documents; needs chromium on PATH
	$(BIN)/python docs/tools/patterns.py
	$(BIN)/dilated-attention plot
	$(BIN)/python docs/tools/screenshots.py

format: $(VENV)/installed-dev ## format the code and apply the safe lint fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

install: $(VENV)/installed-dev ## make .venv without running anything

clean: ## remove .venv, .venv-oldest, .venv-newest and the caches
	rm -rf .venv .venv-oldest .venv-newest site .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(VENV)/installed: pyproject.toml lab/pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . --editable ./lab
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable '.[dev]' --editable ./lab
	touch $@
