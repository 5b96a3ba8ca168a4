# Two commands from a fresh clone, with nothing but Python (3.11 or newer) and make: `make demo` and `make test`.

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
CONTRACT ?= $(wildcard ../shared/accept/contract.py)

BIN := .venv/bin
PYTEST := mkdir -p build && $(BIN)/pytest --basetemp=build/tests
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-system lint proof bench docs clean

help: ## show these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

venv: $(READY) ## .venv with everything that tests need; TORCH_INDEX=URL for another torch build (CPU only, CUDA, ROCm)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "resilient needs Python 3.11 or newer; '$(PYTHON)' is missing or older: name one with 'make venv PYTHON=/path/to/python3'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "resilient needs Python's venv module, which '$(PYTHON)' lacks: on Debian and Ubuntu it is in the package python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

demo: $(READY) ## a training that is killed and resumes on another number of ranks; keeps ./demo-run
	$(BIN)/python examples/demo.py

test: lint ## all checks and all tests, proofs with small counts
	@mkdir -p build/tmp
	$(if $(CONTRACT),TMPDIR=$(CURDIR)/build/tmp $(BIN)/python $(CONTRACT))
	$(PYTEST) -n $(JOBS)

test-system: $(READY) ## the report in a real browser; installs Debian's chromium (as root) where there is none; screenshots in build/report
	@command -v chromium >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends chromium; }
	$(PYTEST) tests/report

lint: $(READY) ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

proof: $(READY) ## every proof with its full count, resumable; figures into docs/proof.md and docs/fault-matrix.md; hours
	$(PYTEST) -m proof --full --timeout=0 -o faulthandler_timeout=0 -p no:randomly
	$(BIN)/python -m tests.proof_report docs/proof.md
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python benchmarks/fault_matrix.py --report docs/fault-matrix.md > build/fault-matrix.jsonl

bench: $(READY) ## what saves and restores cost here, beside their peers and the machine's limits; a few minutes; installs the peers
	$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python benchmarks/run_all.py --quick --json build/benchmarks.jsonl

docs: $(READY) ## run the code in the documents, and check that they cover what they must
	$(PYTEST) tests/docs

clean: ## remove what was made here: the environment, caches, test places, the demo's run
	rm -rf .venv build dist demo-run .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
