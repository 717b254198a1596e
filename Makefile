# Every target sets up what it needs in a virtual environment of its own; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find ffi -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
CXX_FILES := $(shell find ffi -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

TWO_GPUS = $(filter-out 0 1,$(shell nvidia-smi --list-gpus 2>/dev/null | wc -l))
SANITIZED_TESTS := staging or one_half

.PHONY: demo test test-gpu bench gpu sanitize-gpu bench-gpu lint format clean

demo: $(VENV)/.installed
	$(BIN)/python -m jax_symmkv demo

test: $(VENV)/.installed
	$(BIN)/python tests/run_suite.py unit distributed faults $(SUITE_FLAGS)

# On a GPU machine without a network: builds beside the sources with what its Python has (jax, nanobind,
# pytest) and cmake and nvcc.
test-gpu:
	cmake -S . -B build/gpu -DPython_EXECUTABLE="$$(command -v $(PYTHON))" -DSYMMKV_TEST_CONTROLS=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=native
	cmake --build build/gpu --parallel
	cmake --install build/gpu --prefix .
	SYMMKV_REQUIRE_GPU=1 $(PYTHON) tests/run_suite.py kernels-1-gpu $(if $(TWO_GPUS),kernels-2-gpu) $(SUITE_FLAGS)

# The same, then the kernels under compute-sanitizer, then what can be measured on this machine.
gpu: test-gpu
	$(MAKE) sanitize-gpu bench-gpu

# Few tests: a sanitized kernel takes a hundred times as long. racecheck sees shared memory.
sanitize-gpu:
	for tool in memcheck racecheck; do \
	  SYMMKV_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 --kernel-regex kns=symmkv \
	    $(PYTHON) -m pytest -q tests/kernels/test_streams.py -k "$(SANITIZED_TESTS)" || exit 1; \
	done

bench-gpu:
	mkdir -p build/gpu/results
	$(PYTHON) bench/kernels.py --json build/gpu/results/kernels.json
	$(PYTHON) bench/jit_calls.py --json build/gpu/results/jit_calls.json
	$(if $(TWO_GPUS),,JAX_LOCAL_DEVICE_IDS=0) $(PYTHON) -m jax_symmkv bench --platform gpu \
	  --json build/gpu/results/bench.json

bench: $(VENV)/.installed
	$(BIN)/python -m jax_symmkv bench

lint: $(VENV)/.linters
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(VENV)/.linters
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

# Editable, with the module that the negative control of the protocol test needs.
$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cli,test]' \
	  --config-settings=cmake.define.SYMMKV_TEST_CONTROLS=ON
	touch $@

# Exact versions: another one may format otherwise.
$(VENV)/.linters: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet clang-format==23.1.5 mypy==2.4.1 ruff==0.17.6
	touch $@

clean:
	rm -rf $(VENV) build dist
