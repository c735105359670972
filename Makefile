# `make run` and `make test` need Python 3.10 or newer, pip and make; everything else goes into .venv.
#
#   PYTHON    the interpreter that .venv is made from
#   PIP_ARGS  more arguments for pip, as "--extra-index-url https://download.pytorch.org/whl/cpu"
#   WORKERS   how many tests run at the same time

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# Of the ten thousand files that torch and the rest bring, those few that are imported are compiled when they are.
INSTALL := PYTHONWARNINGS=ignore $(PIP) install --no-compile --constraint constraints.txt $(PIP_ARGS)

# An environment around this one, or settings that send packages elsewhere, must not reach ours; and what one of the
# many processes of the tests has compiled, the next one finds.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
unexport PYTHONDONTWRITEBYTECODE

# What is fetched from one place is fetched while something else is installed or looked at.
MAKEFLAGS += --jobs=2

# Tests run next to each other, and more of them than there are cores, since many wait for a dead peer to be missed:
# threads that wait have to give their core back.
pytest: export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help run test check proofs cuda pytest compiled install install-test browser iproute2 stand-in lint types docs \
  format clean

help:
	@echo "make run     install dure into .venv and compare a system of every family on the built-in digits"
	@echo "make test    lint, types, documentation, tests"
	@echo "make check   lint, types, and the tests that start no other process: for a change under way"
	@echo "make proofs  the slow tests that make test leaves out: before a release"
	@echo "make cuda    the tests that need a GPU"
	@echo "make lint    ruff, check and format"
	@echo "make types   mypy"
	@echo "make docs    the documentation as HTML, in site/"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove .venv and all that was built"

run: install
	@out="runs/compare-digits-$$(date +%Y%m%d-%H%M%S)"; \
	$(BIN)/dure compare digits --out "$$out" && echo "open it in a browser: file://$$PWD/$$out/report.html"

# Types are looked at while the first tests run.
test: lint types pytest

# What most changes break first; it takes less than two minutes on two cores.
QUICK := tests/test_house.py tests/test_references.py tests/contracts tests/data tests/federated/aggregate \
  tests/federated/server tests/fleet tests/parallel/pipeline/test_schedule.py tests/protocol tests/randomness \
  tests/record tests/tensors

check: lint types
	@echo "quick tests"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(QUICK)

pytest: | lint browser iproute2 stand-in compiled
	@echo "documentation and tests"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0 --keep-durations -m "not proof"

# All workers of the tests read all test files: they find them compiled, and not each compiles all by itself.
compiled: install-test
	@$(BIN)/python -m pytest --collect-only -qq -m "not proof" >/dev/null || true

proofs: export OMP_WAIT_POLICY ?= PASSIVE
proofs: install-test browser iproute2 stand-in
	@$(BIN)/python -m pytest -m proof -o faulthandler_timeout=3600

# On a machine with a GPU, in less than ten minutes. It uses the torch that is installed in .venv, which has to be a
# build for the GPU (make PIP_ARGS=... cuda).
cuda: install-test
	@$(BIN)/python -m pytest -n 4 --dist loadfile tests/cuda

lint: install-test
	@echo "lint"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }

types: install-test
	@echo "types"
	@$(BIN)/mypy --no-error-summary

docs: install-test
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "open it in a browser: file://$$PWD/site/index.html"

format: install-test
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

# Debian's python3 without python3-venv cannot put pip into a new environment, but its own pip can.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	|| { echo "dure needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --quiet --python $(BIN)/python install $(PIP_ARGS) pip; } \
	|| { rm -rf $(VENV); echo "no environment could be made: apt-get install python3-venv" >&2; exit 1; }

CORE := $(wildcard src/dure/*/*/core/*.*) $(wildcard src/dure/collectives/shared_memory/core/*/*)

# The pip of a new environment is as old as its Python: a newer one needs half the time for what follows.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@$(INSTALL) --upgrade pip || echo "pip stays as it is"
	@echo "installing torch (about 200 MB, more where the index has only the CUDA build)"
	@$(INSTALL) torch==2.13.0 setuptools
	@touch $@

$(VENV)/.installed: pyproject.toml $(CORE) $(VENV)/.torch
	@echo "installing dure and what else it needs"
	@$(INSTALL) --no-build-isolation --editable '.[report,deploy,privacy]'
	@touch $@

# It is dure with all that `run` needs, and more: what was compiled here need not be compiled again.
$(VENV)/.installed-test: pyproject.toml $(CORE) $(VENV)/.torch
	@echo "installing dure and what the tests need"
	@$(INSTALL) --no-build-isolation --editable '.[test]'
	@touch $(VENV)/.installed $@

# The tests of the report look at it in a browser. Without one they are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "installing chromium"; \
	  as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	  command -v apt-get >/dev/null \
	  && { $$as_root apt-get -qq update && $$as_root apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	  || echo "chromium could not be installed: tests of the report in a browser are skipped"; }

# The tests of groups that span hosts emulate two with network namespaces, which takes root. Without they are skipped.
iproute2: | browser
	@[ "$$(id -u)" != 0 ] || command -v ip >/dev/null || { \
	  echo "installing iproute2"; \
	  command -v apt-get >/dev/null \
	  && { apt-get -qq update && apt-get -qq install -y --no-install-recommends iproute2; } >/dev/null 2>&1 \
	  || echo "iproute2 could not be installed: tests of groups that span hosts are skipped"; }

# Tests of devices run on a stand-in for a GPU, which is compiled here. Without a C++ compiler they are skipped.
stand-in: install-test | iproute2
	@command -v g++ >/dev/null || { \
	  echo "installing g++"; \
	  as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	  command -v apt-get >/dev/null \
	  && { $$as_root apt-get -qq update && $$as_root apt-get -qq install -y --no-install-recommends g++; } >/dev/null 2>&1 \
	  || echo "g++ could not be installed: tests of devices are skipped"; }
	@PYTHONPATH=tests $(BIN)/python -c "import stand_in_device" 2>/dev/null || true
