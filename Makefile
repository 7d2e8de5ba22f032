# make demo: set up .venv and decode with SmolLM2, plain and speculative, side by side
# make test: the notebooks and tests/        make test-all: what it leaves out, slow cells and those that need weights
# On a CUDA machine: make demo EXTRAS=cuda,plot,serve        Another Python: make demo PYTHON=/path/to/python

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
FLAGS ?=

# mlx[cpu] brings the Linux library; on a Mac MLX itself has Metal
ifeq ($(shell uname -s),Darwin)
EXTRAS ?= plot,serve
else
EXTRAS ?= cpu,plot,serve
endif

# the first of these that runs, is new enough and can make a virtual environment
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# the tests are many small passes: one thread each, two notebooks at a time
TEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SETTINGS := settings.ini setup.py pyproject.toml constraints.txt

.PHONY: demo test test-all dev clean

demo: $(VENV)/.installed
	$(BIN)/mlx_spark demo

test: $(VENV)/.dev
	$(TEST) nbdev_test --n_workers $(WORKERS) --timing --flags "$(FLAGS)"
	$(TEST) pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not weights" tests

test-all: $(VENV)/.dev
	grep -lE '^ *"#. (slow|weights)' nbs/[0-9]*.ipynb | $(TEST) xargs -P $(WORKERS) -n 1 nbdev_test --timing --flags "slow weights $(FLAGS)" --path
	$(TEST) pytest -q -n $(WORKERS) --dist loadfile -m "slow or weights" tests

dev: $(VENV)/.dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; on Debian: apt-get install -y python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(SETTINGS) | $(BIN)/python
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.dev: $(SETTINGS) | $(BIN)/python
	$(PIP) -e '.[$(EXTRAS),serve,dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info
