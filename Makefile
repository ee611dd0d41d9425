# Every target works on a fresh clone: it creates .venv and installs what is missing first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo demo-sharded test test-full lint format clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# The stamp depends on the two files that say what to install, so an edit there reinstalls.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"unison needs Python 3.11 or newer, found {v.major}.{v.minor}: run make PYTHON=python3.11 ...")'
	@echo "installing unison into $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(READY)  ## create .venv and install unison with its development tools

demo: $(READY)  ## train a small model privately, start to finish, under three minutes
	@$(BIN)/unison train --private --epsilon 8 --delta 1e-5 --preset tiny --num-layers 2 --threads 1 --data records --layout documents --batch-size 64 --steps 60 --warmup-steps 5 --eval-every 20 --out runs/demo --overwrite

demo-sharded: $(READY)  ## train a small model on two ranks, about a minute
	@$(BIN)/unison train --preset tiny --data stdlib --nproc 2 --shard full --reducer ordered --granule 8 --steps 150 --out runs/demo-sharded --overwrite

test: $(READY)  ## the test suite with doctests, at most 10 minutes on 2 cores
	@$(BIN)/python -m pytest -m "not full" --timeout 120 -n 2 --dist loadfile

test-full: $(READY)  ## the long matrices too; writes bench/results/test-full-<commit>.json
	@$(BIN)/python -m bench.test_full

lint: $(READY)  ## ruff, format check, pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(READY)  ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache
