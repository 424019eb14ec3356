"""Binomial checkpointing of a chain (Revolve).

A. Griewank and A. Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000). A chain of l links is
reversed with s slots, each of which holds the state before a link (the first one holds the
input). Repeatedly: advance from the last saved state, save a state on the way while slots are
free, reverse the last link. The links of a training graph are the blocks between neighbouring
articulation points; the states are the buffers at those points.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import comb

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.solvers.recompute import (
    always_kept,
    last_backward_uses,
    last_forward_uses,
    missing_operations,
)
from optckpt.solvers.segments import ArticulationPoint


def advances(links: int, slots: int) -> int:
    """Least number of links run forward to have each link's input once, last link first.

    t(l, s) = r l - C(s + r, r - 1) with the r for which C(s + r - 1, s) < l <= C(s + r, s).
    """
    if links <= 1:
        return 0
    slots = min(slots, links)
    r = 1
    while comb(slots + r, slots) < links:
        r += 1
    return r * links - comb(slots + r, r - 1)


def next_checkpoint(links: int, slots: int) -> int:
    """How far to advance before saving the next state: the m in 1..links-1 minimising

    m + t(links - m, slots - 1) + t(m, slots). Needs links >= 2 and slots >= 2.
    """

    def cost(m: int) -> int:
        return m + advances(links - m, slots - 1) + advances(m, slots)

    # The cost is convex in m, as t is in its first argument: find where it stops falling.
    low, high = 1, links - 1
    while low < high:
        middle = (low + high) // 2
        if cost(middle + 1) < cost(middle):
            low = middle + 1
        else:
            high = middle
    return low


def balanced_slots(links: int) -> int:
    """The least s with C(2 s, s) >= links: memory and repetitions both grow logarithmically."""
    s = 1
    while comb(2 * s, s) < links:
        s += 1
    return s


@dataclass(frozen=True)
class Chain:
    """A training graph seen as a chain of links between its articulation points."""

    graph: TrainingGraph
    points: tuple[ArticulationPoint, ...]

    def __len__(self) -> int:
        return len(self.points) + 1

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Index of the last operation of each link but the last."""
        return tuple(p.operation for p in self.points)

    @cached_property
    def persistent(self) -> bytearray:
        """Per buffer: 1 if it is never freed early: needed by a link other than the next."""
        found = bytearray(len(self.graph.buffers))
        for b in always_kept(self.graph):
            found[b] = 1
        last = last_forward_uses(self.graph)
        for b, p in enumerate(self.graph.producer):
            if self.graph.operations[p].forward:
                k = bisect_left(self.boundaries, p)
                for crossed in (k, k + 1):
                    if crossed < len(self.points) and self.boundaries[crossed] < last[b]:
                        found[b] |= self.points[crossed].buffer != b
        return found

    @cached_property
    def advance(self) -> tuple[tuple[int, ...], ...]:
        """For each link but the last, the operations that lead from its input to its output."""
        rows = []
        for k, point in enumerate(self.points):
            outside = bytearray(self.persistent)
            if k:
                outside[self.points[k - 1].buffer] = 1
            rows.append(tuple(sorted(missing_operations(self.graph, [point.buffer], outside))))
        return tuple(rows)

    def link_of(self, b: int) -> int:
        """The link whose operations write buffer `b`."""
        return bisect_left(self.boundaries, self.graph.producer[b])

    def link_for(self, b: int) -> int:
        """The link to be reversed when buffer `b` is needed: a state is the next link's input."""
        k = self.link_of(b)
        return k + 1 if k < len(self.points) and self.points[k].buffer == b else k

    def reversal(self, slots: int, most: int | None = None) -> Schedule | None:
        """The schedule with `slots` >= 1 saved states, the input among them.

        Returns None once it has more than `most` executions.
        """
        run = _Reversal(self, slots)
        for i, op in enumerate(self.graph.operations):
            if op.forward:
                run.forward(i)
            else:
                run.backward(i)
            if most is not None and len(run.executions) > most:
                return None
        return Schedule(tuple(run.executions))


class _Reversal:
    """The state of one walk through the base order."""

    def __init__(self, chain: Chain, slots: int) -> None:
        self.chain = chain
        self.ops = chain.graph.operations
        self.slots = slots
        self.executions: list[int] = []
        self.in_memory = bytearray(len(chain.graph.buffers))
        self.last_forward = last_forward_uses(chain.graph)
        self.last_backward = last_backward_uses(chain.graph)
        self.read_backward: list[list[int]] = [[] for _ in range(len(chain))]
        """For each link, its buffers that the backward pass reads and that may be freed."""
        for b, p in enumerate(chain.graph.producer):
            if self.ops[p].forward and not chain.persistent[b] and self.last_backward[b] >= 0:
                self.read_backward[chain.link_of(b)].append(b)
        self.saved = [0]
        """Links whose input is saved, ascending; the first link's input always is."""
        self.saved_states: set[int] = set()
        """The buffers saved: the inputs of the links `saved`."""
        while len(self.saved) < slots and len(chain) - self.saved[-1] > 1:
            left = len(chain) - self.saved[-1]
            free = slots - len(self.saved)
            self._save(self.saved[-1] + next_checkpoint(left, free + 1))
        self.held: list[int] = []
        """Buffers in memory for the link at hand: freed when the walk enters another."""

    def _save(self, link: int) -> None:
        self.saved.append(link)
        self.saved_states.add(self.chain.points[link - 1].buffer)

    def forward(self, i: int) -> None:
        """Execute forward operation i of the base order and free what is not to be kept.

        Nothing of the last link is freed: the backward pass begins with it.
        """
        chain, op = self.chain, self.ops[i]
        self.executions.append(i)
        for b in op.writes:
            self.in_memory[b] = 1
        for b in (*op.reads, *op.writes):
            if self.last_forward[b] == i and not chain.persistent[b]:
                if chain.link_for(b) >= len(chain) - 1:
                    self.held.append(b)
                elif b not in self.saved_states:
                    self.in_memory[b] = 0

    def backward(self, i: int) -> None:
        """Execute backward operation i; first restore the link that it reads if need be."""
        missing = [b for b in self.ops[i].reads if not self.in_memory[b]]
        if missing:
            self._enter(max(self.chain.link_for(b) for b in missing), i)
            self._restore(missing)
        self.executions.append(i)
        for b in self.ops[i].writes:
            self.in_memory[b] = 1

    def _enter(self, link: int, i: int) -> None:
        """Free what only later links needed, and have all that the rest of `link` reads."""
        while self.saved[-1] > link:
            self.saved_states.discard(self.chain.points[self.saved.pop() - 1].buffer)
        for b in self.held:
            if self.last_backward[b] < i and b not in self.saved_states:
                self.in_memory[b] = 0
        self.held = []
        self._advance_to(link)
        self._restore(b for b in self.read_backward[link] if self.last_backward[b] >= i)

    def _restore(self, wanted: Iterable[int]) -> None:
        for o in sorted(missing_operations(self.chain.graph, wanted, self.in_memory)):
            self.executions.append(o)
            for b in self.ops[o].writes:
                self.in_memory[b] = 1
                if not self.chain.persistent[b]:
                    self.held.append(b)

    def _advance_to(self, link: int) -> None:
        """Run forward from the last saved state to the input of `link`; save where slots allow."""
        points = self.chain.points
        if not link or self.in_memory[points[link - 1].buffer]:
            return
        at = self.saved[-1]
        while at < link:
            left, free = link - at + 1, self.slots - len(self.saved)
            step = next_checkpoint(left, free + 1) if free else left - 1
            for k in range(at, at + step):
                self.executions += self.chain.advance[k]
            at += step
            if free:
                self._save(at)
            self.in_memory[points[at - 1].buffer] = 1
            self.held.append(points[at - 1].buffer)
