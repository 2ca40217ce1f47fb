# Everything here works on a fresh machine: each target builds the virtual environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: quickstart test test-slow lint docs venv clean

quickstart: $(READY)  ## set up and run the main job
	$(BIN)/quadriga train --config-name=quickstart

test: $(READY) lint  ## set up and pass the tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800 || [ $$? -eq 5 ]

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs,tensorboard]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
