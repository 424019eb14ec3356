"""Warm starts: a step that resembles one planned before begins from that one's schedule.

The same function traced for another batch size gives the same operations at other sizes and costs,
but for a few that are left to themselves where their tensors are small. Its schedule for the one
size is mostly a good one for the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from optckpt.errors import ScheduleError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

_MOST = 16
"""Schedules that are remembered."""
_ALIKE = 0.9
"""Share of the operations that two steps must have in common."""

_Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a search may begin."""

    schedule: Schedule
    overhead: float
    """Of the schedule in the step that it was made for."""


@dataclass(frozen=True, slots=True)
class _Step:
    names: tuple[_Name, ...]
    start: Start


class Memory:
    """The schedules of the latest steps. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: OrderedDict[str, _Step] = OrderedDict()

    def remember(self, graph: TrainingGraph, schedule: Schedule, overhead: float) -> None:
        """Note the schedule of a step and its overhead; the oldest of too many is forgotten."""
        key = graph.fingerprint
        with self._lock:
            self._steps.pop(key, None)
            self._steps[key] = _Step(tuple(_names(graph)), Start(schedule, overhead))
            while len(self._steps) > _MOST:
                self._steps.popitem(last=False)

    def start(self, graph: TrainingGraph) -> Start | None:
        """A schedule for `graph` like that of the most similar step, the latest of these, if any.

        It can be executed. Which budget it fits is not known. The same step, at the same sizes, is
        left out: what it is planned for another budget must not depend on which came first.
        """
        names = _names(graph)
        mine = set(names)
        with self._lock:
            steps = [s for key, s in self._steps.items() if key != graph.fingerprint]
        most, best = 0, None
        for step in reversed(steps):
            common = len(mine.intersection(step.names))
            if common >= _ALIKE * max(len(names), len(step.names)) and common > most:
                most, best = common, step
        if best is None:
            return None
        schedule = carry_over(best.names, best.start.schedule, graph)
        return None if schedule is None else replace(best.start, schedule=schedule)


def _names(graph: TrainingGraph) -> list[_Name]:
    return [(op.name, op.kind) for op in graph.operations]


def carry_over(names: Iterable[_Name], schedule: Schedule, graph: TrainingGraph) -> Schedule | None:
    """`schedule`, of a step whose operations have these (name, kind), for `graph`.

    Operations are the same if their name and kind are. What the other step repeats before an
    operation, is repeated before it here. None if that cannot be executed, or repeats nothing, or
    the operations are in another order here.
    """
    index = {name: u for u, name in enumerate(_names(graph))}
    here = [index.get(name) for name in names]
    before: dict[int, list[int]] = {}
    pending: list[int] = []
    order: list[int] = []
    for o, count in schedule.steps():
        u = here[o]
        if u is None:
            continue
        if count:
            pending.append(u)
        else:
            order.append(u)
            before[u] = pending
            pending = []
    if len(order) == len(graph.operations):
        rest = order
    elif order == sorted(order):
        rest = list(range(len(graph.operations)))
    else:
        return None
    sequence = [o for u in rest for o in (*before.get(u, ()), u)] + pending
    if len(sequence) == len(rest):
        return None
    found = Schedule(tuple(sequence))
    try:
        simulate(graph, found)
    except ScheduleError:
        return None
    return found


memory = Memory()
"""Of this process."""
