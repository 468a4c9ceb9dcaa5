# make demo: install into .venv and run the main job small (ARGS="epochs=2": for two epochs).   make test: install what is missing and run the tests.
# make simulation, make kills: many runs of the simulated parameter server, and many kills of real processes.
# make test-all: every case, where make test runs the short ones. Of the others .ci/run runs a fourth in turn.
# make test-gpu: what only a GPU shows; skipped on a machine without.
# make test-long: the tests marked "long" (sweeps over all models, large counts), which make test leaves out.
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Tests side by side: each waits for processes for a good part of its time. "make test JOBS=0" runs one after another.
JOBS ?= 4
INSTALL := $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python

.PHONY: audit demo test test-all test-long test-gpu gpu-packages simulation kills engines test-engines ray install install-dev install-site lint types floors wheel docker dockerfile docs site clean

demo: install
	$(BIN)/python -m trainer +recipe=resnet50_flowers_demo $(ARGS)
	@echo "to open the MLflow UI:        $(BIN)/mlflow ui      (then http://127.0.0.1:5000)"
	@echo "to run the full main job:     $(BIN)/python -m trainer +recipe=resnet50_flowers"

test: install-dev
	$(BIN)/python -m pytest -n $(JOBS)

test-all: install-dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not long and not engines" $(ARGS)

test-gpu: install-dev
	$(BIN)/python -m pytest -n 4 tests/gpu

# What a machine with a GPU needs beside its torch and torchvision, for one that reaches no registry: copy this tree there
# with build/gpu-packages, and type PYTHONPATH=build/gpu-packages:. python3 benchmarks/gpu.py
GPU_PYTHON ?= 3.12
gpu-packages: install-dev
	rm -rf build/gpu-packages
	$(BIN)/uv pip install --target build/gpu-packages --python-version $(GPU_PYTHON) --no-deps \
		'hydra-core<1.4' 'omegaconf<2.4' 'antlr4-python3-runtime<4.10' pyyaml psutil nvidia-ml-py safetensors rich \
		markdown-it-py mdurl pygments filelock fsspec pyzmq defusedxml packaging pytest pytest-xdist pytest-timeout \
		execnet iniconfig pluggy

test-long: install-dev
	$(BIN)/python -m pytest -n $(JOBS) -m "long and not engines" --timeout 7200

# Both are parts of .ci/run; the tests have a short case of each.
simulation: install-dev
	$(BIN)/python -m tests.simulation --seeds 0:4000 --jobs 2

# Real engines on this machine, where they are installed: packages slurmctld, slurmd, slurm-client, munge and
# postgresql of Debian.
engines: install-dev
	$(BIN)/python -m pytest -rs -m "engines and not long" tests/engines

test-engines: install-dev ray
	$(BIN)/python -m pytest -rs -m engines tests/engines

# Ray in an environment of its own (285 MB), which finds all else in that of the tests.
ray: install-dev
	[ -x build/ray/bin/python ] || $(BIN)/uv venv --python $(BIN)/python build/ray
	$(BIN)/uv pip install --python build/ray/bin/python 'ray[client]>=2.40'

kills: install-dev
	$(BIN)/python -m pytest -n $(JOBS) -m kills tests/faults

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-site: $(VENV)/.installed-site

# What is installed is remembered by a marker, so a second run installs nothing until pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/uv
	@echo "installing into $(VENV): about 5 GB of packages the first time (PyTorch with its GPU libraries)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/uv
	@echo "installing into $(VENV): what the tests and checks need"
	$(INSTALL) -e ".[dev]"
	@touch $(VENV)/.installed $@

$(VENV)/.installed-site: pyproject.toml | $(BIN)/uv
	$(INSTALL) -e ".[site]"
	@touch $(VENV)/.installed $@

# Some systems' Python has no ensurepip: pip from outside then fills an environment without pip.
$(BIN)/uv:
	@[ -n "$(PYTHON)" ] || { echo "trainer needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV)
	@if [ -x $(BIN)/pip ]; then $(BIN)/python -m pip install --quiet uv; \
	else $(PYTHON) -m pip --python $(BIN)/python install --quiet uv; fi

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/count.py --check
	$(BIN)/python .ci/words.py --check

types: install-dev
	$(BIN)/mypy

floors: install-dev
	$(BIN)/lint-imports --no-logo

audit: install-dev
	$(BIN)/python .ci/audit.py

wheel: install-dev
	$(BIN)/python .ci/check_wheel.py

dockerfile: install-dev
	$(BIN)/python .ci/check_dockerfile.py

docker:
	@if docker version >/dev/null 2>&1; then docker build -t trainer .; \
	else echo "no docker engine answers here: checking the Dockerfile instead"; $(MAKE) dockerfile; fi

docs: install
	$(BIN)/python docs/generate.py

# The documentation as a site, in build/site; a link that leads nowhere is an error.
site: install-site
	$(BIN)/zensical build --clean --strict

clean:
	rm -rf .cache build dist .venv-ci .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
