# Every target sets up what it needs by itself. Start with `make demo`, then `make test`.
#
#   PYTHON=python3.11        which Python makes the virtual environment (3.11 or newer)
#   PYTEST_ARGS="-k client"  passed to pytest by `make test` and `make prove`
#   SYSTEM_PACKAGES=no       `make test` installs no Debian packages
#   LANES=                   `make test` runs one test at a time throughout
#   TORCH=2.15.0             another version of torch, in a virtual environment of its own

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

SEEDS ?= 2000
INPUTS ?= 2000
SEED ?= 0
HOURS ?= 1
SYSTEM_PACKAGES ?= yes
# For the tests that run no agents. Those that do (marked system) run one at a time.
LANES ?= -n 2 --dist worksteal
PYTEST_ARGS ?=
# pytest's exit code 5: with PYTEST_ARGS, one of the two passes may select no test.
MAY_BE_EMPTY := $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])
BENCH_ARGS ?= --quick

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-parts test-system prove prove-parts prove-system lint lint-rules lint-format lint-types docs format fuzz simulate soak bench bench-full evaluate wheel clean distclean system-packages

help:
	@echo 'make demo       train on two agents on this machine; a worker is killed halfway'
	@echo 'make test       run the test suite; as root on Debian, first install the system packages it needs'
	@echo 'make prove      run every test (with Slurm, systemd, all frameworks, time limits; over an hour), then simulate and fuzz'
	@echo 'make lint       run ruff, its formatter check and mypy --strict, and build the pages of docs'
	@echo 'make docs       build the pages of docs into `site`: mkdocs serves them with a search (mkdocs serve)'
	@echo 'make format     format the code'
	@echo 'make simulate   simulate faults in the protocol, SEEDS=$(SEEDS) seeds'
	@echo 'make fuzz       feed damaged inputs to every decoder and parser, INPUTS=$(INPUTS) to each'
	@echo 'make soak       train under random faults, HOURS=$(HOURS) for each store (c10d, etcd), SEED=0'
	@echo 'make bench      measure start, recovery, frameworks and rendezvous compared with torchrun (minutes)'
	@echo 'make bench-full all benchmarks in full (over an hour)'
	@echo 'make evaluate   make failures, and check what terminals and root causes say of them, as root (RUNS=10 SEED=1)'
	@echo 'make wheel      build the wheel of this commit, reproducibly, into dist'
	@echo 'make clean      remove caches and build results (distclean: also the virtual environment)'

demo: $(READY)
	@$(PY) examples/demo.py

setup: $(READY) system-packages

test: test-parts test-system

test-parts: $(READY) system-packages
	$(PY) -m pytest $(LANES) -m 'not system and not prove' $(PYTEST_ARGS) $(MAY_BE_EMPTY)

test-system: $(READY) system-packages
	$(PY) -m pytest -m 'system and not prove' $(PYTEST_ARGS) $(MAY_BE_EMPTY)

prove: prove-parts prove-system simulate fuzz

prove-parts: $(READY)
	tools/system-packages prove
	$(PY) -m pytest $(LANES) -m 'not system' --hypothesis-profile=random $(PYTEST_ARGS) $(MAY_BE_EMPTY)

prove-system: $(READY)
	tools/system-packages prove
	$(PY) -m pytest -m system --hypothesis-profile=random $(PYTEST_ARGS) $(MAY_BE_EMPTY)

lint: lint-rules lint-format lint-types docs

lint-rules: $(READY)
	$(PY) -m ruff check .

lint-format: $(READY)
	$(PY) -m ruff format --check .

lint-types: $(READY)
	$(PY) -m mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

fuzz: $(READY)
	INPUTS=$(INPUTS) $(PY) -m pytest $(LANES) --timeout=0 --hypothesis-profile=fuzz tests/fuzz

simulate: $(READY)
	$(PY) -m tests.simulator --seeds $(SEEDS)

soak: $(READY)
	$(PY) -m tests.soak --hours $(HOURS) --seed $(SEED)

bench: $(READY)
	$(PY) -m benchmarks $(BENCH_ARGS)

evaluate: $(READY)
	EVALUATE=all $(PY) -m pytest -rA tests/evaluation $(PYTEST_ARGS)

bench-full: $(READY)
	$(PY) -m benchmarks

wheel: $(READY)
	@tools/build-wheel $(PY) dist

$(READY): pyproject.toml constraints.txt tools/make-venv
	@tools/make-venv '$(PYTHON)' '$(VENV)' '$(TORCH)'

system-packages:
	@if [ '$(SYSTEM_PACKAGES)' = yes ]; then tools/system-packages; fi

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find src tests examples benchmarks tools -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf '$(VENV)' .venv-torch-*
