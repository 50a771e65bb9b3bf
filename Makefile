# Everything runs inside .venv, which the first target that is asked for creates. A fresh machine needs python3.11+
# with pip and venv, git and make; node is fetched as a Python package where it is missing.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
CPU    := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench dashboard types

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY) dashboard ## install everything into .venv

demo: $(READY) ## join three contributors on this machine, train, and generate text
	-@$(BIN)/python web/build_hook.py
	$(BIN)/share-compute demo

test: $(READY) ## run the tests
	-@$(BIN)/python web/build_hook.py
	$(BIN)/python -m pytest

check: $(READY) ## lint, format, types, layers; also of the dashboard where node is present
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v npm >/dev/null; then cd web && { test node_modules/.package-lock.json -nt package-lock.json || npm ci; } && npm run check; \
	else echo "node is not here: the dashboard was not checked"; fi

bench: $(READY) ## run every benchmark; BENCH_FLAGS=--quick for a smoke run
	@set -e; for script in benchmarks/*.py; do \
	  case $$script in benchmarks/_*) continue;; esac; \
	  echo "== $$script" >&2; $(BIN)/python "$$script" $(BENCH_FLAGS); done

dashboard: $(READY) ## build the dashboard if its sources have changed
	@$(BIN)/python web/build_hook.py

types: $(READY) ## write the OpenAPI document and the dashboard's types anew
	cd web && npm run types

# No NVIDIA driver, and PyTorch's CPU index answers within 3 s: its small build. Otherwise what pip is set to use.
# torch comes alone and first, since --extra-index-url would ask that index for every package. --no-deps: the index may
# lack the pinned versions of what torch needs; the line after brings them.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'python 3.11 or newer is needed: make PYTHON=python3.11 setup')"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c "import torch" 2>/dev/null || \
	  $(BIN)/pip install -q --no-deps -c constraints.txt torch $$(command -v nvidia-smi >/dev/null || \
	  $(PYTHON) -c "import urllib.request as u; u.urlopen('$(CPU)/torch/', timeout=3); print('--index-url $(CPU)')" 2>/dev/null)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
