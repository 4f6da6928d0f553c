# Everything happens in .venv, which the first target that needs it sets up. Another Python: make PYTHON=python3.12 ...

PYTHON ?= python3
BIN := .venv/bin
CODE := kvine tests benchmarks
NATIVE := $(wildcard kvine/kernels/native/*.cpp kvine/kernels/native/*.hpp) kvine/kernels/native/CMakeLists.txt
OLDER_TRANSFORMERS ?= 5.23.0
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt -e

.DEFAULT_GOAL := demo
.DELETE_ON_ERROR:
.PHONY: demo test lint bench proof older-transformers sanitize docs clean

# The question is one whose answer is far from any tie, so that it is right in every dtype.
demo: .venv/base.stamp  ## fetch the default model and ask it something
	$(BIN)/kvine pull smollm2-135m
	$(BIN)/kvine generate --chat "What is the capital of Japan?"

test: .venv/dev.stamp  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow"

proof: .venv/dev.stamp  ## the slow tests
	$(BIN)/python -m pytest -m slow

older-transformers: .venv/dev.stamp  ## the tests of KvineCache under the minor version of transformers before the newest
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .venv-older "transformers==$(OLDER_TRANSFORMERS)"
	PYTHONPATH=.venv-older $(BIN)/python -m pytest tests/integrations

sanitize: .venv/dev.stamp  ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (GCC)
	$(BIN)/python -m pip install -q -c constraints.txt cmake ninja nanobind
	$(BIN)/cmake -S kvine/kernels/native -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	    -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" \
	    -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0 $(BIN)/python tests/kernels/sanitized.py build/sanitize

lint: .venv/dev.stamp  ## style, formatting, types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

bench: .venv/dev.stamp  ## speed, beside what the machine allows and beside transformers
	$(BIN)/kvine bench smollm2-135m --vs transformers

docs: .venv/dev.stamp  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "To read it: $(BIN)/python -m http.server --directory build/site 8000, then http://localhost:8000"

clean:  ## what the targets above have made; fetched models stay
	rm -rf .venv .venv-older build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf kvine/kernels/_native*.so $(addprefix kvine/kernels/native/,.cmake .ninja_* .skbuild-info.json CMakeCache.txt \
	    CMakeFiles CMakeInit.txt build.ninja cmake_install.cmake libnanobind-static.a)
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, so that a second call installs nothing.
.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "Kvine needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/base.stamp: .venv/python.stamp pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing what Kvine needs into .venv; this takes a few minutes the first time."
	$(PIP_INSTALL) .
	@touch $@

.venv/dev.stamp: .venv/python.stamp pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing what Kvine and its tests need into .venv; this takes a few minutes the first time."
	$(PIP_INSTALL) ".[dev]"
	@touch .venv/base.stamp $@
