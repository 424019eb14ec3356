"""Blocks of memory and who holds them, while the operations of a graph run in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


class Block:
    """A piece of memory; two blocks are the same only if they are one object."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass(frozen=True, eq=False)
class Value:
    """What a tensor holds in memory: one block, or, for a list or an optional, several."""

    blocks: tuple[Block, ...] = ()
    """Each block once. None for what is resident anyway."""
    items: tuple[Value | None, ...] | None = None
    """The elements of a list or an optional; None for a tensor."""
    number: np.ndarray | None = None
    """The value of a small integer or boolean tensor, where it is known."""
    part: int | None = None
    """Bytes of a tensor that is only a part of its block (a row of it, say)."""

    @property
    def size(self) -> int:
        """Bytes of a tensor."""
        return sum(b.size for b in self.blocks) if self.part is None else self.part


NOTHING = Value()


def list_of(items: Iterable[Value | None]) -> Value:
    """A list (or an optional) of these elements."""
    kept = tuple(items)
    blocks = dict.fromkeys(b for item in kept if item is not None for b in item.blocks)
    return Value(tuple(blocks), kept)


class Heap:
    """Bytes in memory now and at most so far; every value in it is counted by its holders."""

    def __init__(self, counted: Callable[[int], int] = lambda size: size) -> None:
        self.live = 0
        self.peak = 0
        self._counted = counted
        self._holders: dict[Block, int] = {}

    def fork(self) -> Heap:
        """Another heap with the same contents."""
        other = Heap(self._counted)
        other.live, other.peak, other._holders = self.live, self.peak, dict(self._holders)
        return other

    def become(self, other: Heap) -> None:
        """Take over the contents and the peak of `other`."""
        self.live, self.peak, self._holders = other.live, other.peak, other._holders

    def hold(self, value: Value) -> None:
        """One more holder of `value`; a new block is allocated."""
        for block in value.blocks:
            count = self._holders.get(block, 0)
            if not count:
                self.live += self._counted(block.size)
            self._holders[block] = count + 1
        self.peak = max(self.peak, self.live)

    def release(self, value: Value) -> None:
        """One holder of `value` less; a block that nobody holds is freed."""
        for block in value.blocks:
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
            else:
                del self._holders[block]
                self.live -= self._counted(block.size)

    def use(self, extra: int) -> None:
        """`extra` bytes are needed for a moment."""
        self.peak = max(self.peak, self.live + extra)

    def owned(self, value: Value) -> Block | None:
        """The block of a tensor that has only one holder, or None."""
        if value.items is not None or len(value.blocks) != 1:
            return None
        block = value.blocks[0]
        return block if self._holders.get(block) == 1 else None

    def size(self, values: Iterable[Value]) -> int:
        """Bytes of the blocks of `values`, each counted once."""
        blocks = dict.fromkeys(b for v in values for b in v.blocks)
        return sum(self._counted(b.size) for b in blocks)
