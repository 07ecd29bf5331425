# CI runs these targets verbatim. Everything is installed into .venv by the first target that needs it.
.DEFAULT_GOAL := help
.PHONY: help train self-check test test-slow test-gpu test-browser test-eval test-docs test-executed held-out attention-packages test-faults test-kills test-latest nullgpu test-nullgpu check format bench bench-save bench-long bench-report compiled static clean

VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
# -c: the tested versions. Without them, pip may send gigabytes of CUDA to a machine that has no GPU.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# The kernel library is a distribution of its own, and fasttrain needs it in the same version.
PACKAGES := -e ./kernels -e
SOURCES := pyproject.toml setup.py constraints.txt kernels/pyproject.toml kernels/VERSION

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

train: $(VENV)/.installed ## install, and train the default recipe: a small model on this machine, in about two minutes
	@$(BIN)/python -m fasttrain.train

self-check: $(VENV)/.installed-dev ## every op of the kernel library, forward and backward, against its reference
	@$(BIN)/python -m fasttrain_kernels.testing.self_check

TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist=worksteal --durations=8

test: $(VENV)/.installed-dev ## install, and run the tests (no GPU needed)
	@$(TEST) -m "not slow"

test-slow: $(VENV)/.installed-dev ## the tests that take ten seconds or more each
	@$(TEST) -m slow

test-gpu: $(VENV)/.installed-dev ## the tests that need a GPU
	@$(BIN)/python -m pytest -m gpu -rs

test-browser: $(VENV)/.installed-dev ## the page of fasttrain report in a real browser (needs Debian's chromium)
	@command -v chromium >/dev/null || { echo "there is no chromium: apt-get install chromium"; exit 1; }
	@$(INSTALL) $(PACKAGES) '.[dev,browser]'
	@$(BIN)/python -m pytest tests/fasttrain/tools/report/test_browser.py -rs

test-eval: $(VENV)/.installed-dev ## fasttrain eval --tasks, with lm-evaluation-harness (50 packages, 430 MB)
	@$(INSTALL) $(PACKAGES) '.[dev,eval]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fasttrain/tools/evaluate -rs

test-docs: $(VENV)/.installed-dev ## the commands of the documentation again, with less shortened
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs --docs -rs --durations=8

test-executed: $(VENV)/.installed-dev ## the compiled kernels executed: every target (or TARGET=sm_90), schedule and mutation
	@$(TEST) tests/kernels/executed -m executed -k "$(TARGET)"

held-out: $(VENV)/.installed-dev ## kernels of Liger and flash-linear-attention, executed and compared with their references
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.held_out

test-faults: $(VENV)/.installed-dev ## inject every fault that a run has to survive, and print what was lost and reported
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults --faults -rs --durations=8

test-kills: $(VENV)/.installed-dev ## 1,000 SIGKILLs at random moments (about an hour; interrupted, it continues where it was)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.many_kills

test-latest: ## the tests with the newest torch and triton, in an environment of its own (several GB)
	@$(MAKE) --no-print-directory test VENV=.venv-latest INSTALL='$$(BIN)/python -m pip install -qq --upgrade'

check: $(VENV)/.installed-dev ## lint, format, types, layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev ## apply lint fixes and formatting
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

BENCH := $(BIN)/python -m pytest bench -p no:xdist --benchmark-quiet --durations=8

bench: $(VENV)/.installed-dev ## speed and memory against reference PyTorch and the last saved run on this hardware
	@$(BENCH)

bench-save: $(VENV)/.installed-dev ## the same, and keep the figures in bench/results/history
	@$(BENCH) --save

bench-long: $(VENV)/.installed-dev ## the benchmarks that take more than an hour
	@$(BENCH) -m long --long

bench-report: $(VENV)/.installed-dev ## bench.html: the saved figures as a page with plots
	@$(BIN)/python -m bench.report --out bench.html

attention-packages: $(VENV)/.installed-dev ## download flash-attn and flash-attn-4, and read whether they take what we give them
	@rm -rf build/packages
	@$(BIN)/python -m pip download -q --no-deps --pre -d build/packages flash-attn-4
	@FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip download -q --no-deps --no-build-isolation --no-binary :all: -d build/packages flash-attn
	@$(BIN)/python -m tests.kernels.attention.packages build/packages

compiled: $(VENV)/.installed-dev ## every kernel compiled for every GPU target: registers, spills, shared memory
	@$(BIN)/python -m fasttrain_kernels.testing.compiled --stored bench/results/compiled.json

static: $(VENV)/.installed-dev ## bytes, registers and widths at training shapes, beside the stored ones of Liger and CCE
	@$(BIN)/python -m bench.static --check

nullgpu: .venv-nullgpu/.installed ## a GPU that computes nothing, for python -m bench.nullgpu: launches, copies, waits, host time

test-nullgpu: $(VENV)/.installed-dev ## every command on the null GPU, skipped where it is not built (make nullgpu)
	@$(TEST) tests/nullgpu --nullgpu -rs

.venv-nullgpu/.installed: $(VENV)/.installed-dev constraints.txt $(wildcard bench/nullgpu/src/* bench/nullgpu/build.py)
	@echo "installing the CUDA build of torch, without CUDA, into .venv-nullgpu (0.5 GB)"
	@test -x .venv-nullgpu/bin/python || $(PYTHON) -m venv .venv-nullgpu
	@.venv-nullgpu/bin/python -m pip install -qq --no-deps 'torch===2.13.0'
	@$(BIN)/python -m pip freeze --exclude torch --exclude-editable | .venv-nullgpu/bin/python -m pip install -qq --no-deps -r /dev/stdin
	@.venv-nullgpu/bin/python bench/nullgpu/build.py --site "$$(.venv-nullgpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-latest .venv-nullgpu .venv-held-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info

$(VENV)/bin/python:
	@echo "[1/2] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON) -m venv' failed: install your system's python3-venv package, or set PYTHON=..."; exit 1; }

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	@echo "[2/2] installing fasttrain and its dependencies into $(VENV) (once, one or two minutes)"
	@$(INSTALL) $(PACKAGES) '.[tensorboard]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[2/2] installing the development tools (once)"
	@$(INSTALL) $(PACKAGES) '.[dev]'
	@touch $@
