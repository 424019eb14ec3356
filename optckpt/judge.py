"""What a schedule needs, as the simulator and a model of the device's allocator see it."""

from __future__ import annotations

from dataclasses import dataclass

from optckpt.allocator import Reporter
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate


@dataclass(frozen=True, slots=True)
class Judged:
    """What a schedule needs, by the simulator and the model of the allocator."""

    live: int
    """Peak of the live bytes."""
    reported: int
    """Peak that the allocator reports."""
    overhead: float


def judge(graph: TrainingGraph, schedule: Schedule, allocator: Reporter | None) -> Judged:
    """Judge a schedule as `make_plan` does. Raises ScheduleError if it cannot be executed."""
    result = simulate(graph, schedule)
    reported = 0 if allocator is None else allocator.peak(graph, schedule)
    return Judged(result.peak, max(result.peak, reported), result.overhead)


def plain_peak(graph: TrainingGraph, allocator: Reporter | None = None) -> int:
    """Peak bytes of the plain step, resident included, as `make_plan` predicts it."""
    return judge(graph, Schedule.base(graph), allocator).reported
