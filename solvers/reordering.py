"""The same step in another base order: graphs with their operations moved, and schedules back."""

from __future__ import annotations

from collections.abc import Sequence

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule


def reorder(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """`graph` with its operations in another base order; see `TrainingGraph.in_order`."""
    return graph.in_order(order)


def restore(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The schedule of the original graph that `schedule`, of the reordered one, stands for."""
    return Schedule(tuple(order[o] for o in schedule.executions))
