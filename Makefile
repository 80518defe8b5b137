# Two commands: `make demo` and `make test`. Each makes its own virtual environment in .venv, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help demo test test-all test-gpu lint check-install format engine library kernels wheel sanitize coverage prove-gpu report pictures site clean

help:
	@echo "make demo      check every kernel system, compare tiled with standard attention"
	@echo "make test      lint, types and the quick test suite"
	@echo "make test-all  the same with the long tests"
	@echo "make test-gpu  what needs an NVIDIA GPU (pip install '.[cuda]' first)"
	@echo "make check-install  do all extras resolve against the package index alone?"
	@echo "make format    apply ruff's formatting and fixes"
	@echo "make engine    compile the native library again, what changed of it"
	@echo "make kernels   compile the common CUDA kernels ahead (NVRTC or nvcc), for the next wheel"
	@echo "make wheel     a wheel for this platform and all Python versions, in dist/"
	@echo "make sanitize  the native library under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make coverage  which lines of Python and C++ the quick suite runs, in build/coverage"
	@echo "make prove-gpu  what needs a GPU: its tests, compute-sanitizer, random calls"
	@echo "make report    results/ as one HTML page, build/report.html"
	@echo "make pictures  draw the figures and write the tables of the docs again"
	@echo "make site      the docs as a site, in build/site"
	@echo "make clean     remove .venv, caches and what was built"

# One BLAS thread each: on a busy machine a BLAS library's threads wait for each other far longer than they compute.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Triton's kernels by its interpreter, which takes main memory for a GPU's.
PYTEST     := $(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --dist worksteal

demo: $(VENV)/.package library
	@$(ONE_THREAD) $(BIN)/tilewise demo

test: lint check-install library
	$(PYTEST) -m "not slow and not gpu"

test-all: lint check-install library
	$(PYTEST) -m "not gpu"

# One process: kernels are compiled once, and a GPU gains nothing from several callers.
test-gpu: library
	$(ONE_THREAD) $(BIN)/python -m pytest -m gpu

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Once for each pyproject.toml. Without a network it says so and passes; TILEWISE_REQUIRE_INDEX=1, as in CI, makes that an error.
check-install: $(VENV)/.resolved

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The script compiles what is newer than its object. Without a compiler `library` goes on, and says what to install;
# `engine` and TILEWISE_REQUIRE_ENGINE=1 make that an error.
CPU          := tilewise/kernels/cpu
BUILD_ENGINE := $(BIN)/python $(CPU)/engine/build.py

library: | $(VENV)/bin/pip
	@$(BUILD_ENGINE)

engine: | $(VENV)/bin/pip
	TILEWISE_REQUIRE_ENGINE=1 $(BUILD_ENGINE)

# No wheel needs them: kernels that were not compiled ahead are compiled when they are first called.
CUDA := tilewise/kernels/cuda

kernels: $(VENV)/.package
	$(BIN)/python -m tilewise.kernels.cuda.prebuild

# Built twice from one commit it is the same, to the byte.
wheel: $(VENV)/.wheel
	$(BIN)/python tests/make_wheel.py dist

# What runs under the sanitizers, with the path of the widest instruction set.
SANITIZE_TESTS ?= tests/conformance tests/linear/test_cpu.py $(wildcard tests/test_cpu_*.py) -m "not slow" -k "(cpu and default) or test_cpu"

sanitize: $(VENV)/.test
	$(BIN)/python tests/sanitize.py address,undefined $(SANITIZE_TESTS)
	$(BIN)/python tests/sanitize.py thread $(SANITIZE_TESTS)

# Which lines the quick suite runs, in Python and in the native library. COVERAGE_TESTS names others.
COVERAGE_TESTS ?= -n auto --dist worksteal -m "not slow and not gpu"

coverage: $(VENV)/.test
	$(ONE_THREAD) TRITON_INTERPRET=1 $(BIN)/python tests/measure_coverage.py build/coverage $(COVERAGE_TESTS)

# What CI has no machine for: the tests that need a GPU, compute-sanitizer's tools on some of them, random calls.
prove-gpu: library
	$(BIN)/python tests/prove_gpu.py build/proof

report: $(VENV)/.package
	@mkdir -p build
	@$(BIN)/tilewise bench --report results -o build/report.html

pictures: $(VENV)/.test
	$(BIN)/python docs/figures.py
	$(BIN)/python -m docs.tutorial_figures
	-$(BIN)/python -m docs.screenshot
	$(BIN)/tilewise bench --cpu --from results/cpu --plot results/cpu >/dev/null
	$(BIN)/tilewise bench --gpu --from results/gpu --plot results/gpu >/dev/null
	$(BIN)/tilewise bench --linear --from results/cpu --plot results/cpu >/dev/null
	-$(BIN)/tilewise bench --linear --from results/gpu --plot results/gpu >/dev/null
	$(BIN)/python tests/train_gpu.py results/gpu/training.json --plot results/gpu/training.png --draw
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/scaling.py

# A warning is an error: a link that leads nowhere, a page that no menu has.
site: $(VENV)/.docs
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs build/site
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) build dist $(CPU)/libtilewise.* $(CPU)/build.txt $(CUDA)/prebuilt *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make the second run quick: an install runs again only when pyproject.toml or setup.py changes.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Tilewise needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "No venv module: install it (Debian: apt install python3-venv) and try again."; exit 1; }

$(VENV)/.package: pyproject.toml setup.py | $(VENV)/bin/pip
	@echo "Installing tilewise (NumPy only) and compiling its engine, which takes up to a minute"
	@$(BIN)/pip install --quiet --editable .
	@touch $@

# pip has one processor: others compile the library meanwhile, which pip's own build then finds made.
$(VENV)/.test: pyproject.toml setup.py | $(VENV)/bin/pip
	@echo "Installing tilewise with its test dependencies (PyTorch is the large one)"
	@$(BUILD_ENGINE) & $(BIN)/pip install --quiet --editable '.[test,wheel]' || { wait; exit 1; }; wait
	@touch $@ $(VENV)/.package $(VENV)/.wheel

$(VENV)/.resolved: pyproject.toml tests/check_install.py | $(VENV)/.test
	@echo "Resolving every extra against the package index alone"
	@$(BIN)/python tests/check_install.py $@

$(VENV)/.wheel: pyproject.toml setup.py | $(VENV)/bin/pip
	@echo "Installing what makes a wheel"
	@$(BIN)/pip install --quiet --editable '.[wheel]'
	@touch $@ $(VENV)/.package

$(VENV)/.docs: pyproject.toml setup.py | $(VENV)/bin/pip
	@echo "Installing what makes the site"
	@$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@ $(VENV)/.package
