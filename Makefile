# Every target sets up what it needs: on a fresh machine `make demo` and `make test` work alone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all check types arrows bench bench-all docs clean

setup: $(READY)

# pip compiles every file of torch, for half a minute: where Python may not write bytecode, each process of a test would.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,mpi,digits,tensorboard,examples,docs,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/penstock demo --out demo

check: $(READY)
	$(MAKE) --no-print-directory --jobs 2 types arrows

types:
	$(BIN)/mypy

arrows:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest tests/test_imports.py

# Files in the order of their folders: short ones come last, and codecs are compiled before others train with them.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

# What `check` has tested is left out.
test: check
	$(BIN)/python -m pytest $(WORKERS) --durations 20 --ignore tests/test_imports.py

test-all: check
	$(BIN)/python -m pytest $(WORKERS) -m 'not gpu' --hypothesis-profile=search

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

bench-all: $(READY)
	$(BIN)/python benchmarks/run_all.py --all

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf .venv demo site build dist .pytest_cache .mypy_cache .ruff_cache
