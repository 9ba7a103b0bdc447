# Every target sets up what it needs by itself. Start with `make demo`, then `make test`.
#
#   PYTHON=python3.11        which Python makes the virtual environment (3.11 or newer)
#   PYTEST_ARGS="-k client"  passed to pytest by `make test` and `make prove`
#   SYSTEM_PACKAGES=no       `make test` installs no Debian packages
#   LANES=                   `make test` runs one test at a time
#   TORCH=2.15.0             another version of torch, in a virtual environment of its own

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# uv and cyclonedx-py, for `make lock` and `make sbom`
TOOLS := .venv-tools

SEEDS ?= 2000
INPUTS ?= 1000000
SEED ?= 0
HOURS ?= 1
SYSTEM_PACKAGES ?= yes
# Most of the tests' time is waiting for leases; what stays together is said in tests/selection.py.
LANES ?= -n 3 --dist loadfile
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick

.DEFAULT_GOAL := help
.PHONY: help demo test prove lint lint-rules lint-format lint-types format fuzz simulate soak bench bench-full evaluate lock wheel check-wheel sbom clean distclean system-packages

help:
	@echo 'make demo       train on two agents on this machine; a worker is killed halfway'
	@echo 'make test       run the test suite; as root on Debian, first install the system packages it needs'
	@echo 'make prove      run every test, also those that make test takes in turn or leaves out, then simulate and fuzz'
	@echo 'make lint       run ruff, its formatter check and mypy --strict'
	@echo 'make format     format the code'
	@echo 'make simulate   simulate faults in the protocol, SEEDS=$(SEEDS) seeds'
	@echo 'make fuzz       feed damaged inputs to every decoder and parser, INPUTS=$(INPUTS), SEED=$(SEED)'
	@echo 'make soak       train under random faults, HOURS=$(HOURS) for each store (c10d, etcd), SEED=0'
	@echo 'make bench      measure start, recovery, rendezvous and overhead compared with torchrun (minutes)'
	@echo 'make bench-full all benchmarks in full (over an hour)'
	@echo 'make evaluate   make failures, and rate what terminals and root causes say of them, as root (EVALUATE_ARGS)'
	@echo 'make wheel      build the wheel of this commit, reproducibly, into dist (check-wheel: build it twice and compare)'
	@echo 'make sbom       write the software bill of materials, CycloneDX JSON, into dist'
	@echo 'make lock       write the locks again, after changing pyproject.toml or constraints.txt'
	@echo 'make clean      remove caches and build results (distclean: also the virtual environment)'

demo: $(READY)
	@$(PY) examples/demo.py

test: $(READY) system-packages
	$(PY) -m pytest $(LANES) $(PYTEST_ARGS)

prove: $(READY) system-packages
	$(PY) -m pytest $(LANES) --prove $(PYTEST_ARGS)
	$(MAKE) simulate fuzz

lint: lint-rules lint-format lint-types

lint-rules: $(READY)
	$(PY) -m ruff check .

lint-format: $(READY)
	$(PY) -m ruff format --check .

lint-types: $(READY)
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

fuzz: $(READY)
	$(PY) -m tests.fuzz --inputs $(INPUTS) --seed $(SEED)

simulate: $(READY)
	$(PY) -m tests.simulator --seeds $(SEEDS)
	$(PY) -m tests.simulator --seeds $$(( $(SEEDS) / 10 )) --forgers

soak: $(READY)
	$(PY) -m tests.soak --hours $(HOURS) --seed $(SEED)

bench: $(READY)
	$(PY) -m benchmarks $(BENCH_ARGS)

evaluate: $(READY)
	$(PY) -m evaluation $(EVALUATE_ARGS)

bench-full: $(READY)
	$(PY) -m benchmarks

lock: $(TOOLS)/.ready
	$(TOOLS)/bin/python tools/lock.py --uv $(TOOLS)/bin/uv

wheel: $(READY)
	@tools/build-wheel $(PY) dist

check-wheel: $(READY)
	@tools/check-wheel $(PY)

sbom: $(TOOLS)/.ready
	@$(TOOLS)/bin/python tools/sbom.py --tool $(TOOLS)/bin/cyclonedx-py --output dist/elastic-agent.cdx.json

$(READY): pyproject.toml constraints.txt $(wildcard locks/*.txt) tools/make-venv
	@tools/make-venv '$(PYTHON)' '$(VENV)' '$(TORCH)'

$(TOOLS)/.ready: locks/tools.txt
	@'$(PYTHON)' -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: -r locks/tools.txt
	@touch $@

system-packages:
	@if [ '$(SYSTEM_PACKAGES)' = yes ]; then tools/system-packages; fi

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests examples benchmarks evaluation tools -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf '$(VENV)' .venv-torch-* $(TOOLS)
