# Two commands: `make demo` and `make test`. Both make .venv and install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: help demo test test-all test-cpus fuzz bench bench-loops gpu-bundle lint types docs dist clean

help:
	@echo "make demo      install, get real images, compare five token mixers, say where the report is"
	@echo "make test      lint, types and the tests that take minutes"
	@echo "make test-all  the slow tests as well"
	@echo "make test-cpus  the tests that depend on arithmetic as CPUs with AVX2, with SSE4.2 and with two threads compute"
	@echo "make fuzz      an hour of hostile commands and files; FUZZ_SECONDS and FUZZ_SEED change that"
	@echo "make bench     measure speed and memory on this CPU against floors and other packages, some minutes"
	@echo "make bench-loops  training loops next to those of other packages, start-up, and large inputs"
	@echo "make gpu-bundle  one archive of tests and benchmarks for a GPU machine without a network"
	@echo "make docs      build the documentation into site/"
	@echo "make dist      build the wheel and the source archive into dist/"

# torch is installed first and alone: a range in a dependency list would make pip look for the newest build instead of the
# one that the machine may have at hand.
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("tokenmix needs Python 3.11 or newer: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two, most of it PyTorch"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet torch==2.14.1 torchvision==0.29.1
	$(BIN)/pip install --quiet -e '.[train]'
	touch $@

$(BIN)/.installed-test: $(BIN)/.installed
	$(BIN)/pip install --quiet -e '.[test]'
	touch $@

$(BIN)/.installed-bench: $(BIN)/.installed
	$(BIN)/pip install --quiet -e '.[bench]'
	touch $@

demo: $(BIN)/.installed
	$(BIN)/python -m recipes.demo

# One thread in each of a few processes: tests are many small tensors, and threads that wait for each other cost more
# than they give. In the order of their names, since those of few tests are not the short ones.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(BIN)/.installed-test lint types
	$(PYTEST) -m "not slow and not gpu"

test-all: $(BIN)/.installed-test lint types
	HYPOTHESIS_PROFILE=search $(PYTEST)

# PyTorch and MKL choose their kernels by the CPU; these settings make them choose those of others.
ARITHMETIC := -m "arithmetic and not slow and not gpu"
test-cpus: $(BIN)/.installed-test
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(ARITHMETIC)
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) $(ARITHMETIC)
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(PYTEST) $(ARITHMETIC)

# Commands with hostile options, recipes, run folders and files: a minute in test-all, here an hour.
fuzz: $(BIN)/.installed-test
	FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/fuzz

# BENCH='--only external --device cuda' runs a part, or runs elsewhere.
gpu-bundle: $(BIN)/.installed
	$(BIN)/python benchmarks/gpu_bundle.py

bench: $(BIN)/.installed-bench
	$(BIN)/python benchmarks/run.py $(BENCH)

# Results of the three go to benchmarks/results as JSON.
bench-loops: $(BIN)/.installed-test
	$(BIN)/python benchmarks/end_to_end.py --out benchmarks/results/end_to_end.json $(BENCH)
	$(BIN)/python benchmarks/startup.py --out benchmarks/results/startup.json
	$(BIN)/python benchmarks/large_inputs.py --out benchmarks/results/large_inputs.json

lint: $(BIN)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed-test
	$(BIN)/pyrefly check

dist: $(BIN)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

docs: $(BIN)/.installed-test
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist runs demo .pytest_cache .ruff_cache
