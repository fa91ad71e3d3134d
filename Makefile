# make demo: trains a sharded GPT here.   make test: runs all tests.   Both set up .venv first, once.

# What the virtual environment gets as torch. Elsewhere: make setup TORCH=torch, or another
# version; PIP_INDEX_URL in the environment names another index.
TORCH ?= torch==2.13.0
PYTHON ?= python3

# Other extras of pyproject.toml that it gets, such as EXTRAS=,jax,mpi; their tests are skipped without them.
EXTRAS ?=

VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled then: a small part of what is installed.
INSTALL := $(BIN)/pip install --quiet --no-compile

# Each of some hundred processes of the tests would compile again what it imports.
unexport PYTHONDONTWRITEBYTECODE

CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/cpp/*.cpp' 'tests/cpp/*.h' \
  'csrc/*.hpp' 'tests/c/*.c' 'tests/c/*.cpp' 'tests/c/*.h' 'examples/cpp/*.cpp' 'examples/cpp/*.h')
CORE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py

.PHONY: help setup demo test test-fast wheel wheel-tests docs docs-serve mutants lint bench figures torch-tests sanitize sanitize-address sanitize-thread arm faults model fuzz clean

help:
	@echo "make setup     prepare $(VENV): install what is needed, build"
	@echo "make demo      train a small GPT, fully sharded over two local processes"
	@echo "make test      run all tests, three at a time"
	@echo "make test-fast run, in a minute, one case of each test that needs no other process"
	@echo "make docs      build the documentation into build/docs; a broken link or reference fails"
	@echo "make docs-serve  show it at http://127.0.0.1:8000 while you write"
	@echo "make wheel     build a wheel for other machines, and a source distribution, into dist"
	@echo "make wheel-tests  build them, and run fast tests where there is no compiler and no source"
	@echo "make mutants   put mistakes into a copy, one at a time, and see which of them the tests notice"
	@echo "make bench     compare with Gloo, Open MPI, FSDP2 and plain copies (on a GPU: docs/gpu-day.md)"
	@echo "make figures   the same, kept in bench/results, and the tables of README and docs from it"
	@echo "make torch-tests  run torch's own tests with Gloo and with shardcomm, and say what passes with Gloo alone"
	@echo "make lint      check format, style, types and layers"
	@echo "make sanitize  run the C++ tests under address, undefined-behaviour and thread sanitizers"
	@echo "make arm       build the C and C++ tests for aarch64, and run them under qemu"
	@echo "make faults    let a fault strike at every point of every operation of the core, and print what came of it"
	@echo "make model     check the protocol between ranks in every order of its steps (docs/protocol.md)"
	@echo "make fuzz      let anything stand in the files and messages that are read, 20,000 times each; run 10,000 random programs; and encode a million hard blocks"
	@echo "make clean     remove what the above have made"

setup: $(VENV)/built

demo: setup
	$(BIN)/shardcomm train

test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal $(OPTIONS)

test-fast: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal --fast

# The tag is the oldest glibc and libstdc++ that serve; auditwheel finds it.
wheel: setup
	rm -rf build/wheel dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation --sdist --wheel --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

wheel-tests: setup
	MAKEFLAGS= .ci/wheel

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

mutants: setup
	$(BIN)/python tests/mutants/run.py --json build/mutants.json

$(VENV)/installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed as '$(PYTHON)' (Debian: apt install python3; or make PYTHON=python3.12)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing (Debian: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	  { echo "Python's headers are missing (Debian: apt install python3-dev)"; exit 1; }
	@command -v $(or $(CXX),c++) >/dev/null || \
	  { echo "A C++17 compiler is missing (Debian: apt install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade 'pip>=23.2' 'setuptools>=77'
	$(INSTALL) '$(TORCH)' 'pybind11>=2.13' 'cmake>=3.25' ninja
	touch $@

$(VENV)/built: $(VENV)/installed $(CORE_SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(INSTALL) --no-build-isolation --editable '.[test,bench,lint,docs,wheel$(EXTRAS)]'
	$(BIN)/python -c 'from shardcomm.interop import backend; backend.load()'  # compiled before a rank's deadline counts
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# Where `bench` leaves its JSON files, and how their names begin.
RESULTS ?= build/bench/

bench: setup
	mkdir -p $(dir $(RESULTS)) build/bench
	for comparison in padding memory pack wire overhead checks bound_calls ping_pong exact_sums adamw microbenchmark compare_gloo compare_jax compare_fsdp2 \
	    "compare_fsdp2 --drop-in" compare_strategies models hosts formats simulate; do \
	  echo "== $$comparison"; set -- $$comparison; \
	  $(BIN)/python bench/$$1.py $$2 --json "$(RESULTS)$$1$$2.json" || exit 1; done
	for suite in kernels collectives; do \
	  $(BIN)/python -m pytest bench/bench_$$suite.py --benchmark-json build/bench/$$suite.json || exit 1; done

figures:
	$(MAKE) bench RESULTS=bench/results/$(shell date -I)-$(shell nproc)-core-cpu-
	$(BIN)/python bench/report.py

# PYTORCH: a source tree of torch, whose tests are run as well.
torch-tests: setup
	mkdir -p build/bench
	$(BIN)/python bench/torch_tests.py --check $(if $(PYTORCH),--pytorch "$(PYTORCH)") --json build/bench/torch_tests.json

sanitize: sanitize-address sanitize-thread

sanitize-address: SANITIZERS := address,undefined
sanitize-thread: SANITIZERS := thread

# More tests at a time than cores: a third of their time they wait. The thread sanitizer's shadow of memory that is new
# fills in large pages: in small ones this takes a third of these tests' time.
sanitize-address sanitize-thread: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/$@ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DSHARDCOMM_TESTS=ON -DSHARDCOMM_SANITIZE=$(SANITIZERS) -DSHARDCOMM_CUDA=off >/dev/null
	$(BIN)/cmake --build build/$@
	cd build/$@ && TSAN_OPTIONS=no_huge_pages_for_shadow=0 setarch -R ../../$(BIN)/ctest -j3 --output-on-failure

arm: setup
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { echo "The cross compiler for aarch64 or qemu is missing (Debian: apt install g++-aarch64-linux-gnu qemu-user)"; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/arm --toolchain cmake/aarch64.cmake \
	  -DSHARDCOMM_TESTS=ON -DSHARDCOMM_CUDA=off >/dev/null
	$(BIN)/cmake --build build/arm
	cd build/arm && ../../$(BIN)/ctest -j2 --output-on-failure

faults: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/faults -DCMAKE_BUILD_TYPE=Release \
	  -DSHARDCOMM_TESTS=ON -DSHARDCOMM_CUDA=off >/dev/null
	$(BIN)/cmake --build build/faults --target faults_test
	build/faults/faults_test --full --table

model: setup
	$(BIN)/python tests/cpp/model/check.py --full
	$(BIN)/python tests/cpp/model/mutants.py

fuzz: setup
	$(BIN)/python -m pytest --hypothesis-profile fuzz tests/project/test_fuzz.py
	$(BIN)/python -m pytest --programs 10000 tests/interop/test_backend_programs.py
	$(BIN)/python -m pytest --blocks 90000 tests/copy/test_blocks.py

clean:
	rm -rf $(VENV) build dist *.egg-info shardcomm/_C*.so shardcomm/include shardcomm/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
