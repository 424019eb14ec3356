"""From a set of kept buffers to a schedule: what the heuristics share.

A heuristic says which forward buffers stay in memory; the others are freed after their last
forward reader and computed again for the backward pass. The base order is kept.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import Simulation, simulate
from optckpt.solvers.registry import Interrupted

Policy = Literal["segments", "retained", "transient"]
"""When freed buffers are computed again, and how long they stay.

segments: as the backward pass enters a segment of the forward pass, everything that it will need
of it is computed at once and stays until its last use (Chen et al. 2016).
retained: each buffer as it is first needed, with the ancestors that are missing; all of it stays
until its last use. transient: the same, but ancestors that no backward operation reads are not
held for later recomputations. Only `transient` executes an operation more than twice.
"""

# `transient` becomes `retained` beyond this many executions per operation: it could be quadratic.
_MOST_EXECUTIONS = 4


def always_kept(graph: TrainingGraph) -> set[int]:
    """Buffers that no heuristic frees early: outputs, not repeatable, or written backward."""
    ops = graph.operations
    return set(graph.outputs).union(
        *(op.writes for op in ops if not (op.forward and op.repeatable)),
    )


def last_forward_uses(graph: TrainingGraph) -> list[int]:
    """For each buffer, its last forward reader in base order (its writer if there is none)."""
    last = list(graph.producer)
    for i, op in enumerate(graph.operations):
        if op.forward:
            for b in op.reads:
                last[b] = i
    return last


def last_backward_uses(graph: TrainingGraph) -> list[int]:
    """For each buffer, its last backward reader in base order (-1 if there is none)."""
    last = [-1] * len(graph.buffers)
    for i, op in enumerate(graph.operations):
        if not op.forward:
            for b in op.reads:
                last[b] = i
    return last


def missing_operations(
    graph: TrainingGraph, wanted: Iterable[int], in_memory: Sequence[int]
) -> set[int]:
    """Operations to execute for the buffers `wanted`: their writers, back to what is in memory."""
    found: set[int] = set()
    stack = [b for b in wanted if not in_memory[b]]
    while stack:
        o = graph.producer[stack.pop()]
        if o not in found:
            found.add(o)
            stack.extend(b for b in graph.operations[o].reads if not in_memory[b])
    return found


def relevant_operations(graph: TrainingGraph) -> list[int]:
    """Repeatable forward operations that the backward pass depends on, in base order."""
    ops = graph.operations
    needed = [b for b, last in enumerate(last_backward_uses(graph)) if last >= 0]
    in_memory = bytearray(len(graph.buffers))
    for b, p in enumerate(graph.producer):
        in_memory[b] = not (ops[p].forward and ops[p].repeatable)
    return sorted(missing_operations(graph, needed, in_memory))


def schedule_from_kept(
    graph: TrainingGraph,
    kept: Collection[int],
    policy: Policy = "segments",
    boundaries: Sequence[int] = (),
) -> Schedule:
    """The schedule that keeps the forward buffers `kept` (and those that must be kept).

    Args:
        graph: the training graph.
        kept: buffer indices.
        policy: when to compute what was freed; see `Policy`.
        boundaries: for `segments`, the last operation of each segment but the final one,
            ascending.

    Returns:
        A valid schedule in base order. Time and memory O((operations + reads) log operations).
    """
    ops = graph.operations
    keep = bytearray(len(graph.buffers))
    for b in always_kept(graph).union(kept):
        keep[b] = 1
    last_forward = last_forward_uses(graph)
    last_backward = last_backward_uses(graph)
    in_memory = bytearray(len(graph.buffers))
    segments: dict[int, list[int]] = {}
    if policy == "segments":
        for b, p in enumerate(graph.producer):
            if not keep[b] and last_backward[b] >= 0:
                segments.setdefault(bisect_left(boundaries, p), []).append(b)
    most = _MOST_EXECUTIONS * len(ops)
    executions: list[int] = []
    for i, op in enumerate(ops):
        wanted = () if op.forward else [b for b in op.reads if not in_memory[b]]
        batch: list[int] = []
        if wanted:
            entered = {bisect_left(boundaries, graph.producer[b]) for b in wanted}
            wanted += [
                b
                for s in entered
                for b in segments.pop(s, ())
                if last_backward[b] >= i and graph.producer[b] < i
            ]
            batch = sorted(missing_operations(graph, wanted, in_memory))
            executions += batch
            for o in batch:
                for b in ops[o].writes:
                    in_memory[b] = 1
        executions.append(i)
        for b in op.writes:
            in_memory[b] = 1
        if op.forward:
            for b in (*op.reads, *op.writes):
                if last_forward[b] == i and not keep[b]:
                    in_memory[b] = 0
        elif policy == "transient" and len(executions) < most:
            for o in batch:
                for b in ops[o].writes:
                    if last_backward[b] <= i and not keep[b]:
                        in_memory[b] = 0
    return Schedule(tuple(executions))


def best_of(
    name: str,
    graph: TrainingGraph,
    budget: int | None,
    candidates: Iterable[Schedule],
    time_limit: float,
) -> Solution:
    """The cheapest candidate within the budget; without one, the one of the lowest peak.

    `candidates` are made and simulated one by one, until `time_limit` seconds have passed; at
    least one is. Without a budget the lowest peak counts, then the cost.

    Raises:
        Interrupted: after Ctrl-C, with the best so far, if that is within the budget.
    """
    started = time.perf_counter()
    best: tuple[tuple[bool, float, float], Schedule, Simulation] | None = None
    rank: tuple[bool, float, float]
    first: float | None = None
    interrupted = False
    try:
        for schedule in candidates:
            result = simulate(graph, schedule)
            fits = budget is None or result.peak <= budget
            if fits and first is None:
                first = time.perf_counter() - started
            if fits and budget is not None:
                rank = (False, result.overhead, result.peak)
            else:
                rank = (not fits, result.peak, result.overhead)
            if best is None or rank < best[0]:
                best = (rank, schedule, result)
            if time.perf_counter() - started > time_limit:
                break
    except KeyboardInterrupt:
        if best is None or best[0][0]:
            raise
        interrupted = True
    assert best is not None, "a heuristic has at least one candidate"
    (over, _, _), schedule, result = best
    certificate = Certificate(
        solver=name,
        status="over-budget" if over else "feasible",
        cost=result.overhead,
        bound=0.0,
        seconds=time.perf_counter() - started,
        seconds_first=first,
        valid_for="any order (nothing is proven: no schedule costs less than nothing)",
    )
    if interrupted:
        # Only who called the strategy itself is served with that; see `registry.solve`.
        raise Interrupted(Solution(schedule, certificate)) from None
    return Solution(schedule, certificate)
