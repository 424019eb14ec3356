"""The table of the zoo's rows, `docs/zoo.md`.

PYTHONPATH=tests python -m zoo.table > docs/zoo.md
"""

from __future__ import annotations

import importlib
from pathlib import Path

from zoo.harness import STEPS, Family, Row

HEAD = f"""# The zoo: models that are trained in the tests

Each row is a small model that `tests/zoo` trains for {STEPS} steps without optckpt and for
{STEPS} steps within a budget. Losses, gradients where the way in returns them, and all variables
at the end (weights, optimizer slots, moving averages, seeds, metrics) must be the same in every
bit, with TensorFlow's graph optimiser off on both sides; the peak that the allocator reports must
be within the budget; no step is planned twice, and there may be no warning. The budget is the
given share of what the plain step takes beyond what the process held before. In the last column:
whether operations are really executed again, or what else holds.

| family | model | way in | feature | budget | |
| --- | --- | --- | --- | --- | --- |
"""


def families() -> list[Family]:
    """All families, in the order of their files' names."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"zoo.{name}") for name in names if name != "test_table"]
    return [module.zoo for module in modules]


def table() -> str:
    """The text of `docs/zoo.md`."""
    lines = [_line(row) for family in families() for row in family.rows]
    return HEAD + "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    holds = "executed again" if row.repeats else "nothing again"
    if row.plans > 1:
        holds += f", {row.plans} plans"
    if row.margin is not None:
        holds += f", with a margin of {100 * row.margin:.0f} %"
    if row.tolerance:
        holds += f", the same but for rounding ({row.tolerance:g})"
    name = row.name.replace("_", " ")
    budget = f"{100 * row.share:.0f} %"
    return f"| {row.family} | {name} | `{row.way}` | {row.feature} | {budget} | {holds} |"


if __name__ == "__main__":
    print(table(), end="")
