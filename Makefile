# What people and CI run. Needs make and Python 3.11, 3.12 or 3.13; everything else it installs.

PYTHON ?= $(shell scripts/find-python)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-slow check format bench clean

help: ## list what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/'

demo: $(VENV)/.installed ## the same prompts plain and speculative, side by side
	@$(BIN)/forerun demo

test: $(VENV)/.installed ## lint, types and the test suite (fetches the model)
	@scripts/test

test-slow: $(VENV)/.installed ## the suites that take minutes: 100 prompts at many draft lengths, ...
	@scripts/test -m slow

check: $(VENV)/.installed ## ruff and mypy
	@scripts/check

format: $(VENV)/.installed ## let ruff lay out the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## what speculation is worth on this machine, offline
	@$(BIN)/python benchmarks/offline.py

$(VENV)/.installed: pyproject.toml src/forerun/_version.py
	@test -n "$(PYTHON)" || { echo "forerun needs Python 3.11, 3.12 or 3.13 on PATH (or PYTHON=...)"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing forerun and its dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,hf,structured]'
	@touch $@

clean: ## remove the virtual environment and caches (not the models)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build src/*.egg-info
