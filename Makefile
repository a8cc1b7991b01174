# Holdfast. `make help` lists the targets.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.holdfast-installed
INSTALL := -m pip --quiet --disable-pip-version-check install
# The generator of sdk/holdfast/v1 is older than what we run on, and has an environment of its own.
PROTO := $(VENV)/proto
PROTO_STAMP := $(PROTO)/.holdfast-installed
# The builder of the site of docs/, which no test needs.
SITE := $(VENV)/site
SITE_STAMP := $(SITE)/.holdfast-installed
# The oldest releases that pyproject.toml allows.
OLDEST := $(VENV)/oldest
OLDEST_STAMP := $(OLDEST)/.holdfast-installed
OLDEST_TORCH := $(VENV)/oldest-torch
OLDEST_TORCH_STAMP := $(OLDEST_TORCH)/.holdfast-installed
# Torch first, alone and pinned: any other request may pull gigabytes of CUDA packages.
TORCH := torch==2.13.0
GPU := $(wildcard /dev/nvidia0 /dev/kfd)
define NO_GPU
== This machine has no GPU, and pip is about to fetch $(TORCH). From PyPI that is the build with
== CUDA: 5 GB with its libraries. To get the build for CPUs (0.2 GB) instead, stop this and run
== PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup
endef
# Version 2, else 1.29.
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
KUBERNETES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/holdfast/kubernetes
PROTOS := $(sort $(wildcard proto/holdfast/v1/*.proto))
PYTEST := $(BIN)/python -m pytest
# A file stays with one worker; files go in order, those with long tests come first. Three for two
# cores: tests wait a fifth of their time.
WORKERS := 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests and benchmarks start hundreds of processes: none should compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# Few and quick ones: each part that calls a library of others.
NEED_TORCH := $(addprefix tests/unit/,core/test_ids.py core/test_model_sizes.py format/test_segment.py bucket/test_holding.py)
PINS_TESTS := $(addprefix tests/unit/,format persistence bucket) \
	$(addprefix tests/unit/metadata/test_dashboard_,pages.py views.py) \
	$(addprefix tests/unit/agent/test_,isal.py reporter.py service.py shell.py summing.py unchanged_parts.py) \
	$(addprefix tests/contract/test_,codec.py object_store.py object_store_uploads.py queue.py queue_faults.py status.py transport.py) \
	tests/integration/rpc \
	$(addprefix tests/integration/metadata/test_,users.py rest_users.py rest_edges.py process.py) \
	$(addprefix tests/integration/objectstore/test_,direct.py s3_access.py) \
	$(addprefix --ignore ,$(NEED_TORCH)) -k "not ceph and not ask_as_operator"

# A minute. Of all tests of state four fail with torch 2.8: L-BFGS warns of its own closure, and a
# DTensor that two axes deal out unevenly is dealt otherwise there, and refused.
PINS_TORCH_TESTS := tests/unit/snapshot $(NEED_TORCH) \
	$(addprefix tests/unit/state/test_,capture.py freed_memory.py kinds_of_tensors.py layouts.py partial.py) \
	-k "not lbfgs"

export NO_GPU
.DEFAULT_GOAL := help
.PHONY: help setup proto format check lint types imports test test-unit test-integration test-e2e test-pins \
	test-pins-torch test-rdma test-kubernetes test-all-else gpu simulate simulate-mutants demo bench up down docs clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(BIN)/pip:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Holdfast needs Python 3.11 or newer as python3"; exit 1; }
	@python3 -c 'import ensurepip' 2>/dev/null \
		|| { echo "python3 cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	python3 -m venv --clear $(VENV)

$(STAMP): pyproject.toml | $(BIN)/pip
	@echo "== setting up $(VENV) (takes the network, once)"
	$(if $(GPU),,@test -d $(BIN)/../lib/python3*/site-packages/torch || echo "$$NO_GPU")
	$(BIN)/python $(INSTALL) --no-compile "$(TORCH)" "numpy>=1.26,<3"
	$(BIN)/python $(INSTALL) --no-compile -e ".[torch,loader,cli,services,traces,elastic,kubernetes,ray,tune,dev]"
	@# DeepSpeed's build needs these and the torch that is here; it compiles nothing.
	$(BIN)/python $(INSTALL) --no-compile "setuptools>=77,<90" "wheel>=0.45,<1" "ninja>=1.11,<2"
	DS_BUILD_OPS=0 $(BIN)/python $(INSTALL) --no-compile --no-build-isolation "$(TORCH)" "deepspeed>=0.19.8,<0.20"
	@# On all cores, which pip does not; some files are for other versions of Python.
	@$(BIN)/python -m compileall -q -j 0 $(CURDIR)/$(VENV)/lib >/dev/null || true
	@touch $@

$(PROTO_STAMP): proto/requirements.txt | $(BIN)/pip
	python3 -m venv --clear $(PROTO)
	$(PROTO)/bin/python $(INSTALL) --no-compile -r proto/requirements.txt
	@touch $@

$(SITE_STAMP): deploy/site/requirements.txt | $(BIN)/pip
	python3 -m venv --clear $(SITE)
	$(SITE)/bin/python $(INSTALL) --no-compile -r deploy/site/requirements.txt
	@touch $@

$(OLDEST_STAMP): pyproject.toml tests/oldest.py | $(BIN)/pip
	@echo "== setting up $(OLDEST) (takes the network, once)"
	python3 -m venv --clear $(OLDEST)
	$(BIN)/python tests/oldest.py services > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python $(INSTALL) --no-compile -r $(OLDEST)/requirements.txt -e ".[services]"
	@touch $@

$(OLDEST_TORCH_STAMP): pyproject.toml tests/oldest.py | $(BIN)/pip
	@echo "== setting up $(OLDEST_TORCH) (once: 0.2 GB, or 3 GB where pip knows no index of torch for CPUs)"
	python3 -m venv --clear $(OLDEST_TORCH)
	$(BIN)/python tests/oldest.py torch loader > $(OLDEST_TORCH)/requirements.txt
	$(OLDEST_TORCH)/bin/python $(INSTALL) --no-compile -r $(OLDEST_TORCH)/requirements.txt -e .
	@touch $@

setup: $(STAMP) $(PROTO_STAMP) ## Make .venv with everything in it

proto: $(PROTO_STAMP) ## Generate sdk/holdfast/v1 from proto/
	PATH="$(CURDIR)/$(PROTO)/bin:$$PATH" $(PROTO)/bin/python -m grpc_tools.protoc -Iproto --python_out=sdk \
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

test-unit: $(STAMP) $(PROTO_STAMP) ## Tests that start no process
	$(PYTEST) -q tests/unit tests/contract tests/property tests/golden tests/tidy

test-integration: $(STAMP) ## Tests against real services and databases
	$(PYTEST) $(PARALLEL) tests/integration

test-e2e: $(STAMP) ## Train, kill anywhere, restore, compare bit for bit
	$(PYTEST) $(PARALLEL) tests/e2e tests/crash

test-pins: $(OLDEST_STAMP) ## The oldest dependencies that pyproject.toml allows: do they work?
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -q $(PINS_TESTS)

test-pins-torch: $(OLDEST_TORCH_STAMP) ## The oldest torch that pyproject.toml allows: is it saved and restored?
	$(OLDEST_TORCH)/bin/python -m pytest $(PARALLEL) -q $(PINS_TORCH_TESTS)

test-rdma: $(STAMP) ## RDMA between two nodes of a virtual machine with Soft-RoCE
	$(BIN)/python -m tests.rdma.machine bash tests/rdma/two_nodes.sh \
		$(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider -m rdma tests/rdma tests/contract/test_transport.py

test-kubernetes: $(STAMP) ## The operator against a real API server of Kubernetes, built from Debian's sources once
	tests/servers/kube_apiserver.sh $(KUBERNETES)
	HOLDFAST_TEST_KUBERNETES=$(KUBERNETES)/kube-apiserver $(PYTEST) -q tests/integration/operator

gpu: $(STAMP) ## Test and measure on this machine's GPU, at most 8 minutes; writes build/gpu.json
	$(BIN)/python -m tests.gpu

# Two at a time: an installation has one core busy. The virtual machine has both, and a deadline.
test: ## Everything that must pass
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-all-else
	$(MAKE) --no-print-directory test-rdma
	$(PYTEST) $(PARALLEL)

test-all-else: $(STAMP) test-pins lint types imports $(PROTO_STAMP)

simulate: $(STAMP) ## Live through SEEDS=10000 histories of a cluster in trouble, on all cores
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000)

simulate-mutants: $(STAMP) ## Take each guard away; say in how many of at most SEEDS=2000 histories it shows
	$(BIN)/python -m tests.simulation.mutants --seeds $(or $(SEEDS),2000)

demo: $(STAMP) ## Train, lose a rank and a node, recover bit for bit; writes build/demo.json
	$(BIN)/python examples/demo/run.py

bench: $(STAMP) ## Measure against the peers; writes build/bench.json
	$(BIN)/python -m tests.bench

up: ## Build the image and start the stack of docker-compose.yml
	$(COMPOSE) up -d --build

down: ## Stop it; the database and the bucket stay
	$(COMPOSE) --profile train --profile monitoring down

docs: $(STAMP) $(PROTO_STAMP) $(SITE_STAMP) ## Check the pages, and make a site of them in build/site
	$(PYTEST) -q tests/tidy/test_in_step.py tests/tidy/test_references.py tests/contract/test_status.py \
		tests/unit/metadata/test_events.py
	rm -rf build/pages && mkdir -p build/pages
	ln -s $(addprefix $(CURDIR)/,README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples deploy) build/pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --clean --config-file deploy/site/mkdocs.yml
	@echo "== open build/site/index.html"

clean: ## Remove what is generated, not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find sdk services tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
