"""When each copy of each buffer is in memory along a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Copy:
    """A buffer in memory, from the step that writes it to the last that needs this copy of it."""

    buffer: int
    born: int
    """Index of an execution of the schedule."""
    dies: int
    """Index of the last execution that reads it; of graph outputs the number of executions."""


def copies(graph: TrainingGraph, schedule: Schedule) -> list[Copy]:
    """The copies of all buffers, in the order in which they are written.

    `schedule` must be one that `simulate` accepts. O(executions + edges read).
    """
    current: dict[int, int] = {}
    made: list[tuple[int, int]] = []
    dies: list[int] = []
    for step, o in enumerate(schedule.executions):
        op = graph.operations[o]
        for b in op.reads:
            dies[current[b]] = step
        for b in op.writes:
            current[b] = len(made)
            made.append((b, step))
            dies.append(step)
    for b in graph.outputs:
        dies[current[b]] = len(schedule)
    return [Copy(b, born, end) for (b, born), end in zip(made, dies, strict=True)]
