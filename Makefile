# Every task of the project. `make demo` and `make test` are all a fresh machine needs; neither needs root.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DEMO_STAMP := $(VENV)/.ready-demo
ARCH ?= $(shell uname -m)

# In CI warnings are errors.
export HYBRID_EP_STRICT ?= $(if $(filter true,$(CI)),on,off)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-cluster test-all test-consumers lint type format wheel image image-test image-scan test-bare test-gpu bench chart docs validate clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A stamp has the folder that its environment was made in: a moved or copied clone sets up again.
ifneq ($(file <$(STAMP)),$(CURDIR))
.PHONY: $(STAMP)
endif
ifneq ($(file <$(DEMO_STAMP)),$(CURDIR))
.PHONY: $(DEMO_STAMP)
endif

# The build runs every time: CMake looks again for what the machine has, and only changes are compiled.
setup: $(STAMP) ## Create .venv with the pinned tools and build the extension in place
	@[ "$(CI)" != true ] || ci/nvcc.sh $(VENV)
	@PATH="$(CURDIR)/$(BIN):$$PATH" ci/build_inplace.sh $(BIN)/python

$(STAMP): pyproject.toml setup.py hybrid_ep/_version.py ci/helm.sh
	@ci/setup.sh $(PYTHON) $(VENV)
	@printf %s '$(CURDIR)' >$@

# The demo needs neither the developers' tools nor kernels. Where `make setup` has made both, they stay.
$(DEMO_STAMP): pyproject.toml setup.py hybrid_ep/_version.py
	@ci/setup.sh $(PYTHON) $(VENV) demo
	@printf %s '$(CURDIR)' >$@

demo: $(if $(wildcard $(STAMP)),setup,$(DEMO_STAMP)) ## Run the main job: dispatch, experts and combine on a virtual cluster; pictures and a page land in out/demo
	@[ -e $(STAMP) ] || PATH="$(CURDIR)/$(BIN):$$PATH" HYBRID_EP_BUILD_CUDA=off HYBRID_EP_BUILD_NVML=off ci/build_inplace.sh $(BIN)/python
	$(BIN)/hybrid-ep demo --out out/demo

test: ## Lint, type-check and run the tests of this machine alone: library, CPU ranks, emulated kernels, what is shipped
	@ci/system_packages.sh
	@$(MAKE) --no-print-directory setup
	ci/test.sh $(BIN)

test-fast: setup ## Lint, type-check and run the unit tests, in a few minutes; installs no system packages
	ci/test.sh $(BIN) fast

test-cluster: ## Run the tests on simulated hosts: fleets over ssh, MPIJobs, Slurm, Soft-RoCE in a virtual machine, a browser
	@ci/system_packages.sh cluster
	@$(MAKE) --no-print-directory setup
	ci/test.sh $(BIN) cluster

test-all: ## Both, and images, wheels with kernels, CUDA toolkits, the sdist, failing nodes and an empty Debian
	@ci/system_packages.sh cluster
	@$(MAKE) --no-print-directory setup
	ci/test.sh $(BIN) all

lint: setup ## Check style and layering
	ci/lint.sh $(BIN)

type: setup ## Check types, strictly
	$(BIN)/mypy

format: setup ## Rewrite Python and C++ in the house style
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	find benchmarks csrc tests -regex '.*\.\(c\|cpp\|cu\|cuh\|h\)' -print0 | xargs -0 $(BIN)/clang-format -i

wheel: ## Build a manylinux wheel for PYTHON into dist/; ARCH=aarch64 cross-compiles
	ci/wheel.sh $(PYTHON) $(ARCH) dist

image: ## Build a container image: TARGET=doctor|cpu|runtime|build|test, PLATFORM=linux/amd64|linux/arm64, ENGINE, SOURCES, CUDA
	PYTHON="$(PYTHON)" ENGINE="$(ENGINE)" SOURCES="$(SOURCES)" CUDA="$(CUDA)" BUILD_ARGS="$(BUILD_ARGS)" ci/image.sh $(or $(TARGET),cpu) $(PLATFORM)

image-test: ## Build the images of both architectures and run them; takes long
	ci/image_test.sh

image-scan: ## Look for Debian's fixes and PyPI's advisories for what IMAGE contains; default: cpu, which make image built
	PYTHON="$(PYTHON)" ENGINE="$(ENGINE)" ci/image_scan.sh $(IMAGE)

test-bare: ## Run the first two commands in an empty Debian: MODE=short|full WHO=root|user; needs root, full takes long
	ci/bare_root_test.sh $(or $(MODE),short) $(or $(WHO),root)

test-consumers: setup ## Download released frameworks, from Megatron-core to vLLM, and run their dispatchers on CPU ranks
	ci/test_consumers.sh $(BIN)

test-gpu: ## On a GPU host whose PYTHON has torch: build, then hold the cuda engine to every case
	ci/test_gpu.sh $(PYTHON)

bench: ## On a GPU host whose PYTHON has torch: measure, beside the wire's limit, into benchmarks/results
	ci/bench.sh $(PYTHON)

chart: setup ## Build the Helm chart from the kustomize tree into out/chart/hybrid-ep, and package it beside
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python ci/chart.py out/chart/hybrid-ep
	$(BIN)/helm package --destination out/chart out/chart/hybrid-ep

docs: setup ## Build the documentation site into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

validate: setup ## Validate this machine, HOSTS="a b" PROFILE=NAME, or INVENTORY=FILE: doctor, test jobs, report in out/validate
	ci/validate.sh $(BIN)

clean: ## Remove everything that was built
	rm -rf $(VENV) build dist out .work/image *.egg-info hybrid_ep/*.so
