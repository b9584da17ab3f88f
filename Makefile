# Everything a developer runs. Each command sets up what it needs first.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check test-oldest bench clean

setup: $(VENV)/installed

# A new environment whenever the requirements have changed.
$(VENV)/installed: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/hf-calib demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest tests

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	python3 -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable ".[dev]"
	touch $@

bench: setup
	$(BIN)/python benchmarks/losses.py

clean:
	rm -rf $(VENV) .venv-oldest demo_output outputs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
