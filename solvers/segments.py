"""Where to cut the forward pass: articulation points and segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from optckpt.graph import TrainingGraph
from optckpt.solvers.recompute import last_backward_uses, last_forward_uses


@dataclass(frozen=True, slots=True)
class ArticulationPoint:
    """A buffer that every path from the input to the loss passes."""

    buffer: int
    operation: int
    """Index of the last operation before the cut."""


def main_operations(graph: TrainingGraph) -> list[int]:
    """Forward operations on a path from the input to the loss, in base order.

    The graph does not say which operation reads the input or writes the loss: both are taken to
    be the ends of the longest dependency path. What computes masks, metrics or moving averages
    beside it is no part of the result.
    """
    ops = graph.operations
    depth = [0] * len(ops)
    for i, op in enumerate(ops):
        if op.forward:
            parents = (graph.producer[b] for b in op.reads)
            depth[i] = 1 + max((depth[p] for p in parents), default=0)
    if not any(depth):
        return []
    loss = max(range(len(ops)), key=depth.__getitem__)
    height = [0] * len(ops)
    height[loss] = 1
    for i in range(loss, -1, -1):
        if height[i]:
            for b in ops[i].reads:
                p = graph.producer[b]
                if ops[p].forward:
                    height[p] = max(height[p], height[i] + 1)
    source = max(range(len(ops)), key=height.__getitem__)
    reached = {source}
    for i in range(source + 1, loss + 1):
        if height[i] and any(graph.producer[b] in reached for b in ops[i].reads):
            reached.add(i)
    return sorted(reached)


def articulation_points(graph: TrainingGraph) -> list[ArticulationPoint]:
    """The articulation points of the forward graph, in base order; O(operations + reads).

    Sweeps the operations between input and loss and reports where a single buffer is still to be
    read by them. Since every one of them is an ancestor or a descendant of an articulation point,
    the sweep finds them all whatever the order. Buffers that are kept in any case because their
    writer is not repeatable do not count as paths.
    """
    ops = graph.operations
    main = main_operations(graph)
    remaining = [0] * len(graph.buffers)
    for i in main:
        for b in set(ops[i].reads):
            remaining[b] += 1
    live: set[int] = set()
    fixed: set[int] = set()
    points: dict[int, ArticulationPoint] = {}
    for i in main:
        for b in set(ops[i].reads):
            remaining[b] -= 1
            if not remaining[b]:
                live.discard(b)
                fixed.discard(b)
        for b in ops[i].writes:
            if remaining[b]:
                (live if ops[i].repeatable else fixed).add(b)
        if len(live) == 1 or (not live and len(fixed) == 1):
            b = next(iter(live or fixed))
            points.setdefault(b, ArticulationPoint(b, i))
    return list(points.values())


def crossing_buffers(graph: TrainingGraph, boundaries: Sequence[int]) -> set[int]:
    """Forward buffers written before and read by a forward operation after some boundary.

    `boundaries` are ascending operation indices; a cut is behind its operation.
    """
    found: set[int] = set()
    for b, (p, last) in enumerate(zip(graph.producer, last_forward_uses(graph), strict=True)):
        if graph.operations[p].forward:
            k = bisect_left(boundaries, p)
            if k < len(boundaries) and boundaries[k] < last:
                found.add(b)
    return found


def kept_at(graph: TrainingGraph, boundaries: Sequence[int]) -> set[int]:
    """What a segmented schedule keeps: buffers crossing a boundary, and all of the last segment.

    The backward pass begins with the last segment: to free its buffers would only be to compute
    them again at once. Without a boundary there is one segment, and everything is kept.
    """
    kept = crossing_buffers(graph, boundaries)
    start = boundaries[-1] if boundaries else -1
    for op in graph.operations[start + 1 :]:
        kept.update(op.writes)
    return kept


def held_bytes(graph: TrainingGraph) -> list[int]:
    """For each operation, the bytes it writes that the backward pass reads (0 if backward)."""
    last_backward = last_backward_uses(graph)
    return [
        sum(graph.buffers[b].size for b in op.writes if last_backward[b] >= 0) if op.forward else 0
        for op in graph.operations
    ]


def even_cuts(graph: TrainingGraph, segments: int) -> list[int]:
    """At most `segments` - 1 boundaries that share out what the backward pass reads evenly.

    Each boundary is moved to the place with the fewest crossing bytes nearby (within a third of
    a segment either way).
    """
    held = list(accumulate(held_bytes(graph)))
    if not held or not held[-1] or segments < 2:
        return []
    ops = graph.operations
    forward = [i for i, op in enumerate(ops) if op.forward]
    crossing = [0] * (len(ops) + 1)
    for p, last, buffer in zip(
        graph.producer, last_forward_uses(graph), graph.buffers, strict=True
    ):
        if ops[p].forward:
            crossing[p] += buffer.size
            crossing[last] -= buffer.size
    crossing = list(accumulate(crossing))
    totals = [held[i] for i in forward]
    share = held[-1] / segments
    cuts: set[int] = set()
    for k in range(1, segments):
        low = bisect_left(totals, (k - 1 / 3) * share)
        high = max(low + 1, bisect_left(totals, (k + 1 / 3) * share))
        near = forward[low:high]
        if near:
            cuts.add(min(near, key=lambda i: (crossing[i], abs(held[i] - k * share))))
    cuts.discard(forward[-1])
    return sorted(cuts)


def greedy_cuts(graph: TrainingGraph, size: int, allowed: Sequence[int]) -> list[int]:
    """Boundaries at the `allowed` operations, each as soon as more than `size` bytes are held.

    Chen et al. 2016, algorithm 3: walks the forward pass, adds up what the backward pass reads,
    and cuts at the first allowed place once the sum exceeds `size`.
    """
    held = [0, *accumulate(held_bytes(graph))]
    cuts: list[int] = []
    start = 0
    for i in allowed:
        if held[i + 1] - start > size:
            cuts.append(i)
            start = held[i + 1]
    return cuts
