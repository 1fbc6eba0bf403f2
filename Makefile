# `make train` trains a small model, `make test` runs the tests; both bring what they need into .venv.

.DEFAULT_GOAL := help
.PHONY: help setup train check test docs clean

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TRAIN_ARGS ?=
PYTEST_ARGS ?=
# The first Python that is new enough and can make virtual environments; `make PYTHON=... setup` overrides it.
PYTHON ?= $(shell .ci/find_python)

help:
	@echo "make setup   make .venv with torch $(TORCH) and the project"
	@echo "make train   train a small Llama on 2 processes (TRAIN_ARGS=\"--max_steps 50\")"
	@echo "make check   ruff, mypy, import order, sizes"
	@echo "make test    run the tests (PYTEST_ARGS=\"--slow\")"
	@echo "make docs    write the generated pages and build the site into out/site, with links checked"
	@echo "make clean   remove .venv, caches and out"

setup: $(READY)

# torch comes first: without a GPU the build for CPUs, which is a tenth of the size.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.10 or newer that can make a virtual environment." \
	  "Install one (Debian: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	.ci/install_torch $(BIN)/python $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev,examples]'
	@touch $@

train: $(READY)
	$(BIN)/accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_clm.py $(TRAIN_ARGS)

# That each module can be imported alone takes long, and is part of `make test PYTEST_ARGS=--slow`.
check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py
	$(BIN)/python .ci/sizes.py

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/generate_flags.py
	$(BIN)/python docs/generate_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open out/site/index.html"

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
