"""The same step in another base order: graphs with their operations moved, and schedules back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optckpt.errors import GraphError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule


def reorder(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """`graph` with its operations in another base order; `order[k]` is the one at place k.

    Buffers keep their numbers. O(operations + edges).

    Raises:
        GraphError: if `order` is no permutation, or an operation comes before one that it needs.
    """
    n = len(graph.operations)
    if sorted(order) != list(range(n)):
        raise GraphError(f"the order is no permutation of the graph's {n} operations")
    place = [0] * n
    for k, o in enumerate(order):
        place[o] = k
    operations = []
    for o in order:
        op = graph.operations[o]
        operations.append(
            replace(
                op,
                after=tuple(sorted(place[a] for a in op.after)),
                repeat_before=tuple(sorted(place[a] for a in op.repeat_before)),
            )
        )
    return replace(graph, operations=tuple(operations))


def restore(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The schedule of the original graph that `schedule`, of the reordered one, stands for."""
    return Schedule(tuple(order[o] for o in schedule.executions))
