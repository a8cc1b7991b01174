# Holdfast. `make help` lists the targets.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.holdfast-installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Torch first, alone and pinned: any other request may pull gigabytes of CUDA packages.
TORCH := torch==2.13.0
PROTOS := $(sort $(wildcard proto/holdfast/v1/*.proto))
PYTEST := $(BIN)/python -m pytest
# A file stays with one worker; files go in order, those with long tests come first. Three for two
# cores: tests wait a fifth of their time.
WORKERS := 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests and benchmarks start hundreds of processes: none should compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup proto format check lint types imports test test-unit test-integration test-e2e \
	simulate simulate-mutants demo bench up down docs clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Holdfast needs Python 3.11 or newer as python3"; exit 1; }
	@test -x $(BIN)/pip || python3 -c 'import ensurepip' 2>/dev/null \
		|| { echo "python3 cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	@echo "== setting up $(VENV) (takes the network, once)"
	@test -x $(BIN)/pip || python3 -m venv --clear $(VENV)
	$(PIP) install "$(TORCH)" "numpy>=1.26,<3"
	$(PIP) install -e ".[torch,loader,cli,services,dev]"
	@touch $@

setup: $(STAMP) ## Make .venv with everything in it

proto: $(STAMP) ## Generate sdk/holdfast/v1 from proto/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=sdk \
		--grpc_python_out=sdk --mypy_out=sdk --mypy_grpc_out=sdk $(PROTOS)

format: $(STAMP) ## Put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(STAMP) ## House style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

imports: $(STAMP) ## Who may import whom
	$(BIN)/lint-imports --cache-dir .import_linter_cache

check: lint types imports test-unit ## Lint, types, import contracts, unit tests

test-unit: $(STAMP) ## Tests that start no process
	$(PYTEST) -q tests/unit tests/contract tests/property tests/golden tests/tidy

test-integration: $(STAMP) ## Tests against real services and databases
	$(PYTEST) $(PARALLEL) tests/integration

test-e2e: $(STAMP) ## Train, kill anywhere, restore, compare bit for bit
	$(PYTEST) $(PARALLEL) tests/e2e tests/crash

test: lint types imports ## Everything that must pass
	$(PYTEST) $(PARALLEL)

simulate: $(STAMP) ## Live through SEEDS=10000 histories of a cluster in trouble, on all cores
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000)

simulate-mutants: $(STAMP) ## Take each guard away; say in how many of at most SEEDS=2000 histories it shows
	$(BIN)/python -m tests.simulation.mutants --seeds $(or $(SEEDS),2000)

demo: $(STAMP) ## Train, lose a rank and a node, recover bit for bit; writes build/demo.json
	$(BIN)/python examples/demo/run.py

bench: $(STAMP) ## Measure against the peers; writes build/bench.json
	$(BIN)/python -m tests.bench

up: $(STAMP) ## Start the stack on this machine
	$(BIN)/holdfast up

down: $(STAMP) ## Stop it
	$(BIN)/holdfast down

docs: $(STAMP) ## Check the pages: links, error kinds, settings
	$(PYTEST) -q tests/tidy/test_in_step.py tests/contract/test_status.py tests/unit/metadata/test_events.py

clean: ## Remove what is generated, not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find sdk services tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
