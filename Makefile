# Two commands do everything: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Nothing here may reach the Hub, and two cores are shared by everything that runs.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# A PYTHONPATH of the caller could hide an import that fails elsewhere.
unexport PYTHONPATH

# Two workers fill two cores; two threads in each of them spin while they wait for one another.
# Compiled modules are kept, whatever the shell says: the tests start many interpreters.
TESTING := $(OFFLINE) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: help demo test test-slow test-versions check docs format install install-test release-check clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The build of torch: auto takes that of this machine, without CUDA where there is no GPU. On Linux, PyPI has only the build with
# CUDA (4.5 GB of 6.2 GB in all), which is installed where pytorch.org cannot be reached.
TORCH_BACKEND ?= auto
UV_INSTALL = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraints constraints.txt

# uv inside the environment installs in seconds; where it cannot be had, pip does the same in minutes.
define INSTALL
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv 2>/dev/null || true
	if [ -x $(BIN)/uv ]; then \
		$(UV_INSTALL) --torch-backend $(TORCH_BACKEND) $(1) 2>/dev/null || $(UV_INSTALL) $(1); \
	else \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(1); \
	fi
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(call INSTALL,--editable .)
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(call INSTALL,--editable '.[dev]')
	touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## Make .venv with the package
install-test: $(VENV)/.installed-test  ## Make .venv with the package and what the tests need

demo: $(VENV)/.installed  ## Finetune the embedded captioner with SMILE and print the table (3 minutes on 2 cores)
	$(OFFLINE) $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no recipes/smile_blip.py
	@echo "For the command captionrl in this shell: source $(BIN)/activate"

# By files: what a file's tests share is made in one worker.
test: $(VENV)/.installed-test  ## All tests, offline
	$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --durations 10

test-slow: $(VENV)/.installed-test  ## The long campaigns
	$(TESTING) $(BIN)/python -m pytest -n 2 --dist loadfile -m slow --timeout 3600 --durations 10

test-versions: $(VENV)/.installed-test  ## Tests against the lowest, a middle and the newest releases of the libraries (one: ONLY=lowest)
	$(TESTING) $(BIN)/python -m nox --session $(if $(ONLY),"versions(libraries='$(ONLY)')",versions)

check: $(VENV)/.installed-test  ## Lint, format, types, layers, budgets, configs, pages (a part: make check-types)
	@$(BIN)/python scripts/check.py

check-%: $(VENV)/.installed-test
	@$(BIN)/python scripts/check.py $*

docs: $(VENV)/.installed-test  ## The site, into outputs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release-check: $(VENV)/.installed-test  ## Build wheel and sdist, and try both in fresh environments
	$(BIN)/python scripts/release_check.py

format: $(VENV)/.installed-test  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and everything made
	rm -rf $(VENV) build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache
