# Two commands: `make demo` shows what ikit-mcp does, `make test` proves it.
# Each makes .venv by itself; Python 3.11 or newer and make are all they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types unit wheel inspector profilers clips bench generated clean

demo: $(VENV)/demo
	$(BIN)/python agent_examples/01_scripted_client/main.py
	$(BIN)/python agent_examples/02_tune_an_engine/main.py
	$(BIN)/python agent_examples/04_faster_video_engine/main.py

test: lint types unit wheel

lint: $(VENV)/dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry --no-ansi .
	$(BIN)/codespell $$(git ls-files 2>/dev/null || find . -name '*.py' -not -path './.venv/*')

types: $(VENV)/dev
	$(BIN)/mypy
	for example in agent_examples/*/; do $(BIN)/mypy $$example || exit 1; done
	$(BIN)/mypy --platform darwin ikit_mcp ops/ikit_ops
	$(BIN)/mypy --platform win32 ikit_mcp ops/ikit_ops

unit: $(VENV)/dev
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The wheel, not the checkout, is what users run: build it, install it where nothing else is.
wheel: $(VENV)/dev
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	$(BIN)/python tests/e2e/wheel_check.py build/wheel/venv/bin

# The MCP Inspector as a client; skips with a printed reason where npm cannot give it.
inspector: $(VENV)/dev
	$(BIN)/python tests/e2e/inspector_check.py

# Benchmarks of real engines, each in a Python of its own that is built once and kept by version
# in the user's cache folder: engines-transformers (1.2 GB), engines-vllm (3.5 GB), engines-sglang.
# engines-llamacpp compiles llama-bench and llama-server there (10 minutes of two cores, 27 MB).
# A target skips with a printed reason where its packages, or a compiler, cannot be had.
ENGINE_TESTS = tests/integration/test_bench_$*.py
engines-llamacpp: ENGINE_TESTS = tests/integration/test_bench_llama_binaries.py

engines-%: $(VENV)/dev
	@if PYTHONPATH=tests $(BIN)/python -m helpers.engine_pythons $*; then \
	  IKIT_TEST_ENGINES=$* $(BIN)/pytest $(PYTEST_ARGS) $(ENGINE_TESTS); \
	elif [ $$? -ne 3 ]; then exit 1; fi

# NVIDIA's real profilers from Debian's packages (519 MB, kept in the user's cache folder) on this
# machine; prints why it skips where they cannot be had.
profilers: $(VENV)/dev
	$(BIN)/python tests/helpers/real_profilers.py
	IKIT_TEST_PROFILERS=1 $(BIN)/pytest $(PYTEST_ARGS) tests/integration/test_profile_nsight.py

# Clips for real: a diffusers engine served, recorded and replayed, in a Python of its own that is
# built once and kept by version (1.5 GB); skips with a printed reason where it cannot be had.
clips: $(VENV)/dev
	@if python=$$(PYTHONPATH=tests $(BIN)/python -m helpers.clips_python); then \
	  set -e; \
	  IKIT_TEST_CLIPS=1 $(BIN)/pytest --timeout 300 $(PYTEST_ARGS) tests/integration/test_clip_engines.py; \
	  IKIT_TEST_CLIPS=inside OMP_NUM_THREADS=1 $$python -m pytest --timeout 300 \
	    -o filterwarnings=default $(PYTEST_ARGS) tests/integration/test_clip_replay.py \
	    tests/integration/test_clip_words.py tests/integration/test_clip_making.py \
	    tests/integration/test_clip_pixels.py; \
	  IKIT_PYTHONS=$$python $(BIN)/python agent_examples/04_faster_video_engine/main.py; \
	elif [ $$? -ne 3 ]; then exit 1; fi

# Figures for the README: ratios measured in one run, printed as tables.
bench: $(VENV)/dev
	for script in tests/bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# Rewrite what is generated: README table and snippets, tool snapshots, record schema.
generated: $(VENV)/dev
	$(BIN)/python tests/generated.py --write

$(VENV)/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/demo: $(VENV)/base
	$(PIP) --editable '.[llamacpp]'
	touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache
