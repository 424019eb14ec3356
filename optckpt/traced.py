"""What is planned from the command line: a workload, traced and costed in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from optckpt.allocator import Allocator
from optckpt.budget import Budget
from optckpt.config import Config
from optckpt.graph import TrainingGraph
from optckpt.judge import plain_peak
from optckpt.planner import make_plan
from optckpt.report.progress import describe
from optckpt.schedule import Plan
from optckpt.step_process import StepProcess


@dataclass(frozen=True)
class Traced:
    """A workload's step. Sizes are bytes, resident included; times are seconds."""

    name: str
    graph: TrainingGraph
    """To be planned."""
    plain: TrainingGraph
    """The step before any rewriting."""
    allocator: Allocator | None
    """A model of the device's, if it has one to report."""
    device: str
    limit: int
    """What the device has."""
    plain_peak: int
    """Predicted peak of the plain step."""
    trace_seconds: float
    cost_seconds: float

    def budget(self, wanted: Budget | None) -> int:
        """In bytes; None: all that the device has."""
        return self.limit if wanted is None else wanted.resolve(self.plain_peak)


def trace(settings: Config, show: Callable[[str], None] = lambda text: None) -> Traced:
    """Trace and cost what `settings.model` says; nothing of TensorFlow is loaded here.

    `show`: told in a few words what is being done. Raises OptckptError if it cannot be traced.
    """
    show("tracing the model")
    with TemporaryDirectory(prefix="optckpt-") as folder, StepProcess(show) as process:
        process.ask("load", config=sent(settings))
        graph, plain = Path(folder) / "graph.json", Path(folder) / "plain.json"
        answer = process.ask("capture", path=str(graph), plain_path=str(plain))
        return traced_of(answer, TrainingGraph.load(graph), TrainingGraph.load(plain))


def sent(settings: Config) -> dict[str, Any]:
    """The configuration as a process of `StepProcess` is told it."""
    return settings.model_dump(mode="json", exclude_unset=False)


def traced_of(answer: Mapping[str, Any], graph: TrainingGraph, plain: TrainingGraph) -> Traced:
    """What a process answered to "capture"."""
    known = answer["allocator"]
    allocator = None if known is None else Allocator.from_json(known)
    return Traced(
        name=graph.name,
        graph=graph,
        plain=plain,
        allocator=allocator,
        device=str(answer["device"]),
        limit=int(answer["limit"]),
        plain_peak=plain_peak(plain, allocator),
        trace_seconds=float(answer["trace_seconds"]),
        cost_seconds=float(answer["cost_seconds"]),
    )


def plan_of(
    found: Traced,
    settings: Config,
    budget: Budget | None,
    max_overhead: float | None = None,
    strategy: str | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan of the settings for a budget, or for `max_overhead`. Raises as `make_plan`."""
    name = strategy or settings.strategy
    show(f"{name}: planning {len(found.graph.operations)} operations")
    options = replace(
        settings.solve_options(), progress=lambda state: show(f"{name}: {describe(state)}")
    )
    return make_plan(
        found.graph,
        None if max_overhead is not None else found.budget(budget),
        name,
        options,
        margin=settings.memory.margin,
        allocator=found.allocator,
        plain_graph=found.plain,
        max_overhead=max_overhead,
        reorder=settings.solver.order == "auto",
        repeat=settings.solver.repeat,
    )
