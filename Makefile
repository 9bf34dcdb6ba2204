# `make demo` and `make test` set up .venv, build and run, on any machine. gpu-check, gpu-status and gpu-sanitize use the Python at
# hand ($(PYTHON)) and the library that is there, and need no network, no git and no .venv.
.DEFAULT_GOAL := help
.PHONY: help demo test build lint format wheel gpu-check gpu-status gpu-sanitize clean

PYTHON ?= python3
VENV := .venv
PRESET ?= release
PYTEST_ARGS ?=

demo test build lint format wheel: export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

CXX_SOURCES = $(shell find csrc examples/cpp -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

$(VENV)/.ready: pyproject.toml tools/setup_venv.sh
	tools/setup_venv.sh $(VENV) $(PYTHON)
	touch $@

build: $(VENV)/.ready ## The compiled library, into cutlass_bn/lib (nothing without nvcc)
	cmake --preset $(PRESET) -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python
	cmake --build --preset $(PRESET)

demo: build ## Both workloads, ours and PyTorch's, with errors and times
	python -m bench workloads --quick

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
