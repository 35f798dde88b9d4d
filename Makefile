# Every target works on a fresh machine: it makes .venv and installs what it needs, once.
#   make prove PYTHON=python3.12      chooses the interpreter that .venv is made with
# torch comes from pip's package index. Where that offers only a CUDA build (several GB on Linux),
# PIP_EXTRA_INDEX_URL can name PyTorch's index of CPU builds; the pin takes those too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PROVE := $(VENV)/.prove
TEST := $(VENV)/.test
FAULT := vllm==0.30.0
NEWEST := vllm==0.33.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-test prove matrix report gen-tests conformance test coverage coverage-generated selfcheck check bench bench-peers mutants clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(PROVE) ## make .venv with what proving needs: z3 and small libraries

setup-test: $(TEST) ## the same, with what the tests and the vllm tier need: torch (CPU), pytest

prove: $(PROVE) ## prove or refute each theorem for the default targets
	$(BIN)/capproof prove

matrix: $(PROVE) ## the same for every known release, into docs/matrix.md
	$(BIN)/capproof prove --matrix docs/matrix.md \
	  $$($(BIN)/capproof targets | sed -n 's/^\(vllm==[^ ]*\)  known.*/--target \1/p')

report: $(PROVE) ## verdicts, counterexamples and charts of every known release, as a site in report/
	$(BIN)/capproof report --out report \
	  $$($(BIN)/capproof targets | sed -n 's/^\(vllm==[^ ]*\)  known.*/--target \1/p')

gen-tests: $(PROVE) ## write generated_tests/ anew
	$(BIN)/capproof gen-tests

conformance: $(TEST) ## run generated_tests/ on the real managers, both tiers
	$(BIN)/capproof conform --tier core -- -n logical
	$(BIN)/capproof conform --tier vllm -- -n logical

# The tests find the verdicts that `prove` keeps, and see that `generated_tests/` is current.
# The core tier runs 0.30.0, the vllm tier the newest release; `make conformance` runs both tiers on
# all default targets.
test: check ## everything that CI runs
	$(BIN)/capproof prove
	$(BIN)/python -m pytest -n logical --dist worksteal
	$(BIN)/capproof conform --tier core --target $(FAULT) -- -n logical
	$(BIN)/capproof conform --tier vllm --target $(NEWEST) -- -n logical

coverage: $(TEST) ## lines and branches that the tests reach
	$(BIN)/python -m pytest -n logical --dist worksteal --cov --cov-report=term

coverage-generated: $(TEST) ## branches of vLLM that generated_tests/ take, into docs/coverage.md
	$(BIN)/python scripts/coverage_of_vllm.py --write docs/coverage.md

selfcheck: $(TEST) ## lifted and real code, and workloads, on every known release
	CAPPROOF_ALL_RELEASES=1 $(BIN)/python -m pytest -n logical --dist worksteal \
	  tests/test_lift.py tests/test_engine.py tests/test_groups.py tests/test_generate.py \
	  tests/test_findings.py tests/test_memory.py tests/test_tutorial.py tests/test_lives.py

check: $(TEST) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python scripts/docs.py --check

bench: $(TEST) ## measure, on an idle machine
	$(BIN)/python scripts/bench.py

bench-peers: $(TEST) ## the same questions to Hypothesis, enumeration and CrossHair, on an idle machine
	$(BIN)/python scripts/bench_peers.py --write docs/benchmarks.md

mutants: $(TEST) ## which changes to the lifted functions proofs, generated tests and lives notice
	$(BIN)/python scripts/mutants.py --write docs/mutants.md

clean: ## remove .venv and what the tools cached here; fetched trees stay
	rm -rf $(VENV) build *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment: a stamp that is newer than the lists it was installed from ----------------

# $(call at-least,MINOR,WHAT): refuses a .venv whose Python is older than 3.MINOR, in one line.
define at-least
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, $(1)))' || { \
	  echo "$(2) needs Python 3.$(1) or newer, $(VENV) has $$($(BIN)/python -V): make clean, then add PYTHON=python3.$(1) (or newer)" >&2; exit 1; }
endef

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(PROVE): requirements/prove.txt pyproject.toml | $(BIN)/python
	$(call at-least,10,capproof)
	$(PIP) -r requirements/prove.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(TEST): requirements/test.txt $(PROVE)
	$(call at-least,11,The full set-up for tests)
	$(PIP) -r requirements/test.txt
	@touch $@
