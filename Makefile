# Every target works alone on a fresh clone: it makes .venv and installs what is missing first.
#
#   UP_ARGS     options of `ctl up`, e.g. make up UP_ARGS="--port 8123"
#   TEST_ARGS   arguments of pytest, e.g. make test TEST_ARGS="tests/router -x"
#   FUZZ_SECONDS  how long `make fuzz` goes on
#   PIP_ARGS    arguments of pip, e.g. another package index (a CPU-only torch is much smaller)
#   PYTHON      the interpreter to make .venv with: 3.11 or 3.12
#   TORCH       what pip is told of torch; without a GPU, a version that is small to install

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
UP_ARGS ?=
TEST_ARGS ?=
FUZZ_SECONDS ?= 600
BENCH_ARGS ?=
PIP_ARGS ?=
# Builds of 2.14 for CPUs are not where pip looks: it would bring several GB of CUDA.
TORCH ?= $(if $(shell command -v nvidia-smi),-e ".[gpu]","torch<2.14")
# What pip would do on one core. Some packages carry files that do not compile.
COMPILE = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# Asked by running it: a name on PATH may be a shim without an interpreter behind it.
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
  if $$name -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
  >/dev/null 2>&1; then echo $$name; break; fi; done)

.DEFAULT_GOAL := help
.PHONY: help up test test-all lm-eval fuzz soak check proto docs test-gpu bench bench-gateway bench-rebalance bench-kernels bench-decode bench-prefill bench-accuracy bench-cluster bench-ep tune-kernels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(VENV)/.installed ## start a whole cluster on this machine (options: UP_ARGS="--port 8123")
	@exec $(BIN)/ctl up $(UP_ARGS)

test: check ## lint, types, import contracts, then every test that needs no GPU and is not slow
	@scripts/test $(TEST_ARGS)

lm-eval: .lm-eval/.installed ## install lm-eval for its tests, in an environment of its own

.lm-eval/.installed:
	$(PYTHON) -m venv .lm-eval
	.lm-eval/bin/pip install --quiet $(PIP_ARGS) "lm-eval[api]" transformers
	@touch $@

fuzz: $(VENV)/.installed-dev ## send hostile bytes to a cluster for FUZZ_SECONDS, keep the seeds that fail
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/cluster/fuzz -x -p no:cacheprovider

soak: $(VENV)/.installed-dev ## a thousand faults under load, compared with undisturbed twins, recorded
	@$(BIN)/python -m bench.chaos --record $(BENCH_ARGS)

test-all: check ## the same with the slow tests (and those for a GPU, where there is one)
	@scripts/test --all $(TEST_ARGS)

check: $(VENV)/.installed-dev ## lint, types, import contracts, fresh gRPC stubs
	@scripts/check

proto: $(VENV)/.installed-dev ## generate the gRPC stubs from proto/*.proto
	scripts/proto

docs: $(VENV)/.installed-dev ## write the pages of docs/ that are made from the code
	$(BIN)/python scripts/configuration_doc.py
	$(BIN)/python scripts/checkpoint_formats_doc.py
	$(BIN)/python scripts/metrics_doc.py
	$(BIN)/python scripts/formats_doc.py
	$(BIN)/python scripts/fields_doc.py
	$(BIN)/python scripts/dashboards_json.py
	$(BIN)/python scripts/render_chart.py
	$(BIN)/python scripts/plan_examples.py

bench: $(VENV)/.installed-dev ## measure a local cluster against transformers, record in bench/results
	$(BIN)/python -m bench.against_transformers $(BENCH_ARGS)

bench-gateway: $(VENV)/.installed-dev ## measure the gateway on one core, record in bench/results
	$(BIN)/python -m bench.gateway_load --record $(BENCH_ARGS)

bench-rebalance: $(VENV)/.installed-dev ## measure what answers feel of experts that move, record it
	$(BIN)/python -m bench.rebalance --record $(BENCH_ARGS)

test-gpu: ## the tests that need a GPU, in the environment at hand (PYTHON)
	$(PYTHON) -m pytest -c /dev/null --rootdir=. --import-mode=importlib -m gpu \
	  $$(grep -rlE --include="test_*.py" "mark\.gpu|triton_device" tests) $(TEST_ARGS)

bench-kernels: ## measure the kernels on this GPU, record in bench/results
	$(PYTHON) -m bench.kernels_w4a8 $(BENCH_ARGS)
	$(PYTHON) -m bench.kernels $(BENCH_ARGS)

tune-kernels: ## find block sizes of the Triton products on this GPU, write kernels/tuned
	$(PYTHON) -m bench.tune_fused_moe $(BENCH_ARGS)
	$(PYTHON) -m bench.tune_fp8_gemm $(BENCH_ARGS)
	$(PYTHON) -m bench.tune_fp8_clusters

bench-ep: ## measure dispatchers and moving experts between the GPUs here, record in bench/results
	$(PYTHON) -m bench.ep --record $(BENCH_ARGS)
	$(PYTHON) -m bench.expert_transfer --record

bench-decode: ## measure decode steps at full size on these GPUs, record in bench/results
	$(PYTHON) -m bench.decode_rank --record --profile 1 128 $(BENCH_ARGS)
	$(PYTHON) -m bench.decode_full --record $(BENCH_ARGS)

bench-prefill: ## measure prefill passes at full size on these GPUs, record in bench/results
	$(PYTHON) -m bench.prefill_rank --record --profile 512 4096 $(BENCH_ARGS)
	$(PYTHON) -m bench.prefill_full --record $(BENCH_ARGS)

bench-accuracy: ## count right answers of whole clusters in every format, record in bench/results
	$(PYTHON) -m bench.accuracy --record $(BENCH_ARGS)

bench-cluster: ## measure KV between two GPUs and the whole path over them, record in bench/results
	$(PYTHON) -m bench.kv_transfer --record
	$(PYTHON) -m bench.kv_push --record
	$(PYTHON) -m bench.cluster --record $(BENCH_ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info */*.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or 3.12 found; install one or set PYTHON=" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: $(PYTHON) -m venv failed (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing what epserve needs to run into $(VENV) (the first time takes minutes)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -e . $(TORCH)
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml bench/pyproject.toml | $(BIN)/python
	@echo "installing what epserve needs to run and to be tested into $(VENV)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -e ".[dev]" -e bench $(TORCH)
	@$(COMPILE)
	@touch $(VENV)/.installed $@
