# make demo    from nothing to a trained recommender and its report, in demo/
# make demo-ranking    from nothing to a ranking model, a ranked list and its report, in demo-ranking/
# make test    all tests, on all cores                 make lint    style, types, layers, words  make format   fix the style
# make chaos   random faults against jobs of several ranks (N=100)
# make fuzz    random inputs through every operator under sanitizers, and mutated folders (N=1000000)
# make setup   only the set-up      make bench   the benchmarks (BENCH=name)  make asan     tests of kernels under sanitizers
# make docs    the documentation as a static site, in build/site
# make clean   remove what was built here, except .venv (make distclean removes that too)
#
# PYTHON=python3.12 chooses the interpreter. TORCH_INDEX=URL takes torch from another package index; the one of PyTorch's
# CPU builds avoids the CUDA packages of the usual torch for Linux.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo
DEMO_RANKING ?= demo-ranking
TORCH_INDEX ?=
SHELL := /bin/bash

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CREATED := $(VENV)/.stamp-created
TORCH := $(VENV)/.stamp-torch
PACKAGE := $(VENV)/.stamp-package
DEV := $(VENV)/.stamp-dev
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py csrc/*)
KERNEL_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.cc csrc/*.hpp)

.PHONY: help setup demo demo-ranking test lint format bench docs asan fuzz chaos clean distclean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# A stamp is written after its step succeeded, so an interrupted step is repeated.
$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "make: TurboGR needs Python 3.10 or newer; '$(PYTHON)' is not. Choose another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: '$(PYTHON)' cannot create a virtual environment; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH): $(CREATED) constraints.txt
	@echo "installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch setuptools
	@touch $@

# The pinned setuptools came with torch, so the build needs no isolated environment and no second download.
$(PACKAGE): $(TORCH) $(SOURCES)
	@echo "installing turbogr and building its kernels"
	@$(PIP) --no-build-isolation -e '.[tensorboard]'
	@touch $@

$(DEV): $(TORCH) $(SOURCES)
	@echo "installing turbogr with its development tools and building its kernels"
	@$(PIP) --no-build-isolation -e '.[tensorboard,triton,baselines,export,index,serve,dev]'
	@touch $(PACKAGE) $@

setup: $(DEV)

demo: $(PACKAGE)
	@if [ -d $(DEMO)/data ]; then echo "$(DEMO)/data exists already"; else \
		mkdir -p $(DEMO) && $(BIN)/turbogr prepare synthetic --out $(DEMO)/data; fi
	@$(BIN)/turbogr train quickstart --data $(DEMO)/data --out $(DEMO)/run --resume
	@$(BIN)/turbogr recommend $(DEMO)/run --k 10 --out $(DEMO)/recommendations.csv
	@$(BIN)/turbogr evaluate $(DEMO)/run
	@$(BIN)/turbogr report $(DEMO)/run

# Two stages: neighbours of the users' items find 500 candidates, and the ranking model chooses 10 of them.
demo-ranking: $(PACKAGE)
	@if [ -d $(DEMO_RANKING)/data ]; then echo "$(DEMO_RANKING)/data exists already"; else \
		mkdir -p $(DEMO_RANKING) && $(BIN)/turbogr prepare synthetic --with-features \
			--split time:2022-05-22,2022-05-25 --out $(DEMO_RANKING)/data; fi
	@$(BIN)/turbogr train ranking/demo --data $(DEMO_RANKING)/data --out $(DEMO_RANKING)/run --resume
	@$(BIN)/turbogr train simple/item-knn --data $(DEMO_RANKING)/data --out $(DEMO_RANKING)/candidates --resume
	@$(BIN)/turbogr recommend $(DEMO_RANKING)/run --candidates $(DEMO_RANKING)/candidates --num-candidates 500 \
		--k 10 --out $(DEMO_RANKING)/ranked.csv
	@$(BIN)/turbogr evaluate $(DEMO_RANKING)/run
	@$(BIN)/turbogr report $(DEMO_RANKING)/run

# One thread for each worker of the tests: more threads than cores wait for each other, and take many times as long.
test: $(DEV)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(if $(KERNEL_SOURCES),$(BIN)/clang-format --dry-run -Werror $(KERNEL_SOURCES))
	@$(BIN)/python tools/check_layers.py
	@$(BIN)/python tools/check_words.py

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tools/config_reference.py
	@$(BIN)/python tools/headline.py
	@$(if $(KERNEL_SOURCES),$(BIN)/clang-format -i $(KERNEL_SOURCES))

# The sanitized library is built beside the one in use, and only what follows loads it. A short trace per allocation
# suffices, and keeps small tensors fast.
SANITIZED := build/sanitized/turbogr/ops/_kernels.so
UNDER_SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	TURBOGR_KERNELS=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0:malloc_context_size=1:quarantine_size_mb=32 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

$(SANITIZED): $(DEV) $(SOURCES)
	@echo "building the kernels with sanitizers"
	@TURBOGR_SANITIZE=address,undefined $(BIN)/python setup.py -q build_ext --build-lib build/sanitized
	@touch $@

# The tests of large shapes are left out: they test arithmetic, and the sanitizer's shadow memory for them, 8.6 GB, is too
# large. Triton's kernels are not in the library.
asan: $(SANITIZED)
	@$(UNDER_SANITIZERS) $(BIN)/python -m pytest tests/ops -x --ignore=tests/ops/test_large_shapes.py \
		--ignore=tests/ops/triton_backend

# An interrupted one goes on where it stopped. SEED chooses other inputs.
fuzz: $(SANITIZED)
	@mkdir -p runs
	@$(UNDER_SANITIZERS) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.fuzz.operators \
		--inputs $(or $(N),100000) --seed $(or $(SEED),0) --json runs/fuzz-$(or $(N),100000).json
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.folders --inputs $$(( $(or $(N),100000) / 500 )) --seed $(or $(SEED),0)

# An interrupted one goes on where it stopped.
chaos: $(PACKAGE)
	@$(BIN)/turbogr chaos --faults $(or $(N),100) --seed $(or $(SEED),0) --json runs/chaos.json

bench: $(DEV)
	@mkdir -p runs/bench
	@set -e; for name in $(or $(BENCH),$$($(BIN)/turbogr bench | cut -d' ' -f1)); do \
		echo "== $$name"; \
		if [ $$name = paper ]; then $(BIN)/turbogr bench paper --out runs/bench/paper; \
		else $(BIN)/turbogr bench $$name --json runs/bench/$$name.json; fi; done

# The generator is heavy, so `make setup` does not install it.
docs: $(DEV)
	@$(PIP) --no-build-isolation -e '.[docs]'
	@$(BIN)/python tools/site/stage.py build/site-pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean --config-file build/site.yml
	@$(BIN)/python tools/site/check.py build/site
	@echo "build/site/index.html    to search it, serve it: $(BIN)/python -m http.server --directory build/site"

clean:
	rm -rf build dist *.egg-info $(DEMO) $(DEMO_RANKING) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find turbogr tests tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
	find turbogr -name '*.so' -delete
