PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart results docs test test-slow lint types format bench wheel clean

quickstart: $(READY)
	$(BIN)/normrnn compare quickstart

test: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# docs/results, the tables of README and findings, and pictures, from results/
results: $(READY)
	$(BIN)/python -m tools.results

# the site, in build/docs; every warning is an error
docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q -n -j 2 docs build/docs

bench: $(READY)
	$(BIN)/python -m benchmarks.layers
	$(BIN)/python -m benchmarks.training

# sdist and wheel with the compiled kernels inside, tried in an empty environment without a compiler
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tools.acceptance dist/normrnn-*.whl

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q -e '.[dev,docs,report,export,search,speech]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
