"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from optckpt.budget import format_bytes
from optckpt.compare import Comparison, Row
from optckpt.graph import TrainingGraph


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction as "12.3 %", "-" for None."""
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def solve_table(result: Mapping[str, Any], graph: TrainingGraph) -> Table:
    """The object that `optckpt solve` prints, for people."""
    plain, limit, peak = result["plain_peak"], result["budget"], result["peak"]
    # Not as markup: brackets in the name of a graph are part of it.
    title = Text(f"{graph.name or 'graph'}: {result['strategy']}")
    table = Table(show_header=False, title=title)
    table.add_column(style="bold")
    table.add_column()

    def size(count: int | None) -> str:
        if count is None:
            return "-"
        return f"{format_bytes(count)} ({percent(count / plain if plain else None)} of plain)"

    rows = {
        "status": result["status"],
        "plain peak": f"{format_bytes(plain)}, {len(graph.operations)} operations",
        "budget": size(limit),
        "peak": size(peak),
        "extra time": percent(result["overhead"], 3),
        "proven bound": percent(result["bound"], 3),
        "gap": percent(result["gap"], 3),
        "executions": "-" if result["executions"] is None else str(result["executions"]),
        "first schedule after": _seconds(result["seconds_first"]),
        "solved in": _seconds(result["seconds"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def comparison_table(comparison: Comparison) -> Table:
    """The rows of a comparison, one a strategy."""
    name = comparison.model.get("name", "model")
    step = comparison.plain_seconds
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        title=f"{name}: budget {_mib(comparison.budget)} MiB, "
        f"{percent(comparison.budget / comparison.plain_peak)} of the plain step's predicted peak\n"
        f"floor {_mib(comparison.floor)} MiB, {comparison.operations} operations"
        + ("" if step is None else f", plain step {1000 * step:.0f} ms"),
    )
    table.add_column("strategy", no_wrap=True)
    for heading in (
        "predicted\npeak\nMiB",
        "measured\npeak\nMiB",
        "budget\nmet?",
        "predicted\noverhead",
        "measured\ntime\nratio",
        "gap",
        "plan\nseconds",
        "gradients\nequal?",
    ):
        table.add_column(heading, justify="right", vertical="bottom")
    for row in comparison.rows:
        met = "-" if row.budget_met is None else "yes" if row.budget_met else "no"
        table.add_row(
            row.strategy,
            _mib(row.predicted_peak),
            _mib(row.measured_peak),
            met,
            percent(row.predicted_overhead),
            "-" if row.time_ratio is None else f"{row.time_ratio:.3f}",
            percent(row.gap, 2),
            "-" if row.plan_seconds is None else f"{row.plan_seconds:.1f}",
            _equal(row),
            style="bold" if row.strategy == "optimal" else None,
        )
    return table


def remarks(comparison: Comparison) -> list[str]:
    """A line for each row that has something to explain."""
    return [f"{row.strategy}: {row.reason}" for row in comparison.rows if row.reason]


def _equal(row: Row) -> str:
    if row.gradients_equal is None:
        return "-"
    if row.gradients_equal:
        return "yes"
    difference = row.gradient_difference
    return "no" if difference is None else f"no ({difference:.0e})"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f}"
