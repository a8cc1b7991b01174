# Holdfast. `make help` lists the targets.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.holdfast-installed
# Torch first, alone and pinned: any other request may pull gigabytes of CUDA packages.
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup proto format check lint types imports test test-unit test-integration test-e2e \
	demo bench up down docs clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "numpy>=1.26,<3"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[torch,loader,cli,services,dev]"
	@touch $@

setup: $(STAMP) ## Make .venv with everything in it
