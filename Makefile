# `make demo` and `make test` each work as the first command on a machine with Python >= 3.10.
PYTHON ?= python3
BIN := .venv/bin
FIRST_PLANS := from optckpt import make_plan; \
	from optckpt.frontends.synthetic import chain, random_layered; \
	from optckpt.solvers.registry import SolveOptions; \
	make_plan(chain(12), 11 << 20); \
	make_plan(random_layered(40, 1), 0.8, options=SolveOptions(order="free"))

.PHONY: demo test lint format clean

demo: .venv/installed
	$(BIN)/optckpt compare configs/resnet_cifar10.yaml

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
# First plans compile the solvers' inner loops, which takes half a minute; do that here.
	$(BIN)/python -c '$(FIRST_PLANS)'
	touch $@

clean:
	rm -rf .venv out
