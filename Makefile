# Every target sets up what it needs by itself; a second run finds it in place.
PYTHON := .venv/bin/python
SOURCES := paceline services kernels deploy helm bench examples tests
DEMO_ARGS ?=
TEST_ARGS ?=
STRESS ?=
PROCESSOR ?=
SOAK_ARGS ?=
GPU_ARGS ?=
NAME ?= rollout
BENCH_ARGS ?=
NIGHTLY_ARGS ?=

.PHONY: demo test test-fast soak lint docs format protos lock gpu bench bench-full nightly clean setup help

help:           ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup:          ## Virtual environment from the lock (DEVICE=cuda: for NVIDIA GPUs)
	@scripts/setup

demo: setup     ## The whole platform on this machine and a GRPO run on it (DEMO_ARGS="--steps 3 ...")
	$(PYTHON) -m examples.tinymath.demo $(DEMO_ARGS)

test: setup     ## All tests, two at a time (TEST_ARGS="-k name"; STRESS=1: with stalls; PROCESSOR=avx2: an older one)
	$(PYTHON) -m pytest -n 2 --dist loadfile $(if $(STRESS),--stress) $(if $(PROCESSOR),--processor $(PROCESSOR)) $(TEST_ARGS)

test-fast: setup ## The tests that start no engine, in under three minutes (TEST_ARGS)
	$(PYTHON) -m pytest -n 2 --dist loadfile --fast $(TEST_ARGS)

soak: setup     ## Tests that take minutes, figures in runs/soak (SOAK_ARGS="--chaos-seed 5 ...")
	$(PYTHON) -m pytest --soak -m soak -s $(SOAK_ARGS)

lint: setup     ## Format, style, types, imports, the blocking client, stale figures, protocol
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	scripts/blocking-client --check
	$(PYTHON) -m bench.nightly --check
	.venv/bin/buf lint
	.venv/bin/buf breaking --against protos/baseline.binpb

docs: setup     ## Documentation site, strictly checked, in runs/site
	NO_MKDOCS_2_WARNING=1 VLLM_LOGGING_LEVEL=ERROR scripts/heartbeat "docs, a minute or two" .venv/bin/mkdocs build --strict --quiet

format: setup   ## Format and fix what can be fixed
	$(PYTHON) -m ruff check --fix $(SOURCES)
	$(PYTHON) -m ruff format $(SOURCES)

protos: setup   ## Generate the gRPC stubs
	scripts/protos

lock: setup     ## Resolve requirements/*.lock anew
	scripts/lock

gpu:            ## On this machine's GPU: tokens, step times, kernels, in calls of 9 minutes (GPU_ARGS="--brief"), in runs/gpu
	@test -x $(PYTHON) && python=$(PYTHON) || python=python3; PYTHONPATH=$(CURDIR):$$PYTHONPATH $$python -m bench.gpu $(GPU_ARGS)

bench: setup    ## One benchmark (NAME=rollout, the whole; SUBJECT=smollm2; BENCH_ARGS), result in runs/bench/NAME.json
	scripts/heartbeat "bench $(NAME)" $(PYTHON) -m bench.$(NAME) $(if $(SUBJECT),--subjects $(SUBJECT)) $(BENCH_ARGS)

bench-full: setup ## All systems, both subjects, in calls of 25 minutes until no cell is left (BENCH_ARGS="--rounds 3")
	scripts/heartbeat "bench rollout" $(PYTHON) -m bench.rollout --systems all --subjects tinymath tinymath-16m $(BENCH_ARGS)

nightly: setup  ## The tests under stress, then the quick form of every benchmark (NIGHTLY_ARGS), whose tables go to docs
	$(MAKE) test STRESS=1; tested=$$?; $(PYTHON) -m bench.nightly $(NIGHTLY_ARGS) && exit $$tested

clean:          ## Remove environment, caches and runs
	rm -rf .pack .venv .venv.uv .venv-router .venv-verl runs build dist *.egg-info deploy/server/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
