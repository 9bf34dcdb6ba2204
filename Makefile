# `make demo` and `make test` set up .venv, build and run, on any machine; the demo builds kernels only
# where there is a GPU, and for that GPU alone. gpu-check, gpu-status and gpu-sanitize use the Python
# at hand ($(PYTHON)) and the library that is there, and need no network, no git and no .venv.
.DEFAULT_GOAL := help
.PHONY: help demo test build lint format docs wheel gpu-check gpu-status gpu-sanitize clean

PYTHON ?= python3
VENV := .venv
PRESET ?= release
PYTEST_ARGS ?=
CUTLASS_BN_ARCHITECTURES ?=
DEMO_LOG := build/demo.log

demo test build lint format docs wheel: export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# As 90, of the first GPU; empty without one.
GPU = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2>/dev/null \
  | sed -n 's/^\([0-9]*\)\.\([0-9]*\)$$/\1\2/p')
# Unset again where it is not given: the cache would keep a demo's.
ARCHITECTURES = $(if $(CUTLASS_BN_ARCHITECTURES),-DCUTLASS_BN_ARCHITECTURES='$(CUTLASS_BN_ARCHITECTURES)',-UCUTLASS_BN_ARCHITECTURES)
CXX_SOURCES = $(shell find csrc examples/cpp -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

$(VENV)/.ready: pyproject.toml tools/setup_venv.sh
	tools/setup_venv.sh $(VENV) $(PYTHON)
	touch $@

build: $(VENV)/.ready ## The compiled library, into cutlass_bn/lib (nothing without nvcc)
	cmake --preset $(PRESET) -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python $(ARCHITECTURES)
	cmake --build --preset $(PRESET)

demo: $(VENV)/.ready ## Both workloads, ours and PyTorch's, with errors and times
	@if [ -n "$(GPU)" ]; then \
	  echo "Building the kernels for compute capability $(GPU) alone, some minutes: $(DEMO_LOG)"; \
	  mkdir -p $(dir $(DEMO_LOG)); \
	  $(MAKE) build CUTLASS_BN_ARCHITECTURES=$(GPU)-real >$(DEMO_LOG) 2>&1 || \
	    { tail -n 20 $(DEMO_LOG); exit 1; }; \
	else \
	  echo "No NVIDIA GPU: no kernels are built. cutlass_bn runs its CPU path."; \
	fi
	@python -m bench workloads --quick --summary

test: build ## The test suite; GPU tests too where there is a GPU
	python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.ready ## ruff, clang-format and mypy, changing nothing
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_SOURCES)
	mypy

format: $(VENV)/.ready ## Formats Python, C++ and CUDA in place
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_SOURCES)

docs: $(VENV)/.ready ## docs/api.md, from the docstrings
	python tools/api_page.py

wheel: $(VENV)/.ready ## A wheel, into dist/
	python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

gpu-check: ## Tests and quick benchmark on a GPU; recorded in bench/results/gpu-check.json
	$(PYTHON) tools/gpu_check.py run

gpu-status: ## Whether the recorded GPU check is of the sources as they are
	@$(PYTHON) tools/gpu_check.py status

gpu-sanitize: ## compute-sanitizer's memcheck and racecheck over a few GPU tests
	$(PYTHON) tools/gpu_sanitize.py

clean: ## Everything built, but not .venv
	rm -rf build dist cutlass_bn/lib
