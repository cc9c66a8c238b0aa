# Every target sets up what it needs: on a fresh machine `make demo` and `make test` work alone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all test-mxnet check lint types arrows site suite bench bench-all soak docs clean

setup: $(READY)

# Bytecode is written when a module is first imported, whatever the environment says: most of what pip would compile is
# never imported, and without bytecode every process of a test would compile torch anew.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
EXTRAS := torch,mpi,plot,frameworks,digits,tensorboard,examples,docs,dev

# Two processes at a time fetch and unpack what constraints.txt pins, every other line each; pip then resolves the whole,
# and adds what they could not install.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	for half in 0 1; do awk "NR % 2 == $$half" constraints.txt > .venv/half$$half.txt; $(PIP) --no-deps --requirement .venv/half$$half.txt & done; wait
	$(PIP) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $(READY)

# Where nothing is set up yet, only what the demo needs.
DEMO := $(if $(wildcard $(READY)),$(READY),.venv/.demo)

.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --constraint constraints.txt --editable '.[torch,plot]'
	touch .venv/.demo

demo: $(DEMO)
	$(BIN)/penstock demo --out demo

check:
	$(MAKE) --no-print-directory --jobs 2 lint types arrows site

lint types arrows site suite: $(READY)

types:
	$(BIN)/mypy

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

arrows:
	$(BIN)/python -m pytest tests/test_imports.py

# Files in the order of their folders: short ones come last, and codecs are compiled before others train with them.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# Types are checked where tests leave a core idle; what else `check` does is among the tests.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types suite

suite:
	$(BIN)/python -m pytest $(WORKERS) --durations 20

test-all: lint types
	$(BIN)/python -m pytest $(WORKERS) -m 'not gpu' --hypothesis-profile=search

# MXNet's last release wants a numpy below 2: an environment of its own.
test-mxnet: .venv-mxnet/.ready
	.venv-mxnet/bin/python -m pytest tests/mxnet

.venv-mxnet/.ready: pyproject.toml tests/mxnet/requirements.txt
	test -x .venv-mxnet/bin/python || $(PYTHON) -m venv .venv-mxnet
	.venv-mxnet/bin/pip install --quiet --disable-pip-version-check --requirement tests/mxnet/requirements.txt
	.venv-mxnet/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch .venv-mxnet/.ready

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

bench-all: $(READY)
	$(BIN)/python benchmarks/run_all.py --all

# Kills and other hostile conditions, for hours. Kills and damage go on where their records in benchmarks/results/ stop;
# links, elastic and iterations start anew. Fails where anything was not good.
soak: $(READY)
	$(BIN)/python benchmarks/soak/run.py

docs: site

# Strict: a broken link, or a page that the navigation leaves out, fails.
site:
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf .venv .venv-mxnet demo site build dist .pytest_cache .mypy_cache .ruff_cache
