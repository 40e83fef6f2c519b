# Two commands on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TORCH := torch==2.13.0+cpu
LOCK := requirements/cpu.lock
# Weights in huge pages: decoding on a CPU reads all of them for every token (glibc 2.35+; ignored elsewhere).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: help install demo test test-all check lock clean

help:
	@echo "make demo    plain vLLM against VeriCache on a bundled model (about 3 minutes after install)"
	@echo "make test    lint, types, imports and the test suite (15 to 40 minutes on two cores)"
	@echo "make test-all  the same with the slow tests: more bit widths, more methods on more runners (twice the time)"
	@echo "make check   lint, types and imports only"
	@echo "make lock    pin the dependencies anew (needs uv)"

install: $(STAMP)

# Everything is pinned in the lock file and installed without dependency resolution, so that vLLM's CUDA builds of
# torchvision, torchaudio and torchcodec stay out (they break transformers next to a CPU torch).
$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "VeriCache needs Python 3.11 or newer")'
	@echo "== installing into $(VENV) (about 4 GB, some minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-deps '$(TORCH)' || \
	  $(BIN)/pip install --no-deps '$(TORCH)' --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install --no-deps -r $(LOCK)
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@touch $@

demo: install
	$(BIN)/vericache demo --json out/demo.json --png out/schedule.png

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m ''

lock:
	uv pip compile -q --universal --no-annotate --no-header --python-version 3.11 \
	  --override requirements/cpu.overrides requirements/cpu.in -o $(LOCK)

clean:
	rm -rf $(VENV) out build *.egg-info
