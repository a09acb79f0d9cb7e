# Needs Python >= 3.11, a C++17 compiler and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIMULATOR := $(VENV)/.simulator
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc fedcore -type f -not -name '*.pyc')
CORES := $(shell nproc)
# Processes of tests or of mypy: each takes up to a GB.
WORKERS := $(shell nproc | awk '{ print $$1 < 16 ? $$1 : 16 }')
LEVELS := native
CXX_FILES := $(shell find csrc tests/native bench -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help quickstart test test-device lint format sanitize aarch64-check bench bench-gate gpu-check wheel-check clean
help:
	@sed -n 's/^## //p' Makefile

## make quickstart    install the simulator alone (one to three minutes), then compare FedAvg, MIFA and MimiC on
##                    handwritten digits (ten seconds)
quickstart: $(SIMULATOR)
	$(BIN)/fedcore run quickstart

## make test          install the rest (every framework and linter), then lint and run all tests, one process a core
test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10

## make test-device   the tests of kernels again, their arrays on a CUDA device, which is emulated (two minutes); with an
##                    empty FEDCORE_CUDA_DRIVER on a GPU
test-device: $(INSTALLED)
	FEDCORE_TESTS_ON=cuda $(BIN)/python -m pytest tests/kernels -n $(WORKERS) --dist worksteal --durations=10

## make lint          ruff, mypy, stubtest and clang-format, as `make test` runs them
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/python -m mypy.stubtest fedcore._core --allowlist tests/architecture/stubtest.txt

## make format        rewrite the sources as lint wants them
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

## make sanitize      the native core's own tests under ASan and UBSan, then under TSan (one or two minutes)
sanitize: sanitize-address sanitize-thread
sanitize-%: $(INSTALLED)
	$(BIN)/cmake -S tests/native -B build/native/$* -DFEDCORE_SANITIZE=$*
	$(BIN)/cmake --build build/native/$* --parallel $(CORES)
	$(BIN)/ctest --test-dir build/native/$* --parallel $(CORES) --output-on-failure --no-tests=error

## make aarch64-check the native tests on 64-bit Arm under QEMU, and the kernels' bits against this machine's (minutes)
aarch64-check: $(INSTALLED)
	PATH="$(abspath $(BIN)):$$PATH" tests/native/aarch64.sh

## make bench         time the kernels and rounds against their rivals and the floors
bench: $(INSTALLED)
	$(BIN)/python -m pytest bench

## make bench-gate    fail if a ratio is below bench/gate.toml; SHORT=--short takes small arrays (half a minute)
bench-gate: $(INSTALLED)
	$(BIN)/python -m bench.gate $(SHORT)

## make gpu-check     on a machine with a GPU, in nine minutes: build for it, then parity with the CPU, bandwidth, rivals,
##                    sanitizers; PYTHON has torch and pybind11, nothing is installed (bench/gpu/README.md)
gpu-check:
	$(PYTHON) -m bench.gpu.day

## make wheel-check   build the wheel, install it beside numpy alone, and run a round
wheel-check: $(INSTALLED)
	rm -rf build/wheel build/wheel-env
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -C cmake.define.FEDCORE_LEVELS=all -w build/wheel .
	$(PYTHON) -m venv --without-pip build/wheel-env
	$(BIN)/pip --python build/wheel-env/bin/python install -q --no-compile build/wheel/*.whl
	cd build && wheel-env/bin/python ../tests/architecture/core_alone.py

## make clean         remove the environment and everything built
clean:
	rm -rf $(VENV) build dist

# The build tools go in first and the package is built with them, not in isolation, so that a rebuild compiles only
# what changed. The quickstart compiles this machine's level of instructions alone, the tests all of them, at once. An
# environment of before holds the package under its old name, fedcore, which would be in the way. Bytecode is made
# where it is imported: of all of torch and SciPy it takes longer than the quickstart, of pip itself four seconds, which
# the pip that is there saves. The pip of Python 3.11 takes twice as long as later ones.
$(SIMULATOR): $(SOURCES)
	@echo "Installing the simulator (torch, scikit-learn, matplotlib, ...) into $(VENV), 1 GB, or 5 with CUDA's torch, and"
	@echo "compiling the native module: one to three minutes and the download. Only this once."
	@test -x $(BIN)/pip || { $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -q --no-compile pip; } 2>/dev/null || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --no-compile -c constraints.txt "pip>=25" "scikit-build-core>=0.10" "pybind11>=2.13" cmake ninja
	@! ls -d $(VENV)/lib/python*/site-packages/fedcore-*.dist-info >/dev/null 2>&1 || $(BIN)/pip uninstall -qq -y fedcore
	@$(BIN)/pip install -q --no-compile -c constraints.txt --no-build-isolation \
		-C cmake.define.FEDCORE_LEVELS=$(LEVELS) -e ".[sim]"
	@touch $@

# FedLab comes as source, which takes setuptools and wheel to build.
$(INSTALLED): LEVELS := all
$(INSTALLED): $(SIMULATOR)
	@echo "Installing what the tests need (Flower, NVFlare, pfl, FedLab, the linters): another GB. Only this once."
	@$(BIN)/pip install -q -c constraints.txt setuptools wheel
	@$(BIN)/pip install -q -c constraints.txt --no-build-isolation \
		-C cmake.define.FEDCORE_LEVELS=$(LEVELS) -e ".[dev]"
	@touch $@
