# `make demo` and `make test` each work as the first command on a machine with Python >= 3.10.
PYTHON ?= python3
BIN := .venv/bin
FIRST_PLAN := from optckpt.frontends.synthetic import chain; \
	from optckpt.solvers.registry import solve; solve(chain(12), 11 << 20)

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
# A first plan compiles the solvers' inner loops, which takes some seconds; do that here.
	$(BIN)/python -c '$(FIRST_PLAN)'
	touch $@

clean:
	rm -rf .venv out
