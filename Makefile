# From a fresh clone: `make demo` trains a small model with FP4 attention, `make test` runs every test.
# Both set everything up in .venv first. Needs Linux, python3 >= 3.10 with pip, and g++; nvcc if there is one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help build demo test-tools test test-gpu cuda-tools clean
help:
	@sed -n '1,2s/^# //p' Makefile
	@echo "Also: make build, make test-gpu, make cuda-tools (nvcc from PyPI, into .venv), make clean."

# Whether a python imports a torch that will do: $(call has_torch,python)
has_torch = $(1) -c "import sys, torch; \
  sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 10))" 2>/dev/null
# Last words of a failing recipe: $(call stop,what to do)
stop = { echo "attn-qat: $(1)"; exit 1; }

# torch comes from python3 where that has one; else requirements.txt names the version.
$(VENV)/ready: requirements.txt
	@command -v $(firstword $(CXX)) >/dev/null || $(call stop,no C++ compiler: install g++ or set CXX)
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
	  $(call stop,$(PYTHON) is missing or older than 3.10: install Python or set PYTHON)
	@rm -rf $(VENV); \
	site=$$($(call has_torch,$(PYTHON)) && echo --system-site-packages); \
	echo "attn-qat: making $(VENV) $$site"; \
	$(PYTHON) -m venv $$site $(VENV) >/dev/null || { $(PYTHON) -m venv --without-pip $$site $(VENV) && \
	  $(PYTHON) -m pip -q --python $(BIN)/python install pip; } || \
	  $(call stop,cannot make $(VENV): install pip and Python's venv module (Debian: python3-venv))
	@$(call has_torch,$(BIN)/python) || { \
	  echo "attn-qat: installing $$(grep ^torch requirements.txt)"; $(PIP) install -r requirements.txt; }
	@$(PIP) install 'setuptools>=77' ninja 'pybind11>=2.12'
	@touch $@

# Through setup.py so that the compiler is seen at work; pip then finds everything built.
build: $(VENV)/ready
	@$(BIN)/python setup.py -q build_ext --inplace
	@test $(VENV)/installed -nt pyproject.toml || \
	  { $(PIP) install --no-build-isolation --no-deps -e . && touch $(VENV)/installed; }

demo: build
	@test $(VENV)/demo -nt pyproject.toml || \
	  { $(PIP) install --no-build-isolation -e '.[demo]' && touch $(VENV)/demo; }
	$(BIN)/python -m attn_qat demo

# GoogleTest: the system's, else its sources from PyPI. CMakeLists.txt looks in the same order.
test-tools: build
	@test $(VENV)/test -nt pyproject.toml || { $(PIP) install --no-build-isolation -e '.[test]' && \
	  { test -f /usr/include/gtest/gtest.h || $(PIP) install ros-gtest-vendor==1.15.1 || \
	    $(call stop,no GoogleTest: install libgtest-dev (Debian) or: pip install ros-gtest-vendor); } && \
	  touch $(VENV)/test; }

test: test-tools
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The same suite on a GPU, then every kernel under compute-sanitizer; the last line is a summary.
test-gpu: test-tools
	$(BIN)/python tools/test_gpu.py

# The CUDA compiler without root; `make build` then finds it.
cuda-tools: $(VENV)/ready
	$(PIP) install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' \
	  'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'

clean:
	rm -rf build dist $(VENV) python/*.egg-info python/attn_qat/*.so
