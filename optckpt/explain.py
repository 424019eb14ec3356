"""Why a plan keeps what it keeps: by layer, and operation by operation."""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.layers import layers_of
from optckpt.lives import Copy, copies
from optckpt.schedule import Plan
from optckpt.simulate import Simulation, simulate
from optckpt.solvers.floor import proven_floor

Fate = Literal["kept", "computed again", "passing"]
"""Of what the forward pass writes: in memory until the backward pass reads it; given up and
computed again for it; or not read by the backward pass at all."""


@dataclass(frozen=True, slots=True)
class LayerFate:
    """What happens to a layer's activations. Sizes are bytes, times are seconds."""

    layer: str
    kept: int
    """Bytes that stay in memory from the forward to the backward pass."""
    computed_again: int
    """Bytes that are given up and computed again."""
    executions_again: int
    seconds_again: float
    """Time of all operations of the layer that are executed again."""


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer in memory at some moment."""

    operation: str
    """What wrote it."""
    layer: str
    size: int


@dataclass(frozen=True)
class Explanation:
    """Sizes are bytes, resident included where peaks are meant."""

    layers: tuple[LayerFate, ...]
    """In the order of the step; those with activations that the backward pass reads."""
    floor: int
    floor_place: str
    """The operation that sets the floor, in words."""
    peak: int
    peak_operation: str
    """What runs as the live bytes are highest."""
    at_peak: tuple[Held, ...]
    """The largest buffers in memory then, the largest first."""
    resident: int

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)


_MOST_HELD = 12


def explain(graph: TrainingGraph, plan: Plan, depth: int = 1) -> Explanation:
    """What the plan does with the activations of each layer, and what sets peak and floor.

    `depth`: how many scopes of the operations' names make a layer.

    Raises:
        PlanError: if the plan was made for another graph.
    """
    plan.check_graph(graph)
    result = simulate(graph, plan.schedule)
    layers = layers_of(graph, depth)
    floor = proven_floor(graph, "fixed" if plan.schedule.in_base_order else "free")
    step = result.peak_step
    held = []
    for copy in copies(graph, plan.schedule):
        if copy.born <= step <= copy.dies:
            writer = graph.producer[copy.buffer]
            name = graph.operations[writer].name
            held.append(Held(name, layers[writer], graph.buffers[copy.buffer].size))
    held.sort(key=lambda h: -h.size)
    running = plan.schedule.executions[step] if step >= 0 else None
    return Explanation(
        layers=_layers(graph, result, layers),
        floor=floor.bytes,
        floor_place=floor.place(graph),
        peak=result.peak,
        peak_operation="" if running is None else graph.operations[running].name,
        at_peak=tuple(held[:_MOST_HELD]),
        resident=graph.resident,
    )


def fate_of(graph: TrainingGraph, counts: tuple[int, ...], buffer: int) -> Fate:
    """What happens to a buffer, given how often each operation is executed."""
    writer = graph.producer[buffer]
    read = any(not graph.operations[r].forward for r in graph.readers[buffer])
    if not graph.operations[writer].forward or not read:
        return "passing"
    return "computed again" if counts[writer] > 1 else "kept"


def _layers(graph: TrainingGraph, result: Simulation, layers: list[str]) -> tuple[LayerFate, ...]:
    kept: dict[str, int] = defaultdict(int)
    again: dict[str, int] = defaultdict(int)
    executions: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for i, op in enumerate(graph.operations):
        layer = layers[i]
        if result.counts[i] > 1:
            executions[layer] += result.counts[i] - 1
            seconds[layer] += (result.counts[i] - 1) * op.seconds
        for b in op.writes:
            fate = fate_of(graph, result.counts, b)
            if fate == "kept":
                kept[layer] += graph.buffers[b].size
            elif fate == "computed again":
                again[layer] += graph.buffers[b].size
    return tuple(
        LayerFate(layer, kept[layer], again[layer], executions[layer], seconds[layer])
        for layer in dict.fromkeys(layers)
        if kept[layer] or again[layer] or executions[layer]
    )


@dataclass(frozen=True, slots=True)
class Written:
    """What an operation writes, and where that is in memory."""

    size: int
    fate: Fate
    copies: tuple[tuple[float, float], ...]
    """(from, to) of each copy, as shares of the schedule's time."""
    readers: tuple[str, ...]


@dataclass(frozen=True)
class OperationExplanation:
    """One operation under a plan. Times are seconds, sizes bytes."""

    name: str
    kind: str
    layer: str
    seconds: float
    workspace: int
    forward: bool
    executions: tuple[float, ...]
    """When it is executed, as shares of the schedule's time."""
    writes: tuple[Written, ...]
    reason: str
    """Why it is, or is not, executed again."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)


def explain_operation(
    graph: TrainingGraph, plan: Plan, name: str, depth: int = 1
) -> OperationExplanation:
    """When an operation is executed, how long what it writes is in memory, and why.

    `name`: an operation's name, or a part of it that only one has.

    Raises:
        OptckptError: if there is no such operation, or several.
        PlanError: if the plan was made for another graph.
    """
    plan.check_graph(graph)
    index = _find(graph, name)
    op = graph.operations[index]
    result = simulate(graph, plan.schedule)
    at = [0.0]
    for o in plan.schedule.executions:
        at.append(at[-1] + graph.operations[o].seconds)
    end = at[-1] or 1.0
    lives: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies(graph, plan.schedule):
        lives[copy.buffer].append(copy)
    written = tuple(
        Written(
            size=graph.buffers[b].size,
            fate=fate_of(graph, result.counts, b),
            copies=tuple(
                (at[c.born] / end, at[min(c.dies + 1, len(plan.schedule))] / end) for c in lives[b]
            ),
            readers=tuple(graph.operations[r].name for r in graph.readers[b]),
        )
        for b in op.writes
    )
    steps = [k for k, o in enumerate(plan.schedule.executions) if o == index]
    return OperationExplanation(
        name=op.name,
        kind=op.kind,
        layer=layers_of(graph, depth)[index],
        seconds=op.seconds,
        workspace=op.workspace,
        forward=op.forward,
        executions=tuple(at[k] / end for k in steps),
        writes=written,
        reason=_reason(graph, result, index, [w.fate for w in written]),
    )


def _reason(graph: TrainingGraph, result: Simulation, index: int, fates: list[Fate]) -> str:
    op = graph.operations[index]
    share = f"{100 * op.seconds / (graph.seconds or 1.0):.3f} % of the plain step"
    if result.counts[index] > 1:
        freed = any(f == "computed again" for f in fates)
        what = (
            "so that what it writes need not stay in memory until the backward pass"
            if freed
            else "because what it writes is needed to compute something else again"
        )
        return f"executed {result.counts[index]} times, {what}; each time costs {share}"
    if not op.forward:
        return "part of the backward pass or the update: executed once"
    if "kept" not in fates:
        return "executed once: the backward pass reads nothing that it writes"
    if not op.repeatable:
        return (
            "kept: the operation must not be executed again (it has side effects, is random, or "
            "reads what has changed since)"
        )
    return (
        f"kept: within this budget, giving up what it writes would not pay; computing it again "
        f"would cost {share}, and more for what it reads where that is gone"
    )


def _find(graph: TrainingGraph, name: str) -> int:
    names = [op.name for op in graph.operations]
    exact = [i for i, n in enumerate(names) if n == name]
    found = exact or [i for i, n in enumerate(names) if n.endswith(f"/{name}")]
    found = found or [i for i, n in enumerate(names) if name in n]
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(repr(names[i]) for i in found[:5])
        more = f", and {len(found) - 5} more" if len(found) > 5 else ""
        raise OptckptError(f"{name!r} is a part of the names of several operations: {some}{more}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
    some = ", ".join(map(repr, near))
    raise OptckptError(f"the graph has no operation {name!r}; it has {some} and others")
