"""The loss cut: a quick lower bound on the extra time that holds for any order of operations.

As the loss is first computed, all its ancestors have run and none of its descendants has.
What a descendant reads of the ancestors' results is then in memory or is computed again later,
and what is in memory fits the budget. Nothing else is asked of the schedule, so the bound holds
whatever the order; and it is one small MIP. Any operation may play the part of the loss; the
one is taken at which the most bytes are wanted: those that bypass it, and its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optckpt.graph import TrainingGraph
from optckpt.solvers.ancestry import Ancestry, members
from optckpt.solvers.engine import MipModel, Solve
from optckpt.solvers.preprocess import Problem, memory_unit, preprocess

STEP = 1000.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossCut:
    """Where the graph is cut."""

    operation: int
    """The loss, or what plays its part."""
    before: frozenset[int]
    """Its ancestors: they have run when it first runs, in any order."""
    after: frozenset[int]
    """Its descendants, and the end of the step: they have not."""


def bytes_at(graph: TrainingGraph, ancestry: Ancestry) -> tuple[Floats, Floats]:
    """Per operation, bytes that bypass it in every order, and bytes that it needs beside them.

    The former pass from its ancestors to its descendants or to the end of the step; the latter
    are its other inputs, its outputs and its workspace.
    """
    bypassing = np.zeros(len(graph.operations))
    own = np.array([float(op.workspace) for op in graph.operations])
    for b, buffer in enumerate(graph.buffers):
        if buffer.size:
            mask = ancestry.bypassed(graph, b)
            if mask:
                bypassing += float(buffer.size) * ancestry.spread(mask)
            own[graph.producer[b]] += buffer.size
            for r in graph.readers[b]:
                if not mask >> r & 1:
                    own[r] += buffer.size
    return bypassing, own


def find_loss(graph: TrainingGraph) -> LossCut | None:
    """The operation at which the most bytes are wanted; None if no buffer bypasses any."""
    ancestry = Ancestry.of(graph)
    bypassing, own = bytes_at(graph, ancestry)
    if not bypassing.any():
        return None
    loss = int(np.argmax(np.where(bypassing > 0, bypassing + own, 0.0)))
    return LossCut(
        loss,
        frozenset(members(ancestry.before[loss])),
        frozenset([len(graph.operations), *members(ancestry.after[loss])]),
    )


def loss_cut_model(problem: Problem, cut: LossCut, budget: int) -> MipModel:
    """The MIP at `cut` of an unmerged problem under `budget` bytes (without resident data)."""
    p, loss = problem, cut.operation
    held = set(p.reads[loss])
    held |= {
        t
        for t, o in enumerate(p.producer)
        if o in cut.before
        and not p.repeatable[o]
        and p.size[t]
        and any(r in cut.after for r in p.base_readers[t])
    }
    needed = [
        t
        for t, o in enumerate(p.producer)
        if o in cut.before and p.size[t] and any(r in cut.after for r in p.base_readers[t])
    ]
    model = MipModel()
    keep: dict[int, int] = {}
    comp: dict[int, int] = {}
    stack = [t for t in needed if t not in held]
    while stack:
        t = stack.pop()
        if t in keep:
            continue
        keep[t] = model.add_column()
        o = p.producer[t]
        if p.repeatable[o] and o not in comp:
            comp[o] = model.add_column(cost=p.cost[o] * STEP)
            stack.extend(r for r in p.reads[o] if r not in held)

    def supply(t: int) -> dict[int, float]:
        terms = {keep[t]: 1.0}
        if p.producer[t] in comp:
            terms[comp[p.producer[t]]] = 1.0
        return terms

    for t in needed:
        if t not in held:
            model.add_row(supply(t), lower=1.0)
    for o, column in comp.items():
        for t in p.reads[o]:
            if t not in held:
                model.add_row({**supply(t), column: -1.0}, lower=0.0)
    fixed = p.workspace[loss] + sum(p.size[t] for t in (*held, *p.writes[loss]))
    if p.takes[loss]:
        fixed -= p.size[p.writes[loss][0]]
    # Rounding makes the row weaker only.
    unit = memory_unit(p, budget)
    row = {c: float(p.size[t] // unit) for t, c in keep.items()}
    model.add_row(row, upper=float((budget - fixed) // unit))
    return model


def start_loss_cut(
    graph: TrainingGraph, budget: int, *, time_limit: float, gap: float
) -> Solve | None:
    """Start solving the loss cut of `graph` under `budget` bytes (resident included).

    The bound of its result, divided by STEP, is a fraction of the plain step's time; the result
    "infeasible" proves that no schedule in any order fits. None if there is nothing to cut.
    """
    cut = find_loss(graph)
    if cut is None:
        return None
    model = loss_cut_model(preprocess(graph, merge=False), cut, budget - graph.resident)
    return Solve(model, time_limit=time_limit, gap=gap * STEP)


def loss_cut_bound(
    graph: TrainingGraph, budget: int, *, time_limit: float = 10.0, gap: float = 1e-4
) -> float:
    """A lower bound on the extra time (fraction of the plain step) of any schedule, in any order.

    Infinite if it proves that no schedule fits `budget` bytes (resident included).
    """
    run = start_loss_cut(graph, budget, time_limit=time_limit, gap=gap)
    if run is None:
        return 0.0
    try:
        return max(0.0, run.result().bound / STEP)
    finally:
        run.cancel()
