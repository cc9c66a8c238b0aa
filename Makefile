# Every target sets up what it needs: on a fresh machine `make demo` and `make test` work alone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all check bench bench-all docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,mpi,digits,tensorboard,examples,docs,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/penstock demo --out demo

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

# What fails beside other tests on a busy machine gets one more try, by itself; both tries stay in the log.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 20 || \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-all: check
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not gpu' --hypothesis-profile=search

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

bench-all: $(READY)
	$(BIN)/python benchmarks/run_all.py --all

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf .venv demo site build dist .pytest_cache .mypy_cache .ruff_cache
