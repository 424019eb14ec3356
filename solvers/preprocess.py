"""A training graph as plain lists, in the form that the solvers of this folder work on.

Buffers of size 0 are left out (they cost nothing to keep, so they are always there), reads
are without duplicates, and the end of the step is one more operation that reads the outputs.
Operations that some cheapest schedule always executes together are one unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from optckpt.graph import TrainingGraph

MAX_UNITS = 1_000_000
"""Memory coefficients in a MIP are integers up to about this many units."""


@dataclass(frozen=True)
class Problem:
    """`n` operations in base order, position `n` being the end of the step. Sizes are bytes."""

    n: int
    reads: tuple[tuple[int, ...], ...]
    """Per position, the end included: buffers read, size 0 left out."""
    writes: tuple[tuple[int, ...], ...]
    takes: tuple[tuple[int, ...], ...]
    """Per position: inputs that may die there and give their memory to the first output."""
    workspace: tuple[int, ...]
    cost: tuple[float, ...]
    """Per operation: seconds as a fraction of the plain step."""
    repeatable: tuple[bool, ...]
    size: tuple[int, ...]
    producer: tuple[int, ...]
    base_readers: tuple[tuple[int, ...], ...]
    """Per buffer: positions of the base operations that read it, the end included."""
    members: tuple[tuple[int, ...], ...]
    """Per operation: the operations of the graph that it stands for, in order."""

    def last_reader(self, t: int) -> int:
        """Position of the last base reader of buffer t (-1 if none)."""
        readers = self.base_readers[t]
        return readers[-1] if readers else -1

    def expand(self, sequence: Iterable[int]) -> tuple[int, ...]:
        """The executions of the graph's operations that `sequence` stands for."""
        return tuple(o for unit in sequence for o in self.members[unit])


@dataclass
class _Unit:
    reads: list[int]
    writes: list[int]
    takes: list[int]
    workspace: int
    seconds: float
    repeatable: bool
    members: list[int]


def preprocess(graph: TrainingGraph, *, merge: bool = True) -> Problem:
    """The problem of `graph`, in O(operations + edges).

    With `merge`, an operation joins the one right before it if the only buffer it reads is the
    only one that wrote, nobody else reads that, and it writes its one output over it without
    more workspace. Moving it up to there, and keeping its output instead of its input, neither
    raises the peak nor the cost of any schedule, so the optimum stays the same.
    """
    size = [b.size for b in graph.buffers]
    outputs = [b for b in dict.fromkeys(graph.outputs) if size[b]]
    units: list[_Unit] = []
    for i, op in enumerate(graph.operations):
        out = size[op.writes[0]] if op.writes else 0
        unit = _Unit(
            [b for b in dict.fromkeys(op.reads) if size[b]],
            [b for b in op.writes if size[b]],
            [b for b in dict.fromkeys(op.inplace) if out and size[b] == out],
            op.workspace,
            op.seconds,
            op.repeatable,
            [i],
        )
        last = units[-1] if units else unit
        if (
            merge
            and last.writes == unit.reads == unit.takes
            and len(unit.reads) == len(unit.writes) == 1
            and unit.workspace <= last.workspace
            and len(graph.readers[unit.reads[0]]) == 1
            and unit.reads[0] not in outputs
        ):
            last.writes = unit.writes
            last.seconds += unit.seconds
            last.repeatable = last.repeatable and unit.repeatable
            last.members += unit.members
            continue
        units.append(unit)
    n = len(units)
    producer = [-1] * len(size)
    position = {o: i for i, unit in enumerate(units) for o in unit.members}
    for b, o in enumerate(graph.producer):
        producer[b] = position[o]
    base_readers: list[list[int]] = [[] for _ in size]
    for i, reads in enumerate([*(u.reads for u in units), outputs]):
        for b in reads:
            base_readers[b].append(i)
    plain = graph.seconds
    return Problem(
        n=n,
        reads=(*(tuple(u.reads) for u in units), tuple(outputs)),
        writes=(*(tuple(u.writes) for u in units), ()),
        takes=(*(tuple(u.takes) for u in units), ()),
        workspace=(*(u.workspace for u in units), 0),
        cost=tuple(u.seconds / plain if plain > 0 else 0.0 for u in units),
        repeatable=tuple(u.repeatable for u in units),
        size=tuple(size),
        producer=tuple(producer),
        base_readers=tuple(tuple(r) for r in base_readers),
        members=tuple(tuple(u.members) for u in units),
    )


def memory_unit(problem: Problem, budget: int) -> int:
    """Bytes per unit of a MIP's memory rows: exact if that needs no more than MAX_UNITS."""
    divisor = math.gcd(*problem.size, *problem.workspace)
    if divisor == 0:
        return 1
    return divisor if budget // divisor <= MAX_UNITS else -(-budget // MAX_UNITS)
