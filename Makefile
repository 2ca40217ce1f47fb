# Everything here works on a fresh machine: each target builds the virtual environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm

.PHONY: quickstart test test-slow test-vllm test-vllm-slow lint docs venv clean

quickstart: $(READY)  ## set up and run the main job
	$(BIN)/quadriga train --config-name=quickstart

test: $(READY) lint  ## set up and pass the tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800 || [ $$? -eq 5 ]

test-vllm: $(VLLM)/.ready  ## the tests of the vLLM engine, in a virtual environment of their own
	$(VLLM)/bin/python -m pytest tests/foreign_engines tests/rollout/test_vllm_support.py -m "not slow"

test-vllm-slow: $(VLLM)/.ready  ## whether it learns with vLLM what it learns with the native engine
	$(VLLM)/bin/python -m pytest tests/foreign_engines -m slow

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

$(VLLM)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
