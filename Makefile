.PHONY: help setup demo demo-tools check engines test docs plots next chaos gpu ui images pictures release-check format
.DEFAULT_GOAL := help
VARIANT ?= cpu
BIN := .venv/bin
# Two processes share two cores, three where tests wait for others; tests that fail there (status 1)
# are tried once more, alone.
PYTEST := $(BIN)/pytest -q --durations=40 --durations-min=5 --dist loadgroup --no-loadscope-reorder
with_retry = $(PYTEST) -n $(or $(2),2) -m "$(1)" || { [ $$? = 1 ] && $(PYTEST) -n 1 --lf -m "$(1)"; }

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 15

setup: ## Install everything into .venv (VARIANT=gpu for CUDA)
	@bash infra/setup.sh $(VARIANT)

demo: setup ## Train the shipped model on a CPU, end to end, in a few minutes
	@$(BIN)/refrain train infra/demo/train.yaml --overwrite

demo-tools: setup ## Train another shipped model, which learns to call a calculator, in a few minutes
	@$(BIN)/refrain train infra/demo_tools/train.yaml --overwrite

check: setup ## Lint, types, import layers and pure tests but the slowest; no engine, some minutes
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .
	@$(BIN)/ty check --quiet $(addprefix refrain/,flows tasks engines schemas benchmarks/papers)
	@$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	@$(call with_retry,not engine and not slow,3)

engines: setup ## The tests with real engines and services but the slowest: a quarter of an hour
	@$(call with_retry,engine and not slow)

test: setup ## All tests
	@$(call with_retry,not engine)
	@$(call with_retry,engine)

docs: setup ## The documentation as a site in build/site; stops at a dead link or anchor
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

plots: setup ## Draw the pictures of docs/ that show baselines anew
	@$(BIN)/python -m refrain.benchmarks.plots

next: setup ## Whether what engines touch of vLLM is in its newest one too, pre-releases among them
	@next=$$(mktemp -d) && trap 'rm -rf "$$next"' EXIT && \
	$(BIN)/uv pip install --quiet --no-deps --prerelease allow --target "$$next" vllm && \
	ls -d "$$next"/vllm-*.dist-info | xargs -n 1 basename && \
	PYTHONPATH="$$next" $(BIN)/pytest -q tests/inference/test_contract.py

chaos: setup ## Faults drawn at random on real runs; hours. What was interrupted goes on
	@$(BIN)/refrain bench chaos --json benchmarks/baselines/chaos.json

gpu: ## refrain beside stock vLLM on GPUs, up to 8 minutes (REHEARSAL=1: on a CPU)
	@REFRAIN_GPU_REHEARSAL=$(REHEARSAL) $(or $(wildcard $(BIN)/python),python3) -m pytest tests/gpu

ui: setup ## Prefect's UI, a worker and MLflow's UI on this machine
	@$(BIN)/refrain ui

images: ## Container images refrain:cpu and refrain:gpu (NAME=registry.example.org/refrain)
	@bash infra/cluster/images.sh $(NAME)

pictures: setup ## The screenshots in docs/, of this version
	@$(BIN)/python -m tests.browser.pictures

release-check: setup ## Whether this version can be released (FULL=1 installs every package anew)
	@$(BIN)/python -m infra.release_check $(if $(FULL),--full)

format: setup ## Format the code
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .
