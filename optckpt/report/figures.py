"""Pictures, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.frontier import Frontier

# Okabe and Ito's palette, which people with any colour vision can tell apart; yellow is left out
# (too pale on white).
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
_DASHES = ("-", "-", "-", "-", "--", "-.", ":")
_HIGHLIGHT = "optimal"
_HIGHLIGHT_COLOUR = "#0072B2"


def memory_figure(
    graph: TrainingGraph,
    schedules: Mapping[str, Schedule],
    path: Path,
    *,
    budget: int | None = None,
    title: str = "",
) -> None:
    """Draw the memory (MiB) over the time of the step (plain step = 100 %) as a PNG.

    Time is that of the operations, re-executions included. Schedules with the same profile as an
    earlier one share its line and are named with it.
    """
    figure = Figure(figsize=(9, 5.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plain = graph.seconds or 1.0
    lines: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    for name, schedule in schedules.items():
        profile = np.asarray(simulate(graph, schedule).profile, dtype=float) / 2**20
        seconds = np.array([graph.operations[o].seconds for o in schedule.executions])
        edges = np.concatenate([[0.0], np.cumsum(seconds)]) / plain * 100
        for names, _, known in lines:
            if known.shape == profile.shape and np.array_equal(known, profile):
                names.append(name)
                break
        else:
            lines.append(([name], edges, profile))
    colours = [c for c in _COLOURS if c != _HIGHLIGHT_COLOUR]
    for i, (names, edges, profile) in enumerate(lines):
        best = _HIGHLIGHT in names
        x, y = _envelope(edges, profile)
        axes.step(
            x,
            y,
            where="post",
            color=_HIGHLIGHT_COLOUR if best else colours[i % len(colours)],
            linestyle="-" if best else _DASHES[i // len(colours) % len(_DASHES)],
            linewidth=2.0 if best else 1.2,
            zorder=3 if best else 2,
            label=f"{', '.join(names)}: peak {profile.max(initial=0.0):.0f} MiB, "
            f"time {edges[-1]:.0f} %",
        )
    if budget is not None:
        axes.axhline(
            budget / 2**20,
            color="#444444",
            linestyle=(0, (5, 2)),
            linewidth=1.2,
            zorder=1,
            label=f"budget: {budget / 2**20:.0f} MiB",
        )
    axes.set_xlabel("time through the step, % of the plain step's time")
    axes.set_ylabel("memory of live tensors, MiB (resident included)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    _save(figure, path)


def frontier_figure(curve: Frontier, path: Path, *, title: str = "") -> None:
    """Draw the extra time (%) over the peak (MiB) of each point, with its bound, as a PNG."""
    figure = Figure(figsize=(7.5, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peaks = [p.peak / 2**20 for p in curve.points]
    cost = [100 * p.overhead for p in curve.points]
    axes.fill_between(
        [p.budget / 2**20 for p in curve.points],
        [100 * p.bound for p in curve.points],
        cost,
        color=_HIGHLIGHT_COLOUR,
        alpha=0.15,
        linewidth=0,
        label="not ruled out: between the proven bound and the best found",
    )
    axes.plot(
        peaks, cost, color=_HIGHLIGHT_COLOUR, marker="o", markersize=4, label="best schedule found"
    )
    knee = curve.knee
    if len(curve.points) > 2:
        axes.annotate(
            f"knee: {knee.peak / 2**20:.0f} MiB, +{100 * knee.overhead:.1f} %",
            (knee.peak / 2**20, 100 * knee.overhead),
            xytext=(14, 16),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": "#444444"},
        )
    if curve.floor is not None:
        axes.axvline(
            curve.floor.bound / 2**20,
            color="#444444",
            linestyle=(0, (5, 2)),
            linewidth=1.2,
            label=f"proven floor: {curve.floor.bound / 2**20:.0f} MiB",
        )
    axes.set_xlabel("peak of live tensors, MiB (resident included)")
    axes.set_ylabel("extra time, % of the plain step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(f"{title}: what less memory costs", loc="left", fontsize=11)
    axes.legend(fontsize=8.5, frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the picture, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _envelope(
    edges: np.ndarray, profile: np.ndarray, columns: int = 1500
) -> tuple[np.ndarray, np.ndarray]:
    """A step function that keeps every peak: the largest value within each of `columns` slots.

    Drawn in full, thousands of alternating steps blur into a band and hide the other lines.
    """
    if not len(profile):
        return edges, np.zeros(len(edges))
    slots = np.linspace(0, edges[-1], columns + 1)
    first = np.clip(np.searchsorted(edges, slots[:-1], side="right") - 1, 0, len(profile) - 1)
    last = np.clip(np.searchsorted(edges, slots[1:], side="left"), first + 1, len(profile))
    values = np.array([profile[a:b].max() for a, b in zip(first, last, strict=True)])
    return slots, np.append(values, values[-1])
