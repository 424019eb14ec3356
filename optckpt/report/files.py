"""Writes a comparison into a folder."""

from __future__ import annotations

import json
from pathlib import Path

from optckpt.compare import Comparison
from optckpt.graph import write_text
from optckpt.schedule import Schedule


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.json, memory.png, graph.json and plan-STRATEGY.json; returns the first two.

    Files of the same names are replaced.
    """
    from optckpt.report.figures import memory_figure

    report = folder / "comparison.json"
    write_text(report, json.dumps(comparison.to_json(), indent=2))
    graph = comparison.graph
    if graph is None:
        return [report]
    graph.save(folder / "graph.json")
    for name, plan in comparison.plans.items():
        plan.save(folder / f"plan-{name}.json")
    schedules = {"plain": Schedule.base(graph)}
    schedules |= {name: p.schedule for name, p in comparison.plans.items()}
    figure = folder / "memory.png"
    title = f"{graph.name}: memory over one training step"
    memory_figure(graph, schedules, figure, budget=comparison.budget, title=title)
    return [report, figure]
