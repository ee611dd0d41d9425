# Every target works on a fresh clone: it creates .venv and installs what is missing first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo demo-sharded test test-full mutants reading lint format clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# K-FAC's factors are compared with curvlinops'. It asks for torchvision by way of backpack, for
# examples that nothing here uses: so it comes without what it asks for, and with what it imports.
ORACLES := curvlinops-for-pytorch backpack-for-pytorch einconv einops linear_operator opt_einsum \
	unfoldNd

# The stamp depends on the files that say what to install, so an edit there reinstalls.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"unison needs Python 3.11 or newer, found {v.major}.{v.minor}: run make PYTHON=python3.11 ...")'
	@echo "installing unison into $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(ORACLES)
	@touch $@

install: $(READY)  ## create .venv and install unison with its development tools

# What both runs of the demo train. Bits can be compared only where the noise can be drawn again.
DEMO := --private --epsilon 8 --delta 1e-5 --no-secure-noise --seed 0 --unsafe-diagnostics \
	--data records --layout documents --row-length 216 --preset tiny --num-layers 2 \
	--reducer ordered --granule 8 --batch-size 16 --micro-batch-size 8 --steps 24 \
	--warmup-steps 4 --eval-every 8 --eval-rows 32 --log-every 4 --record --overwrite

demo: $(READY)  ## train privately on two ranks, again on one, and compare the bits; 2 to 4 minutes
	@echo "1/4  private training, sharded over two ranks"
	@echo "     NOT PRIVATE IN EARNEST: bits can be compared only if both runs draw the"
	@echo "     same noise, so it comes from a seed. Leave --no-secure-noise out, and it"
	@echo "     comes from a secret key."
	@$(BIN)/unison train $(DEMO) --nproc 2 --shard full --checkpoint-every 8 --out runs/demo
	@echo; echo "2/4  the same experiment on one rank"
	@$(BIN)/unison train $(DEMO) --nproc 1 --out runs/demo-one-rank
	@echo; echo "3/4  do the two agree?"
	@$(BIN)/unison verify runs runs/demo runs/demo-one-rank
	@echo; echo "4/4  three steps of the first run again, on one rank: is every one what was recorded?"
	@$(BIN)/unison replay runs/demo --steps 8:11 --nproc 1

demo-sharded: $(READY)  ## train a small model on two ranks, about a minute
	@$(BIN)/unison train --preset tiny --data stdlib --nproc 2 --shard full --reducer ordered --granule 8 --steps 150 --out runs/demo-sharded --overwrite

# Programs that tests start import unison, a second of compiling where byte code may not be kept.
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY)  ## the test suite with doctests, about 8 minutes on 2 cores
	@$(BIN)/python -m pytest -m "not full" --timeout 120 -n 2 --dist loadfile --no-loadscope-reorder

test-full: $(READY)  ## the long matrices and mutants too; writes bench/results/test-full-<commit>.json
	@$(BIN)/python -m bench.test_full
	@$(BIN)/python -m tests.mutants

mutants: $(READY)  ## are wrong central lines noticed? 60 minutes; writes bench/results/mutants.json
	@$(BIN)/python -m tests.mutants --resume

reading: $(READY)  ## what a reader must hold: files, classes and functions that one step enters
	@$(BIN)/python -m bench.reading

lint: $(READY)  ## ruff, format check, pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(READY)  ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache
