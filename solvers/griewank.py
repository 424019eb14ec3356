"""Binomial checkpointing of a chain (Revolve).

A. Griewank and A. Walther, "Algorithm 799: Revolve", ACM TOMS 26 (2000). A chain of l links is
reversed with s slots, each of which holds the state before a link (the first one holds the
input). Repeatedly: advance from the last saved state, save a state on the way while slots are
free, reverse the last link. The links of a training graph are the blocks between neighbouring
articulation points; the states are the buffers at those points.
"""

from __future__ import annotations

from bisect import bisect_left
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
    def _advance(self) -> tuple[tuple[int, ...], ...]:
        """For each link but the last, the operations that lead from its input to its output."""
        rows = []
        for k, point in enumerate(self.points):
            outside = bytearray(self.persistent)
            if k:
                outside[self.points[k - 1].buffer] = 1
            rows.append(tuple(sorted(missing_operations(self.graph, [point.buffer], outside))))
        return tuple(rows)

    def reversal(self, slots: int, most: int | None = None) -> Schedule | None:
        """The schedule with `slots` >= 1 saved states, the input among them.

        Returns None once it has more than `most` executions.
        """
        graph, ops = self.graph, self.graph.operations
        last_forward = last_forward_uses(graph)
        last_backward = last_backward_uses(graph)
        keep = self.persistent
        in_memory = bytearray(len(graph.buffers))
        wanted_of: list[list[int]] = [[] for _ in range(len(self))]
        for b, p in enumerate(graph.producer):
            if ops[p].forward and not keep[b] and last_backward[b] >= 0:
                wanted_of[bisect_left(self.boundaries, p)].append(b)
        executions: list[int] = []
        saved = self._first_saved(slots)
        states = {self.points[k - 1].buffer for k in saved[1:]}
        last_start = self.boundaries[-1]
        held: list[int] = []

        for i, op in enumerate(ops):
            missing = () if op.forward else [b for b in op.reads if not in_memory[b]]
            if missing:
                link = max(self._link_for(b) for b in missing)
                while saved[-1] > link:
                    saved.pop()
                states = {self.points[k - 1].buffer for k in saved[1:]}
                for b in held:
                    if b not in states and last_backward[b] < i:
                        in_memory[b] = 0
                held = []
                self._advance_to(link, slots, saved, in_memory, executions, held)
                states = {self.points[k - 1].buffer for k in saved[1:]}
                wanted = [b for b in wanted_of[link] if last_backward[b] >= i]
                batch = sorted(missing_operations(graph, [*missing, *wanted], in_memory))
                executions += batch
                for o in batch:
                    for b in ops[o].writes:
                        in_memory[b] = 1
                        if not keep[b]:
                            held.append(b)
            executions.append(i)
            if most is not None and len(executions) > most:
                return None
            for b in op.writes:
                in_memory[b] = 1
            if op.forward:
                for b in (*op.reads, *op.writes):
                    if last_forward[b] == i and not keep[b]:
                        if graph.producer[b] > last_start or b == self.points[-1].buffer:
                            held.append(b)
                        elif b not in states:
                            in_memory[b] = 0
        return Schedule(tuple(executions))

    def _link_for(self, b: int) -> int:
        """The link to be reversed when buffer `b` is needed: a state is the next link's input."""
        k = bisect_left(self.boundaries, self.graph.producer[b])
        return k + 1 if k < len(self.points) and self.points[k].buffer == b else k

    def _first_saved(self, slots: int) -> list[int]:
        """Links whose input is saved as the forward pass runs; the first is link 0."""
        saved, link, left = [0], 0, slots
        while left > 1 and len(self) - link > 1:
            link += next_checkpoint(len(self) - link, left)
            left -= 1
            saved.append(link)
        return saved

    def _advance_to(
        self,
        link: int,
        slots: int,
        saved: list[int],
        in_memory: bytearray,
        executions: list[int],
        held: list[int],
    ) -> None:
        """Run forward from the last saved state to the input of `link`, saving where slots allow.

        Changes the lists: `saved` gains links, `held` the states reached.
        """
        if not link or in_memory[self.points[link - 1].buffer]:
            return
        at = saved[-1]
        while at < link:
            free = slots - len(saved)
            left = link - at + 1
            step = next_checkpoint(left, free + 1) if free else left - 1
            for k in range(at, at + step):
                executions += self._advance[k]
            at += step
            if free:
                saved.append(at)
            state = self.points[at - 1].buffer
            in_memory[state] = 1
            held.append(state)
