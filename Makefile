# make up      run a whole mesh on this machine: http://127.0.0.1:8000
# make test    the test suite          make check   lint, format, types
# make bench   measure this machine    ARGS="..."   is passed on
# make fuzz    random loads for the scheduler's invariants, then random faults for the whole mesh on virtual time
#              (the nightly run): SECONDS=600 of the latter, and as many with sequences that move between workers;
#              or ARGS="[--moves] --first N --count N", ARGS="[--moves] --seed N -v"
#
# make gpu-kernels   every Triton kernel compiled for sm_80 to sm_90, no GPU needed: registers, shared memory, spills
#              (nightly; `make test` compiles a few): ARGS="--only attention --arch sm_90 --json FILE"
#
# PYTHON: the interpreter to build on (3.11 or newer). TORCH_INDEX: see compose/install-torch.sh.

PYTHON ?= python3
VENV ?= .venv
SECONDS ?= 600
BIN := $(VENV)/bin

.PHONY: up test check bench fuzz cpu-kernels gpu-kernels
.DELETE_ON_ERROR:

up: $(VENV)/.installed-all
	@$(BIN)/headrace up $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(VENV)/.installed-dev
	$(if $(ARGS),,$(BIN)/python -m pytest tests/scheduler/core/test_core_properties.py \
	    tests/scheduler/core/test_transfer_properties.py --hypothesis-profile=fuzz --timeout=0)
	$(BIN)/python tests/deterministic $(if $(ARGS),$(ARGS),--seconds $(SECONDS))
	$(if $(ARGS),,$(BIN)/python tests/deterministic --moves --seconds $(SECONDS))

gpu-kernels: $(VENV)/.installed-dev
	$(BIN)/python -m kernels.triton.compiled $(ARGS)

bench: $(VENV)/.installed-all
	@$(BIN)/headrace bench $(ARGS)

# Made again only when what is to be installed may have changed.
$(VENV)/.installed-%: pyproject.toml setup.py compose/install-torch.sh | $(BIN)/python cpu-kernels
	@compose/install-torch.sh $(BIN)/python
	@echo "installing Headrace and what it needs (a minute or two, without a word unless something is wrong)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[$*]'
	@touch $@

# Looks every time, by content: neither another commit's library nor one without a compiler that has come since is left.
# Without a compiler there is a line that says so, and everything works, slower.
cpu-kernels: | $(BIN)/python
	@$(BIN)/python -m kernels.cpu.build || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headrace needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 1; }
	@echo "making a virtual environment in $(VENV) (some ten seconds)"
	@$(PYTHON) -m venv $(VENV)
