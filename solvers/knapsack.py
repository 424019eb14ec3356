"""The strategy `knapsack`: a minimum cut for what is cheap, a 0/1 knapsack for what is expensive.

The idea of torch.compile's min-cut partitioner with an activation memory budget (H. He and S. Yu,
"Transcending runtime-memory tradeoffs in checkpointing by being fusion aware", MLSys 2023, and
PyTorch's `activation_memory_budget`, 2024). Cheap operations may always be computed again; an
expensive one is kept if a knapsack of a share r of the bytes that expensive operations write has
a place for it, its value being its time. What is then saved between forward and backward pass is
a minimum cut: the fewest bytes from which the backward pass can be served.

r bounds what is saved, not the peak. So r, and what counts as cheap, are swept here, and the
cheapest schedule is taken whose simulated peak fits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.recompute import (
    always_kept,
    best_of,
    last_backward_uses,
    relevant_operations,
    schedule_from_kept,
)
from optckpt.solvers.registry import SolveOptions

CHEAP_SHARES = (0.1, 0.3, 0.0)
"""The cheap operations take this share of the forward pass together; the first without budget."""
LEVELS = 1000
"""In the knapsack, sizes are rounded up to this fraction of their sum."""
RATIOS = 12
"""Values of r tried, evenly spaced."""
HALVINGS = 5
"""Between the largest of them that fits and the next, the distance is halved so often."""
TIES = 1 << 20
"""Of cuts with equal bytes the one with the least time counts: a byte is worth so many shares."""


def cheap_operations(graph: TrainingGraph, share: float) -> set[int]:
    """The relevant operations of least time per byte written, `share` of the forward pass's time.

    Time per byte is what it costs to have these bytes again.
    """
    ops = graph.operations

    def density(i: int) -> float:
        return ops[i].seconds / max(1, sum(graph.buffers[b].size for b in ops[i].writes))

    left = share * sum(op.seconds for op in ops if op.forward)
    found: set[int] = set()
    for i in sorted(relevant_operations(graph), key=lambda i: (density(i), i)):
        left -= ops[i].seconds
        if left < 0:
            break
        found.add(i)
    return found


@dataclass(frozen=True)
class Knapsack:
    """The 0/1 knapsack over `items` for all capacities at once."""

    items: list[int]
    weights: list[int]
    """In levels."""
    taken: npt.NDArray[np.bool_]
    """Whether item k is taken if items up to k and c levels are at hand."""

    @classmethod
    def fill(cls, graph: TrainingGraph, items: Collection[int]) -> Knapsack:
        """Dynamic program in O(items * LEVELS); weights are bytes written, values are times."""
        ops = graph.operations
        listed = sorted(items)
        sizes = [sum(graph.buffers[b].size for b in ops[i].writes) for i in listed]
        total = max(1, sum(sizes))
        weights = [-(-size * LEVELS // total) for size in sizes]
        value = np.zeros(LEVELS + 1)
        taken = np.zeros((len(listed), LEVELS + 1), np.bool_)
        for k, (i, w) in enumerate(zip(listed, weights, strict=True)):
            taken[k, w:] = value[: LEVELS + 1 - w] + ops[i].seconds > value[w:]
            value[w:] = np.maximum(value[w:], value[: LEVELS + 1 - w] + ops[i].seconds)
        return cls(listed, weights, taken)

    def chosen(self, ratio: float) -> set[int]:
        """The items of the largest value within `ratio` of all bytes; all of them for 1."""
        if ratio >= 1:
            return set(self.items)
        found = set()
        left = int(ratio * LEVELS)
        for k in range(len(self.items) - 1, -1, -1):
            if self.taken[k, left]:
                found.add(self.items[k])
                left -= self.weights[k]
        return found


def saved_buffers(graph: TrainingGraph, again: Collection[int]) -> set[int]:
    """The fewest bytes to save, so that executing some of `again` serves the backward pass.

    Of buffer b, A(b) means that it is at hand in the backward pass, of operation o, R(o) that it
    is executed again. On the sink's side of the cut A and R hold. A(b) without R of its writer
    costs the bytes of b: it is saved. R(o) without A of what it reads is forbidden. Operations
    that share no buffer are cut apart from each other.
    """
    ops, producer = graph.operations, graph.producer
    again = set(again)
    needed = [last >= 0 for last in last_backward_uses(graph)]
    free = always_kept(graph)
    # What is read backward and cannot be computed again is saved in any case.
    saved = {
        b
        for b, p in enumerate(producer)
        if needed[b] and p not in again and b not in free and ops[p].forward
    }
    network: Any = nx.DiGraph()
    total = graph.seconds or 1.0
    at_hand = free | saved
    for o in sorted(again):
        network.add_edge("source", ("R", o), capacity=1 + int(ops[o].seconds / total * TIES / 2))
        for b in set(ops[o].reads) - at_hand:
            network.add_edge(("A", b), ("R", o))
            if producer[b] not in again:
                network.add_edge("source", ("A", b), capacity=graph.buffers[b].size * TIES)
        for b in set(ops[o].writes) - at_hand:
            network.add_edge(("R", o), ("A", b), capacity=graph.buffers[b].size * TIES)
            if needed[b]:
                network.add_edge(("A", b), "sink")
    inner = network.subgraph([v for v in network if isinstance(v, tuple)])
    for part in nx.weakly_connected_components(inner):
        if not any(network.has_edge(v, "sink") for v in part):
            continue
        cut = network.subgraph([*part, "source", "sink"])
        _, (_, behind) = nx.minimum_cut(
            cut, "source", "sink", flow_func=nx.algorithms.flow.boykov_kolmogorov
        )
        for v in part & behind:
            kind, b = v
            if kind == "A" and (producer[b] not in again or ("R", producer[b]) not in behind):
                saved.add(b)
    return saved


class _Sweep:
    """Makes schedules until `deadline` (of time.monotonic)."""

    def __init__(self, graph: TrainingGraph, budget: int | None, deadline: float) -> None:
        self.graph, self.budget, self.deadline = graph, budget, deadline
        self.relevant = set(relevant_operations(graph))
        self.longest = 0.0
        """Seconds that the slowest ratio took."""
        self.peaks: dict[frozenset[int], int] = {}
        """Lowest peak by saved buffers."""

    def schedules(self) -> Iterator[Schedule]:
        """All schedules worth a look; the plain step first if there is a budget."""
        if self.budget is None:
            cheap = cheap_operations(self.graph, CHEAP_SHARES[0])
            yield from self.find(Knapsack.fill(self.graph, self.relevant - cheap), 1.0)[0]
            return
        yield Schedule.base(self.graph)
        for share in CHEAP_SHARES:
            cheap = cheap_operations(self.graph, share)
            yield from self.search(Knapsack.fill(self.graph, self.relevant - cheap), self.budget)

    def search(self, filled: Knapsack, budget: int) -> Iterator[Schedule]:
        """The schedules of a grid of ratios, then of ratios between the best ones.

        The extra time falls as r rises, so the largest r that fits is looked for. The peak need
        not fall with r: where nothing fits, it is around the r of the lowest peak.
        """
        step = 1.0 / RATIOS
        best: tuple[int, float] | None = None
        trials = [k * step for k in range(RATIOS, -1, -1)]
        for _ in range(1 + HALVINGS):
            for r in trials:
                if time.monotonic() + self.longest > self.deadline:
                    return
                schedules, peak = self.find(filled, r)
                yield from schedules
                rank = (max(peak - budget, 0), -r)
                if best is None or rank < best:
                    best = rank
                if peak <= budget:
                    break
            assert best is not None
            step /= 2
            excess, r = best[0], -best[1]
            trials = [q for q in (r + step, r - step) if 0 <= q <= 1][: 1 if not excess else 2]

    def find(self, filled: Knapsack, ratio: float) -> tuple[list[Schedule], int]:
        """The schedules of a ratio, unless they were made before, and their lowest peak."""
        started = time.monotonic()
        again = self.relevant - filled.chosen(ratio)
        kept = frozenset(saved_buffers(self.graph, again))
        schedules = []
        if kept not in self.peaks:
            schedules = [schedule_from_kept(self.graph, kept, "retained")]
            transient = schedule_from_kept(self.graph, kept, "transient")
            if transient not in schedules:
                schedules.append(transient)
            self.peaks[kept] = min(simulate(self.graph, s).peak for s in schedules)
        self.longest = max(self.longest, time.monotonic() - started)
        return schedules, self.peaks[kept]


def knapsack(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule that fits, of those which a knapsack and a minimum cut choose.

    Without a budget: all expensive operations kept, cheap ones computed again where that saves
    bytes, as torch.compile does by itself. Where nothing fits, the lowest peak.
    """
    sweep = _Sweep(graph, budget, time.monotonic() + options.time_limit)
    return best_of("knapsack", graph, budget, sweep.schedules(), options.time_limit)
