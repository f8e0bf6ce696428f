# Two commands do everything on a machine with python3: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
POLICY ?= numpy
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check bench clean

demo: $(VENV)/.demo-$(POLICY) ## a fleet of real ALE environments, with live rates and the verdict; POLICY=torch, ARGS="--env CartPole-v1"
	$(BIN)/slotloader demo --policy $(POLICY) $(ARGS)

test: $(VENV)/.dev ## lint, types, every test; ARGS="-k former"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.bench ## every benchmark, medians of five runs
	for name in dispatch slow_reset heavy pixels consumer_cpu startup recovery overlap adapter_cost inference_path learners on_policy; do $(BIN)/python -m benchmarks.$$name || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-numpy: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[gym]'
	touch $@

$(VENV)/.demo-torch $(VENV)/.demo-jax: $(VENV)/.demo-%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[gym,$*]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[bench]'
	touch $@

clean: ## removes the virtual environment and caches
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
