# Every target makes .venv first and installs what it needs: a machine with Python >= 3.11 and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNS := $(VENV)/.runs

.PHONY: help demo test test-slow test-gpu lint format docs bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "siammm needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The package and what it needs to run, without what its developers need.
$(RUNS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(RUNS) $@

demo: $(RUNS)  ## cluster scikit-learn's digits and show what was found
	$(BIN)/siammm demo

# Two tests at a time, each on one thread: quicker on two cores than one test on both. Each process takes half of the
# tests in their order, and one that is done takes half of what the other has left.
test: $(INSTALLED)  ## the default suite: no GPU, no network, under ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --dist worksteal

test-slow: $(INSTALLED)  ## everything that runs without a GPU, in the same way
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu' -n 2 --dist worksteal

# Also runs from a bare checkout on a GPU machine where nothing can be installed: files test_*_gpu.py import little.
# Several files at a time, the largest first: most of the time is compiling, on the CPU.
test-gpu:  ## the tests that need a CUDA device
	find tests -name 'test_*_gpu.py' -size +0 -printf '%s %p\n' | sort -rn | cut -d' ' -f2 | PYTHONPATH=src xargs -P 6 -n 1 \
		$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu -q --durations=5

lint: $(INSTALLED)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(INSTALLED)  ## rewrite the files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(INSTALLED)  ## time the mixture on this CPU beside scikit-learn and faiss
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	$(BIN)/python benchmarks/mixture_cpu.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis build dist
