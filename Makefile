# Every target makes the environment it needs in .venv: Python 3.11 or newer is all it asks for.
# A stamp per set of packages makes the second run start at once; pyproject.toml renews them.

PYTHON ?= python3
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Installed before anything that depends on it, so that nothing else decides which torch it is.
# Without a GPU, PIP_EXTRA_INDEX_URL pointed at PyTorch's CPU index spares the CUDA packages.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.6,torch==2.13.0)

# The photos that the demo walks over. Its code, and SciPy which that needs, are not used.
PHOTOS := "scikit-image>=0.22"

.DEFAULT_GOAL := help
.PHONY: help demo test test-all pytest docs lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## walk over a photo with and without memory: table, animation, a page to look inside
	$(BIN)/python examples/remembered_world.py

# Checking types keeps one core busy: it runs beside the tests.
test: $(VENV)/.dev  ## lint, check types, run every test
	$(MAKE) --no-print-directory -j2 lint pytest

test-all: $(VENV)/.dev  ## the same with the exhaustive matrices (interpreted kernels, every host)
	$(MAKE) --no-print-directory -j2 lint pytest TESTS='-m "not gpu or gpu"'

# Workers and jobs would each compile every file again where no bytecode is kept.
pytest: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS)

docs: $(VENV)/.dev  ## build the site into build/site; a warning is an error, no network is needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

lint: $(VENV)/.dev  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(VENV)/.dev  ## apply what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove the environment and the caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src lab tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "expected Python 3.11 or newer, got: $$($(PYTHON) --version 2>&1);" \
	    "name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing $(TORCH) into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing what the demo needs"
	@$(INSTALL) --editable ".[inspect]"
	@$(INSTALL) --no-deps $(PHOTOS)
	@touch $@

$(VENV)/.dev: pyproject.toml lab/pyproject.toml $(VENV)/.torch
	@echo "installing what the tests need"
	@$(INSTALL) --editable ".[dev]" --editable "lab[test]"
	@touch $@ $(VENV)/.demo
