# Set-up and checks, from nothing: `make demo` and `make test` in a fresh clone do all that they need.
#
#   make demo        train a small GPT under memory limits in every mode and print the table (a few minutes)
#   make test        the tests, against the installed wheel and not the source tree
#   make test-all    also the slow ones, all cases of each grid, six times the random examples
#   make lint        ruff and mypy
#   make quickstart  the README's quick start
#   make docs        the documentation site as HTML, into docs/_build/html/
#   make gallery     train models of torchvision, timm and transformers at half their memory, one line each (15 minutes)
#   make dist        sdist and wheel, into dist/
#   make wheels      the sdist, and wheels for CPython 3.10 and for 3.11 and later, audited as manylinux, into dist/
#   make clean       remove all that these made, .venv included
#
# PYTHON  the interpreter to start from. If it has a torch that rotoff is tested with, that torch is used as it is.
# TORCH   what pip installs otherwise; pip's options may follow, such as another index.
# PYTHONS for wheels: 3.10, and any later one, whose wheel is for all from 3.11 on.
# ARGS    passed on to the example or to pytest: make demo ARGS="--steps 20", make test ARGS="-k chain".
PYTHON ?= python3
PYTHONS ?= python3.10 python3.11
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Most of what comes with the tools is never imported; Python compiles the rest when it is.
INSTALL := $(PIP) install --no-compile
SOURCES := $(shell find rotoff -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' -o -name 'py.typed') \
           pyproject.toml setup.py MANIFEST.in README.md LICENSE
HAS_TORCH := -c "import sys, torch; sys.exit(not (2, 11) <= tuple(map(int, torch.__version__.split('.')[:2])) < (2, 16))"

# Whatever the caller's shell has on it, `import rotoff` must find the wheel; and children of the tests inherit this.
unexport PYTHONPATH
# Compiled modules are kept: without them each of the processes that tests start compiles torch for seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE = 1

# What rotoff, or one of its extras, needs of others, and no other torch with it.
WITH = $(BIN)/python scripts/requirements.py $(1) > $(VENV)/requirements.txt && \
       $(INSTALL) -r $(VENV)/requirements.txt "torch==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))')"

# Two at a time, whatever else make was asked for: the kernels compile while pip fetches what does not need them.
SETUP = +@$(MAKE) --no-print-directory -j2

# Of several targets one after the other, since all need the same set-up.
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: demo quickstart gallery test test-all lint docs dist wheels clean
.DELETE_ON_ERROR:

demo:
	$(SETUP) $(VENV)/installed
	$(BIN)/python examples/compare_modes.py $(ARGS)

quickstart:
	$(SETUP) $(VENV)/installed
	$(BIN)/python examples/quickstart.py

# All tools run as modules: where PYTHON's own packages are used, those have no scripts in .venv.
# Tests run in a folder that has no rotoff/, so that neither pytest nor a child that it starts can find the source tree;
# so does the build of the docs.
PYTEST = cd $(VENV) && ROTOFF_TEST_INSTALLED=1 bin/python -m pytest -c ../pyproject.toml ../tests

# A test computes on one thread; as many run at a time as there are cores, up to four. JOBS= runs them one by one.
JOBS ?= -n auto --maxprocesses 4 --dist worksteal

test:
	$(SETUP) $(VENV)/tools
	$(PYTEST) $(JOBS) $(ARGS)

test-all: export HYPOTHESIS_PROFILE ?= thorough
test-all:
	$(SETUP) $(VENV)/tools $(VENV)/docs
	$(PYTEST) -m "" $(JOBS) $(ARGS)

gallery:
	$(SETUP) $(VENV)/gallery
	$(BIN)/python benchmarks/gallery.py $(ARGS)

lint:
	$(SETUP) $(VENV)/tools
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs:
	$(SETUP) $(VENV)/tools $(VENV)/docs
	cd $(VENV) && bin/python -m sphinx -W --keep-going -q -b html ../docs ../docs/_build/html

dist: $(VENV)/wheel

wheels:
	PYTHON=$(PYTHON) bash scripts/wheels.sh $(PYTHONS)

clean:
	rm -rf $(VENV) build dist docs/_build rotoff.egg-info rotoff/_dp.c rotoff/solver/kernels/*.c

# An interpreter that can build.
$(VENV)/python:
	@echo "Setting up $(VENV) (once)"
	rm -rf $(VENV)
	if $(PYTHON) $(HAS_TORCH) 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi
	$(INSTALL) "build>=1.2"
	touch $@

# The torch that PYTHON has if it will do, else a new one.
$(VENV)/torch: $(VENV)/python
	$(BIN)/python $(HAS_TORCH) 2>/dev/null || $(INSTALL) $(TORCH)
	$(call WITH,)
	touch $@

# The wheel is built from the sdist, each in an environment of its own, so that nothing forgotten or stale gets in; the
# tape is compiled for the torch of .venv, which that environment does not see.
TORCH_FOLDER = $$($(BIN)/python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")

$(VENV)/wheel: $(VENV)/torch $(SOURCES)
	rm -rf dist build rotoff.egg-info
	ROTOFF_TORCH="$(TORCH_FOLDER)" $(BIN)/python -m build . > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; false; }
	touch $@

# The wheel alone: pip would take a rebuilt one of the same version for the one that it has.
$(VENV)/installed: $(VENV)/wheel $(VENV)/torch
	$(INSTALL) --force-reinstall --no-deps dist/rotoff-*.whl
	touch $@

# What tests and lint need beside it; a rebuilt wheel leaves these as they are.
$(VENV)/tools: $(VENV)/packages $(VENV)/wheel
	+@$(MAKE) --no-print-directory $(VENV)/installed  # not beside another pip, which reads what is installed
	touch $@

$(VENV)/packages: pyproject.toml scripts/requirements.py $(VENV)/torch
	$(call WITH,dev)
	touch $@

# Libraries of models, the versions that go with the torch that is there.
$(VENV)/gallery: pyproject.toml $(VENV)/torch | $(VENV)/installed
	$(call WITH,gallery)
	touch $@

$(VENV)/docs: pyproject.toml $(VENV)/torch | $(VENV)/tools
	$(call WITH,docs)
	touch $@
