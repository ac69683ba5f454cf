# Everything a fresh machine needs is installed here, into .venv, with the versions of constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

QUICK_OUT := tests/lab src/bisam/lab tests/tensors/test_distributed.py tests/test_examples.py tests/test_docs.py

.PHONY: test quick check verify lint types demo bench docs site package browser clean

# A file runs in one worker: its fixtures, ranks and clusters start once. tests/conftest.py puts the longest files first.
test: $(VENV)/.installed  ## all tests and doctests
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Leaves out the lab, training on several ranks (two processes), the examples and the benchmark, the pages that are
# compared with their sources, and what is marked slow: base optimizers beside SGD, long runs against the reference,
# compiled models, counted work, the Triton kernels (interpreted on a CPU).
quick: $(VENV)/.installed  ## the inner ring's fast tests and doctests, under a minute on two cores
	$(BIN)/pytest -n 2 -q -m 'not slow' $(QUICK_OUT:%=--ignore=%)

check: lint types verify site package test  ## what CI runs

verify: $(VENV)/.installed  ## the ledger: its files, digests, epochs and accuracies
	$(BIN)/bisam verify results --without-weights

lint: $(VENV)/.installed  ## style, and the import contracts of pyproject.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed
	$(BIN)/mypy

browser:  ## Chromium, for the tests of the pages and their pictures: Debian's, where it is missing
	.ci/browser

demo: $(VENV)/.installed  ## sharpness-aware training on noisy digits, in about two minutes
	OMP_NUM_THREADS=1 $(BIN)/bisam demo

bench: $(VENV)/.installed  ## what a step costs beside one written by hand
	$(BIN)/python benchmarks/bench_optimizer_overhead.py

docs: $(VENV)/.installed  ## figures and tables of the docs, then the site
	$(BIN)/bisam report results --without-weights --out docs/report.html --figures build/figures
	cp build/figures/differences-BiSAM-vs-SAM.svg docs/images/differences.svg
	$(BIN)/bisam figure lower-bounds --out docs/images/lower-bounds.svg
	$(BIN)/bisam figure flips results --recipe cifar10/resnet56 --out docs/images/flips-resnet56.svg
	$(BIN)/bisam figure flips results --recipe cifar10/vgg19bn --out docs/images/flips-vgg19bn.svg
	$(BIN)/python docs/scripts/wrong_labels.py
	$(BIN)/python docs/scripts/frontier.py
	$(BIN)/python docs/scripts/screenshot.py
	$(BIN)/python docs/scripts/tables.py
	$(MAKE) site

# mkdocs-material, not Zensical, its successor: that reads the same mkdocs.yml, but its strict build (0.0.73) let dead links
# between pages pass.
site: $(VENV)/.installed  ## the docs site, with the ledger's page in it
	$(BIN)/bisam report results --without-weights --out docs/report.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(VENV)/.installed  ## the sdist and the wheel, as they would be published
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[test,check]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
