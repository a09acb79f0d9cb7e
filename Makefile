# Needs Python >= 3.11, a C++17 compiler and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SIMULATOR := $(VENV)/.simulator
INSTALLED := $(VENV)/.installed
RELEASE := $(VENV)/.release
DOCS := $(VENV)/.docs
STUB := build/stub/fedcore/_core.pyi
SOURCES := pyproject.toml constraints.txt locks/sim.txt locks/dev.txt CMakeLists.txt $(shell find csrc fedcore -type f -not -name '*.pyc')
CORES := $(shell nproc)
# Processes of tests or of mypy: each takes up to a GB.
WORKERS := $(shell nproc | awk '{ print $$1 < 16 ? $$1 : 16 }')
LEVELS := native
# A test that takes longer hangs: its process shows where and ends, and pytest-xdist names the test.
LONGEST := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(LONGEST)
CXX_FILES := $(shell find csrc tests/native bench -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

# For every Python and platform at once; the installing user chooses the index.
LOCK := $(BIN)/uv pip compile -q pyproject.toml --universal --python-version 3.11 --generate-hashes --upgrade \
	-c constraints.txt --no-emit-package torch --no-emit-package torchvision --no-annotate --no-header

# Install a group of packages without changing installed ones: a newer version of a shared package may break the tests.
GROUP := $(BIN)/pip freeze -q --exclude-editable > $(VENV)/.there && $(BIN)/pip install -q -c $(VENV)/.there --group

# Images for containers often forbid Python to keep bytecode. Each process of a test or a run would then compile all its
# imports, also torch and SciPy: five seconds instead of two. PYTHONPYCACHEPREFIX sets another place for bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart tutorials stub test test-device test-level test-deployment test-appfl test-newest conformance test-endurance lint format sanitize aarch64-check bench bench-gate gpu-check wheel-check wheels \
	wheels-check wheels-emulated sdist-check workflows bench-commits mutants sbom lock docs docs-links docs-check docs-serve clean
help:
	@sed -n 's/^## //p' Makefile

## make quickstart    install the simulator alone (one to three minutes), then compare FedAvg, MIFA and MimiC on
##                    handwritten digits (ten seconds)
quickstart: $(SIMULATOR)
	$(BIN)/fedcore run quickstart

## make tutorials     run the tutorials as programs, in the environment of the quickstart (under a minute)
tutorials: $(SIMULATOR)
	@for each in docs/tutorials/*.py; do MPLBACKEND=agg $(BIN)/python $$each || exit 1; done

## make test          install the rest (every framework and linter), then run all tests, one process a core, and lint
##                    beside them
test: $(INSTALLED)
	@mkdir -p build; $(MAKE) lint >build/lint.log 2>&1 & lint=$$!; \
		$(TESTS); tests=$$?; \
		wait $$lint; lint=$$?; cat build/lint.log; exit $$((tests || lint))

## make test-device   the tests of kernels again, their arrays on a CUDA device, which is emulated (minutes); with an
##                    empty FEDCORE_CUDA_DRIVER on a GPU
test-device: $(INSTALLED)
	FEDCORE_TESTS_ON=cuda $(TESTS) tests/kernels

## make test-level    the tests of kernels and sampling at LEVEL=baseline, avx2 or avx512
test-level: $(INSTALLED)
	FEDCORE_ISA=$(LEVEL) $(TESTS) tests/kernels tests/sampling

## make test-deployment the adapters with the frameworks' real processes (minutes)
test-deployment: $(INSTALLED)
	$(BIN)/python -m pytest -m deployment

## make test-appfl    the adapter in APPFL's own environment, 170 packages that are no part of the others (minutes)
test-appfl: $(SIMULATOR)
	test -x build/appfl/bin/python || $(PYTHON) -m venv build/appfl
	$(BIN)/pip --python build/appfl/bin/python install -q -c constraints.txt -e ".[appfl]" pytest hypothesis ml_dtypes
	build/appfl/bin/python -m pytest tests/adapters/appfl tests/adapters/test_contract.py
	build/appfl/bin/python -m pytest -m deployment tests/conformance/test_processes.py -k appfl

## make conformance   the averages of the frameworks beside fedcore's, into docs/conformance.md: an environment of each, in
##                    build/conformance (minutes each, once); ENVIRONMENTS="--python appfl=PATH" names others
conformance: $(INSTALLED)
	$(BIN)/python -m tests.conformance.table $(ENVIRONMENTS)

## make test-newest    the adapters' tests against the newest flwr, nvflare, pfl, fedlab and appfl on the index, each in an
##                     environment of its own (half an hour); test-newest-flower, say, is one of them
test-newest: $(addprefix test-newest-,flower nvflare pfl fedlab appfl)
test-newest-%:
	test -x build/newest/$*/bin/python || $(PYTHON) -m venv build/newest/$*
	build/newest/$*/bin/pip install -q -U -e ".[$*,sim]" pytest hypothesis ml_dtypes
	build/newest/$*/bin/python -m pytest -W default tests/adapters/$* tests/adapters/test_contract.py

## make test-endurance the long forms of tests of which `make test` runs short ones: kills, failing calls, losses of power (hours);
##                    ROOMS="tests/cluster tests/store" says which
test-endurance: $(INSTALLED)
	$(BIN)/python -m pytest -m endurance $(ROOMS)

## make mutants       small changes to the rooms of methods, patterns, topologies, the server and the adapters, of which each
##                    should fail a test; MUTANTS="fedcore/server --sample 300" says which (hours)
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(MUTANTS)

## make lint          ruff, clang-format, mypy and the native module's stub, as `make test` runs them
lint: $(STUB)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy --num-workers $(WORKERS)
	@diff fedcore/_core.pyi $(STUB) || { echo "fedcore/_core.pyi is not that of the native module: make stub"; exit 1; }

## make stub          write fedcore/_core.pyi, the types of the native module, from its signatures
stub: $(STUB)
	cp $(STUB) fedcore/_core.pyi

# The values of its attributes differ between builds.
.PHONY: $(STUB)
$(STUB): $(INSTALLED)
	@$(BIN)/pybind11-stubgen fedcore._core -o build/stub
	@sed -i -E '/^__all__/d; s/^(\w+: str) = .*/\1/; s/numpy\.ndarray/numpy.typing.NDArray[typing.Any]/' $@
	@$(BIN)/ruff check -q --select I --fix $@
	@$(BIN)/ruff format -q $@

## make format        rewrite the sources as lint wants them
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

## make sanitize      the native core's own tests under ASan and UBSan, then under TSan (half an hour)
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

## make bench-gate    fail if a ratio is below bench/gate.toml; SHORT=--short takes small arrays (under a minute)
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

## make wheels        the sdist, and wheels for Linux of every Python on PATH, into dist (minutes; PYTHONS="..." names them);
##                    MACHINES="x86_64 aarch64" cross-compiles too, which takes Debian's g++-aarch64-linux-gnu
wheels: $(RELEASE)
	$(BIN)/python -m release.wheels $(addprefix --machine ,$(MACHINES)) $(PYTHONS)

## make wheels-check  install each wheel of dist that runs here without a compiler, and run tests of kernels and the store
wheels-check: $(RELEASE)
	$(BIN)/python -m release.installed

## make wheels-emulated run a round and the tests of kernels with the wheel for 64-bit Arm under QEMU (most of an hour; takes
##                    Debian's apt-get and qemu-user-static); PYTEST="tests/store -n 2" says which tests, and how
wheels-emulated: $(RELEASE)
	$(BIN)/python -m release.emulated $(PYTEST)

## make workflows     hold .github/workflows to their schema, and run their cheap steps; STEPS=all runs every one (hours)
workflows: $(RELEASE)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/python -m release.workflows $(STEPS)

## make bench-commits compare this tree's kernels with those of another commit, in turn: BASE=main
bench-commits: $(INSTALLED)
	$(BIN)/python -m bench.commits $(BASE)

## make sdist-check   build the sdist, install it by a build in isolation beside numpy alone, and run a round
sdist-check: $(RELEASE)
	rm -rf build/sdist-env
	$(BIN)/python -m release.wheels --sdist
	$(PYTHON) -m venv --without-pip build/sdist-env
	$(BIN)/pip --python build/sdist-env/bin/python install -q --no-compile dist/*.tar.gz
	cd build && sdist-env/bin/python ../tests/architecture/core_alone.py

## make sbom          what the simulator's lock holds, as CycloneDX, into dist
sbom: $(RELEASE)
	mkdir -p dist
	$(BIN)/cyclonedx-py requirements locks/sim.txt --pyproject pyproject.toml --of JSON -o dist/fedcore.cdx.json

## make lock          renew the locks: the newest of everything that the constraints allow, with hashes
lock: $(RELEASE)
	$(LOCK) --extra dev --group build -o locks/dev.txt
	$(LOCK) --extra sim --group build -c locks/dev.txt -o locks/sim.txt

## make docs          check the spelling, build the site strictly into build/site, run its tutorials, and look for broken
##                    links and public names without a place in it (a minute)
docs: $(DOCS)
	$(BIN)/codespell
	rm -rf build/tutorials
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python -m release.site build/site

## make docs-links    request every link of the built site to another one (needs a network)
docs-links: docs
	$(BIN)/python -m release.site build/site --external

## make docs-check    the built site and the quickstart's report in Chromium (apt-get install chromium): searches, console
##                    errors, contrast, screenshots in build/screenshots (minutes)
docs-check: docs
	@$(GROUP) browser
	rm -rf build/report
	$(BIN)/fedcore run quickstart --out build/report
	$(BIN)/python -m release.browser build/site build/report/report.html

## make docs-serve    the site on http://127.0.0.1:8000, built again when a page changes
docs-serve: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

## make clean         remove the environment and everything built
clean:
	rm -rf $(VENV) build dist

# Install the locks first: the build tools and all packages but torch and NVIDIA's, whose files differ for CPUs and for
# each CUDA. The package is built with these tools, not in isolation, so that a rebuild compiles only changed sources. The
# quickstart compiles only this machine's instruction set, the tests compile all of them. An old environment may have the
# package under its old name, fedcore, which must go. Bytecode is made on import: for all of torch and SciPy it would take
# longer than the quickstart. (For the tests it is made before: under pytest, warnings that come from compiling the sources
# of other packages are errors.) The pip of Python 3.11 takes twice as long as later ones.
$(SIMULATOR): $(SOURCES)
	@echo "Installing the simulator (torch, scikit-learn, matplotlib, ...) into $(VENV), 1 GB, or 5 with CUDA's torch, and"
	@echo "compiling the native module: one to three minutes and the download. Only this once."
	@test -x $(BIN)/pip || { $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install -q --no-compile pip; } 2>/dev/null || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --no-compile -c constraints.txt "pip>=25.1"
	@$(BIN)/pip install -q --no-compile --no-deps --require-hashes -r locks/sim.txt
	@! ls -d $(VENV)/lib/python*/site-packages/fedcore-*.dist-info >/dev/null 2>&1 || $(BIN)/pip uninstall -qq -y fedcore
	@$(BIN)/pip install -q --no-compile -c constraints.txt --no-build-isolation \
		-C cmake.define.FEDCORE_LEVELS=$(LEVELS) -e ".[sim]"
	@touch $@

$(INSTALLED): LEVELS := all
$(INSTALLED): $(SIMULATOR)
	@echo "Installing what the tests need (Flower, NVFlare, pfl, FedLab, the linters): another GB. Only this once."
	@$(BIN)/pip install -q --no-deps --require-hashes --no-build-isolation -r locks/dev.txt
	@$(BIN)/pip install -q -c constraints.txt --no-build-isolation \
		-C cmake.define.FEDCORE_LEVELS=$(LEVELS) -e ".[dev]"
	@touch $@

$(RELEASE): $(INSTALLED)
	@$(GROUP) release
	@touch $@

$(DOCS): $(SIMULATOR)
	@$(GROUP) docs
	@touch $@
