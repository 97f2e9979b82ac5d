# Each target makes its own virtual environment from the tested versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo serve-demo test soak check bench format clean
.DEFAULT_GOAL := demo

demo: .venv/.core  ## train, evaluate and recommend on the embedded data set
	$(BIN)/bert4rec demo
	@echo "See it in a browser: make serve-demo"

serve-demo: .venv/.serve  ## open the web page on the demo model (made first if it is not there)
	test -f runs/demo/manifest.json || $(BIN)/bert4rec demo
	$(BIN)/bert4rec histories import demo --store sqlite:runs/demo.histories.db
	$(BIN)/bert4rec serve runs/demo --compare runs/demo/baselines/markov \
		--store sqlite:runs/demo.histories.db --open

test: .venv/.dev  ## run all tests, in two processes
	$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder

soak: .venv/.dev  ## the long form of the service's tests: reloads, ends, kills and fuzz, under load
	$(BIN)/python benchmarks/serving/soak.py
	$(BIN)/python benchmarks/serving/fuzz.py

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

.venv/.serve: .venv/.core
	$(PIP) --editable '.[serve]'
	touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	touch $@
