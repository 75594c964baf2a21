# `make train` and `make test` do all the set-up themselves.
SHELL := bash
# Some images switch byte code off; every process would compile torch and verl anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv/bin

.PHONY: train test check setup clean

train: setup  ## set up, then the main job on this machine
	$(VENV)/legorl train

test: setup check  ## everything: lint, types, unit, integration and end-to-end tests
	scripts/test_servers.sh
	OMP_NUM_THREADS=1 $(VENV)/pytest -q -n 2 --dist loadfile -m "(integration or slow) and not e2e" --durations=15
	OMP_NUM_THREADS=1 $(VENV)/pytest -q -m e2e --durations=15

check: setup  ## lint, types and unit tests
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	OMP_NUM_THREADS=1 $(VENV)/pytest -q -n 3 -m "not integration and not e2e and not slow"

setup:
	@scripts/setup.sh

clean:  ## remove the environment, caches and runs
	rm -rf .venv .cache runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
