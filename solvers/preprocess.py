"""A training graph as plain lists, in the form that the solvers of this folder work on.

Buffers of size 0 are left out (they cost nothing to keep, so they are always there), reads
are without duplicates, and the end of the step is one more operation that reads the outputs.
"""

from __future__ import annotations

import math
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
    again_readers: tuple[tuple[int, ...], ...]
    """Per buffer: repeatable operations that read it."""

    def last_reader(self, t: int) -> int:
        """Position of the last base reader of buffer t (-1 if none)."""
        readers = self.base_readers[t]
        return readers[-1] if readers else -1


def preprocess(graph: TrainingGraph) -> Problem:
    """The problem of `graph`, in O(operations + edges)."""
    n = len(graph.operations)
    size = tuple(b.size for b in graph.buffers)
    ops = graph.operations
    reads = [tuple(b for b in dict.fromkeys(op.reads) if size[b]) for op in ops]
    reads.append(tuple(b for b in dict.fromkeys(graph.outputs) if size[b]))
    base_readers: list[list[int]] = [[] for _ in size]
    again_readers: list[list[int]] = [[] for _ in size]
    for i, read in enumerate(reads):
        for b in read:
            base_readers[b].append(i)
            if i < n and ops[i].repeatable:
                again_readers[b].append(i)
    takes = []
    for op in ops:
        out = size[op.writes[0]] if op.writes else 0
        takes.append(tuple(b for b in dict.fromkeys(op.inplace) if out and size[b] == out))
    plain = graph.seconds
    return Problem(
        n=n,
        reads=tuple(reads),
        writes=(*(tuple(b for b in op.writes if size[b]) for op in ops), ()),
        takes=(*takes, ()),
        workspace=(*(op.workspace for op in ops), 0),
        cost=tuple(op.seconds / plain if plain > 0 else 0.0 for op in ops),
        repeatable=tuple(op.repeatable for op in ops),
        size=size,
        producer=graph.producer,
        base_readers=tuple(tuple(r) for r in base_readers),
        again_readers=tuple(tuple(r) for r in again_readers),
    )


def memory_unit(problem: Problem, budget: int) -> int:
    """Bytes per unit of a MIP's memory rows: exact if that needs no more than MAX_UNITS."""
    divisor = math.gcd(*problem.size, *problem.workspace)
    if divisor == 0:
        return 1
    return divisor if budget // divisor <= MAX_UNITS else -(-budget // MAX_UNITS)
