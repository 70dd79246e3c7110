# Set-up is part of every target: the first `make serve` or `make test` makes .venv and installs.
# constraints.txt pins what was tested; GPU hosts install `.[cuda]` with their own torch instead.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Nothing waits for a network: Ray's usage report, the hub.
export RAY_USAGE_STATS_ENABLED ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: serve test static check fmt gpu-test bench clean

serve: $(VENV)/.serve
	$(BIN)/python jobs/serve.py $(ARGS)

# Two at a time: what starts processes of its own in one worker, all else in the other (tests/conftest.py).
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not gpu" --numprocesses 2 --dist loadgroup $(ARGS)

static: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: static test

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# On a GPU host, in an environment that already has torch and CuPy.
gpu-test:
	@$(PYTHON) -c 'import pytest, torch, cupy; assert torch.cuda.is_available()' 2>/dev/null || \
	  { echo "gpu-test needs a GPU, and an environment with a CUDA build of torch, CuPy and pytest"; exit 1; }
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python jobs/bench_decode.py --out benchmarks/results

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kdray needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
