"""A plan and its certificate in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from optckpt.budget import format_bytes
from optckpt.explain import Explanation, LayerFate, OperationExplanation
from optckpt.graph import TrainingGraph
from optckpt.profile import Profile, Share
from optckpt.schedule import Plan
from optckpt.solvers.frontier import Frontier
from optckpt.traced import Traced


def plan_table(plan: Plan, graph: TrainingGraph) -> Table:
    """What a plan needs and costs, one line a figure."""
    table = Table(show_header=False, title=Text(f"{graph.name or 'graph'}: {plan.strategy}"))
    table.add_column(style="bold")
    table.add_column()

    def size(count: int | None) -> str:
        if count is None:
            return "none"
        share = f" ({100 * count / plan.plain_peak:.1f} % of plain)" if plan.plain_peak else ""
        return format_bytes(count) + share

    again = len(plan.schedule) - len(set(plan.schedule.executions))
    rows = {
        "plain peak": f"{format_bytes(plan.plain_peak)}, {len(graph.operations)} operations",
        "budget": size(plan.budget),
        "predicted peak": size(plan.predicted_peak),
        "floor": size(plan.floor),
        "extra time": f"{100 * plan.overhead:.2f} %",
        "executed again": f"{again} operations",
        "planned in": f"{plan.certificate.seconds:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def certificate(plan: Plan) -> list[str]:
    """What is proven about a plan, in sentences."""
    proof = plan.certificate
    extra, bound = f"{100 * plan.overhead:.2f} %", f"{100 * proof.bound:.2f} %"
    covered = "" if proof.valid_for == "any order" else " in the step's order of operations"
    if proof.repeats == "forward":
        covered += " with forward operations alone executed again"
    if plan.overhead == 0:
        first = "Nothing is executed again: the step takes no more time than the plain one."
    elif proof.bound > 0:
        first = (
            f"The step takes {extra} more time than the plain one. Proven: no schedule{covered} "
            f"that fits into {_target(plan)} takes less than {bound} more."
        )
    else:
        first = (
            f"The step takes {extra} more time than the plain one. Nothing is proven about how "
            f"much less it could be: strategy {plan.strategy!r} proves no bounds, or had no time."
        )
    lines = [first]
    if plan.target is not None and plan.budget is not None and plan.target < plan.budget:
        lines.append(
            f"Of the budget, {format_bytes(plan.budget - plan.target)} are held back: the margin, "
            "and what the allocator loses in chunks."
        )
    return lines


def _target(plan: Plan) -> str:
    return "the memory" if plan.target is None else f"{format_bytes(plan.target)} of live tensors"


def layer_table(found: Explanation) -> Table:
    """What happens to the activations of each layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer")
    for heading in ("kept\nMiB", "computed\nagain MiB", "operations\nagain", "time again\nms"):
        table.add_column(heading, justify="right")

    def row(name: str, layers: Sequence[LayerFate], style: str | None = None) -> None:
        table.add_row(
            Text(name),
            _mib(sum(r.kept for r in layers)),
            _mib(sum(r.computed_again for r in layers)),
            str(sum(r.executions_again for r in layers) or "-"),
            _ms(sum(r.seconds_again for r in layers)),
            style=style,
        )

    for layer in found.layers:
        row(layer.layer, [layer])
    table.add_section()
    row("all", found.layers, "bold")
    return table


def peak_and_floor(found: Explanation) -> list[str]:
    """What sets the peak and the floor, in sentences."""
    sizes: dict[str, int] = {}
    for held in found.at_peak:
        sizes[held.layer] = sizes.get(held.layer, 0) + held.size
    largest = ", ".join(f"{layer} ({format_bytes(size)})" for layer, size in sizes.items())
    lines = []
    if found.peak_operation:
        lines.append(
            f"The live tensors need most, {format_bytes(found.peak)}, while "
            f"{found.peak_operation!r} runs. Of this, {format_bytes(found.resident)} are resident "
            f"(variables, inputs); the largest others are of {largest}."
        )
    if found.floor_place:
        lines.append(
            f"No schedule needs less than {format_bytes(found.floor)}, because of "
            f"{found.floor_place}."
        )
    return lines


def operation_table(one: OperationExplanation) -> Table:
    """One operation under a plan."""
    table = Table(show_header=False, title=Text(one.name))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("kind", Text(one.kind))
    table.add_row("layer", Text(one.layer))
    table.add_row("time", f"{1000 * one.seconds:.3f} ms")
    table.add_row("workspace", format_bytes(one.workspace))
    table.add_row("executed at", ", ".join(f"{100 * t:.1f} %" for t in one.executions))
    for written in one.writes:
        lives = ", ".join(f"{100 * a:.1f}-{100 * b:.1f} %" for a, b in written.copies)
        readers = ", ".join(written.readers[:4]) + (" ..." if len(written.readers) > 4 else "")
        table.add_row("writes", f"{format_bytes(written.size)}: {written.fate}")
        table.add_row("  in memory", f"{lives} of the step's time")
        table.add_row("  read by", Text(readers or "nothing in the step"))
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}" if count else "-"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else "-"


def profile_table(found: Traced, result: Profile, rows: Sequence[Share], by: str) -> Table:
    """The dearest operations, gathered."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        title=Text(
            f"{found.name}: {result.operations} operations, {1000 * result.seconds:.1f} ms one "
            f"after the other, plain peak {format_bytes(found.plain_peak)}"
        ),
    )
    table.add_column({"kind": "operation type", "layer": "layer", "op": "operation"}[by])
    for heading in ("count", "time\nms", "share\n%", "activations\nMiB", "workspace\nMiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.name),
            str(row.operations),
            f"{1000 * row.seconds:.2f}",
            f"{100 * row.fraction:.1f}",
            _mib(row.activations),
            _mib(row.workspace),
        )
    return table


def frontier_table(curve: Frontier, found: Traced) -> Table:
    """The points of a memory-time curve."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        title=Text(f"{found.name}: the least extra time within a budget of live bytes"),
    )
    for heading in (
        "budget\nMiB",
        "share of\nplain %",
        "peak\nMiB",
        "extra\ntime %",
        "proven\n>= %",
    ):
        table.add_column(heading, justify="right")
    table.add_column("")
    plain = curve.points[-1].budget or 1
    for point in curve.points:
        note = "knee" if point is curve.knee and len(curve.points) > 2 else ""
        table.add_row(
            f"{point.budget / 2**20:.1f}",
            f"{100 * point.budget / plain:.1f}",
            f"{point.peak / 2**20:.1f}",
            f"{100 * point.overhead:.2f}",
            f"{100 * point.bound:.2f}",
            note,
        )
    return table


def frontier_words(curve: Frontier) -> list[str]:
    """Floor and knee of a memory-time curve, in sentences."""
    lines = []
    floor = curve.floor
    if floor is not None:
        between = (
            f"is {format_bytes(floor.peak)}"
            if floor.bound == floor.peak
            else f"lies between {format_bytes(floor.bound)} (proven) and {format_bytes(floor.peak)}"
        )
        lines.append(f"The smallest peak that any schedule reaches {between}.")
    knee = curve.knee
    if len(curve.points) > 2:
        lines.append(
            f"Down to the knee, {format_bytes(knee.peak)} for {100 * knee.overhead:.1f} % more "
            "time, memory is cheap; below it, each byte costs much more."
        )
    return lines


def frontier_json(curve: Frontier, found: Traced) -> dict[str, Any]:
    """A JSON-able mapping of a memory-time curve. Sizes are bytes, resident included."""
    floor = curve.floor
    return {
        "format": "optckpt.frontier",
        "version": 1,
        "name": found.name,
        "device": found.device,
        "plain_peak": found.plain_peak,
        "floor": None if floor is None else {"bound": floor.bound, "peak": floor.peak},
        "knee": curve.points.index(curve.knee),
        "points": [
            {
                "budget": p.budget,
                "peak": p.peak,
                "overhead": p.overhead,
                "bound": p.bound,
                "valid_for": p.valid_for,
            }
            for p in curve.points
        ],
    }
