# make sweep: from a clone to a small sweep with its table and plot.
# make test:  lint, format check and tests.
# Needs python3 >= 3.11 with venv; everything else goes into .venv.

PYTHON ?= python3
WORKDIR ?= runs/sweep_tiny
VENV = .venv
BIN = $(VENV)/bin

.PHONY: sweep test test-slow test-examples test-plan test-plan-all \
  test-export lint format clean

sweep: $(VENV)/.report
	$(BIN)/python -m gamma_jax.main --config=configs/sweep_tiny.py \
	  --workdir=$(WORKDIR)

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile

# Minutes rather than seconds: only the tests that `make test` leaves out.
test-slow: $(VENV)/.dev $(VENV)/.notebooks
	$(BIN)/python -m pytest -m 'slow and not plan'

# Audits models that we did not write; one of them needs older packages.
test-examples:
	$(MAKE) VENV=.venv-examples .venv-examples/.examples
	.venv-examples/bin/python -m pip install --quiet pytest
	.venv-examples/bin/python -m pytest tests/portable_examples_test.py

# Compiles the train step for TPUs and GPUs that are not here: a large download.
# test-plan-all: every target, not one of each kind.
test-plan: PLANS = plan and not slow
test-plan-all: PLANS = plan
test-plan test-plan-all:
	$(MAKE) VENV=.venv-plan .venv-plan/.plan
	.venv-plan/bin/python -m pip install --quiet pytest pytest-xdist
	JAX_PLATFORMS=cpu .venv-plan/bin/python -m pytest -n auto -m '$(PLANS)' -rs \
	  tests/ahead_of_time_test.py

# Reads exports with torch and transformers, and runs the evaluation harness: a
# large download. PIP_INDEX_URL or PIP_FIND_LINKS may name CPU wheels of torch.
test-export:
	$(MAKE) VENV=.venv-export .venv-export/.readers
	.venv-export/bin/python -m pip install --quiet pytest
	.venv-export/bin/python -m pytest -m export -rs \
	  tests/export_test.py tests/lm_eval_model_test.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Keeps runs/: results are not build products.
clean:
	rm -rf $(VENV) .venv-examples .venv-export .venv-plan build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras, made anew when setup.py changes.
$(VENV)/.%: setup.py | $(VENV)/.made
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gamma_jax needs Python 3.11 or newer: make PYTHON=python3.12"; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@
