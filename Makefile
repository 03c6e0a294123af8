SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.softgap-installed
BROWSER := $(VENV)/.softgap-browser
# torchao lies apart: where it is installed, every import of transformers imports it and makes it speak.
QUANTISED := $(VENV)/quantised
# -qq hides the noise of mirrors that lack a package, and still shows errors.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
DEMO := runs/make-demo
BENCHMARKS := benchmarks/mechanisms.py benchmarks/overhead.py benchmarks/ordinal.py benchmarks/surrogates.py benchmarks/stats.py benchmarks/study.py benchmarks/explorer.py benchmarks/impact.py
# The experiments that need nothing but softgap; the others read a text or a calibration that their command line names.
EXPERIMENTS := experiments/model_coverage.py experiments/spread.py experiments/intervals.py
# Two workers with one thread each: more threads only fight over the cores. Each begins with half of the files and takes
# from the other's end when it is done, so that a file's servers, sites and labs are made once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

.PHONY: help demo test test-all lint format bench experiments reliability screenshots figures docs lock bill clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# The stamp goes first and comes back last, so an interrupted install never looks finished.
$(STAMP): pyproject.toml requirements/lock.txt requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "softgap needs Python 3.11 or newer, and '$(PYTHON)' is missing or older; name another with 'make PYTHON=python3.11'." >&2; exit 1; }
	@rm -f $@
	@echo "Setting up $(VENV) (minutes the first time, then nothing)."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --require-hashes --no-deps -r requirements/lock.txt
	@$(PIP) -r requirements/torch.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(QUANTISED): $(STAMP) requirements/quantised.txt
	@$(PIP) --require-hashes --no-deps --target $@ --upgrade -r requirements/quantised.txt
	@touch $@

# The tests of pages want a real browser: Debian's, where it can be installed without asking anybody.
$(BROWSER): $(STAMP)
	@if ! { type -P chromium || type -P chromium-browser || type -P google-chrome; } >/dev/null \
		&& [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null; then \
		echo "Installing chromium for the tests of pages."; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-liberation; } >/dev/null 2>&1 \
			|| echo "chromium could not be installed; the tests of pages will say so." >&2; \
	fi
	@touch $@

# Not --overwrite, which refuses a demo of an older version as a different study.
demo: $(STAMP) ## which heads of the embedded model need softmax; the last line is the report to open in a browser
	@rm -rf $(DEMO)
	@$(BIN)/softgap calibrate --quick >/dev/null
	@$(BIN)/softgap run "Tell me a story about a fox." --max-new-tokens 96 --out $(DEMO)
	@$(BIN)/softgap report $(DEMO)

test: lint $(BROWSER) $(QUANTISED) ## lint, types and the fast tests
	@PYTHONPATH=$(QUANTISED) $(PYTEST) -n 0 tests/models/test_quantisation.py
	@$(PYTEST)

test-all: lint $(BROWSER) $(QUANTISED) ## the same with the slow tests
	@PYTHONPATH=$(QUANTISED) $(PYTEST) -n 0 -m "" tests/models/test_quantisation.py
	@$(PYTEST) -m ""

lint: $(STAMP) ## ruff, formatting and strict types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "Formatting differs; run 'make format'." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

format: $(STAMP) ## rewrite the source in the house format
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

bench: $(BROWSER) ## every benchmark; each writes its own table into docs/benchmarks.md
	@for script in $(BENCHMARKS); do $(BIN)/python $$script || exit 1; done

experiments: $(STAMP) ## the experiments that need no text or calibration; each writes its own section of the docs
	@for script in $(EXPERIMENTS); do $(BIN)/python $$script || exit 1; done

reliability: $(STAMP) ## faults on purpose (hours); each writes its own section of docs/reliability.md
	@$(BIN)/python experiments/reliability.py all

screenshots: $(BROWSER) ## pictures of the explorer for the docs, from a run and a study of the embedded model
	@$(BIN)/python docs/make/screenshots.py
	@$(BIN)/python docs/make/live_screenshots.py

figures: $(STAMP) ## figures of the labs for the docs; with CALIBRATION=FILE the map by kind and the opening of a run
	@$(BIN)/python docs/make/lab_figures.py
	@$(if $(CALIBRATION),$(BIN)/python docs/make/opening.py "$(CALIBRATION)")

docs: $(STAMP) ## the documentation, into site/
	@$(BIN)/python docs/make/module_list.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: $(STAMP) ## renew the hashes of requirements/ from what is installed in .venv; asks the package index
	@$(BIN)/python tools/supply_chain.py lock

bill: $(STAMP) ## the bill of materials of the lock, as CycloneDX JSON in softgap.cdx.json
	@$(BIN)/python tools/supply_chain.py bill

clean: ## caches and built pages; the environment stays (rm -rf .venv removes it)
	@rm -rf site build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests benchmarks experiments docs/make -name __pycache__ -type d -prune -exec rm -rf {} +
