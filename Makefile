# Everything runs inside .venv, which the first target that is asked for creates. A fresh machine needs python3.11+
# with pip and venv, git and make; node is fetched as a Python package where it is missing.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
# Where pip finds torch; empty: where it finds everything. PyTorch's index of CPU builds saves gigabytes of CUDA packages.
TORCH_INDEX ?=
# Tests start thousands of Python processes. Without files of bytecode, each would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-more chaos check bench dashboard types

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY) dashboard ## install everything into .venv

demo: $(READY) ## join three contributors on this machine, train, and generate text
	-@$(BIN)/python web/build_hook.py
	$(BIN)/share-compute demo

test: $(READY) ## run all unit tests, and one end-to-end test of each kind: 10 minutes on 2 cores
	-@$(BIN)/python web/build_hook.py
	$(BIN)/python -m pytest -m "not more and not thorough" -n auto --dist loadgroup

test-more: $(READY) ## run the other tests with machines, servers and browsers: 35 minutes on 2 cores
	-@$(BIN)/python web/build_hook.py
	$(BIN)/python -m pytest -m "more and not thorough" --ignore tests/platform --ignore tests/web -n auto --dist loadgroup

chaos: $(READY) ## inject all failures at all points, and run the tests that the other targets leave out
	$(BIN)/python -m pytest -m "chaos or thorough" -n auto --dist loadgroup

check: $(READY) ## lint, format, types, layers; and the dashboard if npm is there (an error without npm where CI is set)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cd benchmarks && MYPYPATH=.. ../$(BIN)/mypy --config-file ../pyproject.toml --allow-untyped-calls *.py
	$(BIN)/lint-imports
	@if command -v npm >/dev/null; then cd web && { test node_modules/.package-lock.json -nt package-lock.json || npm ci; } && npm run check; \
	else echo "npm is missing: the dashboard was not checked" >&2; \
	case "$${CI:-}" in ""|0|false) ;; *) exit 1;; esac; fi

BENCHES ?= $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

bench: $(READY) ## run every benchmark; BENCH_FLAGS=--quick for a smoke run
	@set -e; for script in $(BENCHES); do \
	  echo "== $$script" >&2; $(BIN)/python "$$script" $(BENCH_FLAGS); done

dashboard: $(READY) ## build the dashboard if its sources have changed
	@$(BIN)/python web/build_hook.py

types: $(READY) ## write the OpenAPI document and the dashboard's types anew
	cd web && npm run types

# torch comes alone and first, since an extra index would be asked for every package. --no-deps: that index may lack the
# pinned versions of what torch needs; the line after brings them.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'python 3.11 or newer is needed: make PYTHON=python3.11 setup')"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c "import torch" 2>/dev/null || \
	  $(BIN)/pip install -q --no-deps -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
