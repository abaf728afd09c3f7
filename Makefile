PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart results test test-slow lint types format bench wheel clean

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

# RESULTS.md, and the table and pictures of the README, from results/
results: $(READY)
	$(BIN)/python -m tools.results

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
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install -q -e '.[dev,report,export,search,speech]'
	touch $(READY)

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
