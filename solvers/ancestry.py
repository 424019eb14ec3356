"""Who comes before whom in every order: sets of operations as bits of integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optckpt.graph import TrainingGraph


@dataclass(frozen=True)
class Ancestry:
    """Bit i of a set stands for operation i; the end of the step is operation n."""

    before: tuple[int, ...]
    """Per operation, the end included: its ancestors."""
    after: tuple[int, ...]
    """Per operation: its descendants, without the end."""

    @classmethod
    def of(cls, graph: TrainingGraph) -> Ancestry:
        """The transitive closure of data and control dependencies, O(n (n + edges) / 64)."""
        n = len(graph.operations)
        parents = [{graph.producer[b] for b in op.reads} | set(op.after) for op in graph.operations]
        before = [0] * (n + 1)
        for i in range(n):
            for j in parents[i]:
                before[i] |= before[j] | 1 << j
        before[n] = (1 << n) - 1
        after = [0] * n
        for i in range(n - 1, -1, -1):
            for j in parents[i]:
                after[j] |= after[i] | 1 << i
        return cls(tuple(before), tuple(after))

    def bypassed(self, graph: TrainingGraph, buffer: int) -> int:
        """Operations that in every order run between `buffer`'s writer and a reader of it."""
        below = 0
        for r in graph.readers[buffer]:
            below |= self.before[r]
        if buffer in graph.outputs:
            below |= self.before[-1]
        return self.after[graph.producer[buffer]] & below

    def spread(self, mask: int) -> npt.NDArray[np.uint8]:
        """The set `mask` as an array of zeros and ones, one per operation."""
        n = len(self.after)
        bits = np.frombuffer(mask.to_bytes((n + 7) // 8, "little"), np.uint8)
        return np.unpackbits(bits, count=n, bitorder="little")


def members(mask: int) -> Iterator[int]:
    """The operations of a set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
