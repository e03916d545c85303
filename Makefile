# Every target sets up what it needs in .venv, from nothing, on a machine with Python 3.11 to 3.13 and pip.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
# Interpreters for `make test-matrix` that are not on the path as python3.11, python3.12 and python3.13.
PYTHONS ?=
VENV := .venv
BIN := $(VENV)/bin
# -qq hides pip's progress and its warnings and still shows its errors. The conflicts that it would report as errors are
# the dependencies left out on purpose below.
# constraints.txt holds versions for Python 3.11; on a newer one pip chooses, within the bounds of pyproject.toml.
INSTALL = $(BIN)/python -m pip --disable-pip-version-check --no-input -qq install --no-warn-conflicts $(PINS)
PINS = $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')
# What the spiking libraries need and import, and the two libraries that also ask for torchvision, torchaudio and tensorboard,
# which nothing here uses: those two are installed without their dependencies.
SNN := snntorch ncps nir nirtorch h5py loguru matplotlib scipy tqdm
SNN_ALONE := norse spikingjelly
# How many random programs `make fuzz` tries per test, and how many test processes run side by side.
N ?= 2000
# What `make reproduce` runs: tasks by letter (all by default), and how many seeds.
TASK ?=
SEEDS ?= 3
JOBS ?= 2
# The public address that `make dist` writes into the package: https://host/owner/project.
URL ?=
# The version of KaTeX that `make docs` ships with the site.
KATEX := 0.19.1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-full test-matrix lint format bench reproduce fuzz docs dist clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r t d; do printf '  make %-12s %s\n' "$$t" "$$d"; done

setup: $(VENV)/.ready ## Install everything for tests, demo and benchmarks into .venv.

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) with $(PYTHON) (a few minutes the first time) ..."
	@test -n "$(PYTHON)" || { echo "No python3.11 found. Name one: make PYTHON=path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.13. Name another: make PYTHON=path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[plot,dev]' $(SNN)
	@$(INSTALL) --no-deps $(SNN_ALONE)
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	@echo "Adding what the documentation needs ..."
	@$(INSTALL) -e '.[docs]'
	@command -v npm >/dev/null || { echo "make docs needs npm, for KaTeX, which draws the equations." >&2; exit 1; }
	@npm install --silent --no-save --no-audit --no-fund --prefix $(VENV)/katex katex@$(KATEX)
	@rm -rf docs/katex && mkdir -p docs/katex/fonts
	@cp $(VENV)/katex/node_modules/katex/LICENSE $(VENV)/katex/node_modules/katex/dist/katex.min.css \
		$(VENV)/katex/node_modules/katex/dist/katex.min.js docs/katex
	@cp $(VENV)/katex/node_modules/katex/dist/fonts/*.woff2 docs/katex/fonts
	@touch $@

demo: setup ## Wrap, check and train a torch GRU online, and write a report.
	@$(BIN)/python -m etrace_bridge demo

test: setup ## Run the tests.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests

test-quick: setup ## Run the tests of tests/quick.txt, some of every part, in under three minutes.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal @tests/quick.txt

test-full: setup ## Run the tests with every case of which `make test` takes a share.
	FULL_TESTS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests

test-matrix: ## Run the core of the tests with every supported Python, torch, JAX and brainstate (builds .matrix/, 40 GB).
	@$(PYTHON) tests/matrix.py --jobs $(JOBS) --pythons "$(PYTHONS)" --also "$(SNN)" --alone "$(SNN_ALONE)"

lint: setup ## Run ruff and pyright.
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## Let ruff format the code and fix what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Run the benchmarks.
	$(BIN)/python benchmarks/compile_cost.py
	$(BIN)/python benchmarks/bridge_cost.py
	$(BIN)/python benchmarks/loop_cost.py
	$(BIN)/python -m benchmarks

reproduce: setup ## Run published experiments with every rule (hours; TASK=A SEEDS=3 for part of it).
	$(BIN)/python -m benchmarks.reproduce $(if $(TASK),--task $(TASK)) --seeds $(SEEDS)

fuzz: setup ## Try N=2000 random programs on each fuzz test.
	FUZZ_RECORD=tests/fuzzed.json FUZZ_PROGRAMS=$(N) $(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile fuzz -m fuzz tests

docs: $(VENV)/.docs-ready ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: setup ## Build the sdist and the wheel for a public address (URL=https://host/owner/project).
	@$(BIN)/python docs/dist.py "$(URL)"

clean: ## Remove .venv and everything that was built.
	rm -rf $(VENV) .matrix build dist site docs/katex *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
