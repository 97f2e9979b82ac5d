# Each target makes its own virtual environment from the tested versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check bench format clean
.DEFAULT_GOAL := demo

demo: .venv/.core  ## train, evaluate and recommend on the embedded data set
	$(BIN)/bert4rec demo

test: .venv/.dev  ## run all tests
	$(BIN)/python -m pytest

check: .venv/.dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/.dev  ## speed against other BERT4Recs, each in its own environment under .bench
	$(BIN)/python benchmarks/speed/compare.py
	$(BIN)/python benchmarks/speed/chart.py

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing bert4rec into .venv (torch is a large download the first time)"
	$(PIP) --editable .
	touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	touch $@
