"""Several cuts that every order passes one after the other: a stronger bound for any order.

Let c_1 < ... < c_K be operations, each an ancestor of the next, so that they first run in this
order whatever the order is. Stage i lies between the first executions of c_i and c_{i+1} (after
c_K: until the end). As c_i first runs, its ancestors A_i have run and its descendants D_i have
not; of all others nothing is known, and nothing is asked. Binaries, for buffers t and operations o
of A_i alone,

    keep[i,t]   t is in memory while c_i first runs;
    comp[i,o]   o runs in stage i, which is once more than it had to;
    again[i,o]  o runs in some stage >= i, once more than it had to

satisfy in every schedule of every order
- keep[i,t] + comp[i,o] >= 1 if o writes t and an operation of D_i and A_{i+1} reads it: that one
  first runs within stage i; keep[i,t] + again[i,o] >= 1 if one of D_i does;
- comp[i,o] <= keep[i,t] + comp[i,p] and again[i,o] <= keep[i,t] + again[i,p] if o reads t and p
  writes it: what runs again after c_i finds its inputs there or computes them again;
- keep[i+1,t] <= keep[i,t] + comp[i,o]: what c_{i+1} finds was there at c_i or computed since;
- again[i,o] <= comp[i,o] + again[i+1,o], again[i+1,o] <= again[i,o];
- the bytes kept, with what cannot be computed again and c_i's own, are at most the budget.
So the least sum of seconds * comp bounds the extra time of all of them. With K = 1 it is the loss
cut; `stage_cuts` is the same idea where the base order says of every operation on which side of
a cut it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from optckpt.graph import TrainingGraph
from optckpt.solvers.ancestry import Ancestry, members
from optckpt.solvers.engine import MipModel, Solve
from optckpt.solvers.loss_cut import STEP, LossCut, bytes_at
from optckpt.solvers.preprocess import Problem, memory_unit, preprocess

MOST_ENTRIES = 20_000_000
"""Buffers times operations beyond which choosing cuts would take too much memory."""


def find_cuts(graph: TrainingGraph, most: int) -> list[LossCut]:
    """At most `most` operations, each an ancestor of the next, that many bytes have to bypass.

    The first to be chosen is the one that the most bytes bypass; the others, comparable to all
    before, differ most from the nearest of them in the bytes that bypass them, each as much as
    its own bytes weigh.
    """
    n = len(graph.operations)
    ancestry = Ancestry.of(graph)
    masks = {b: ancestry.bypassed(graph, b) for b, t in enumerate(graph.buffers) if t.size}
    used = [b for b, mask in masks.items() if mask]
    if not used or len(used) * n > MOST_ENTRIES:
        return []
    passing = np.array([ancestry.spread(masks[b]) for b in used], np.float32)
    size = np.array([graph.buffers[b].size for b in used], np.float32)
    bypassing, own = bytes_at(graph, ancestry)
    weight = bypassing + own
    comparable = bypassing > 0
    distance = np.zeros(n)
    chosen: list[int] = []
    while len(chosen) < most:
        score = np.where(comparable, weight + distance, -1.0)
        best = int(np.argmax(score))
        if score[best] <= 0 or best in chosen:
            break
        away = np.asarray(size @ np.abs(passing - passing[:, best : best + 1]), np.float64)
        distance = away if not chosen else np.minimum(distance, away)
        chosen.append(best)
        related = ancestry.spread(ancestry.before[best] | ancestry.after[best])
        comparable &= related.astype(bool) & (distance > 0)
    return [
        LossCut(
            c,
            frozenset(members(ancestry.before[c])),
            frozenset([n, *members(ancestry.after[c])]),
        )
        for c in sorted(chosen)
    ]


@dataclass
class _Builder:
    problem: Problem
    cuts: list[LossCut]
    budget: int
    model: MipModel = field(default_factory=MipModel)
    held: list[set[int]] = field(default_factory=list)
    """Per cut: buffers of ancestors that are in memory there in any case."""
    keep: list[dict[int, int]] = field(default_factory=list)
    comp: list[dict[int, int]] = field(default_factory=list)
    again: list[dict[int, int]] = field(default_factory=list)

    def add_columns(self, i: int) -> None:
        p, cut = self.problem, self.cuts[i]
        held = set(p.reads[cut.operation])
        keep: dict[int, int] = {}
        comp: dict[int, int] = {}
        stack = []
        for t, o in enumerate(p.producer):
            if o in cut.before and p.size[t]:
                readers = p.base_readers[t]
                if not p.repeatable[o] and any(r in cut.after for r in readers):
                    held.add(t)
                # Who is no ancestor may still need it, on whichever side of the cut; so may the
                # cut's operation if it is executed again.
                again = p.repeatable[cut.operation]
                if any(r not in cut.before and (again or r != cut.operation) for r in readers):
                    stack.append(t)
        seen = set(stack)
        while stack:
            t = stack.pop()
            if t not in held:
                keep[t] = self.model.add_column()
            o = p.producer[t]
            if p.repeatable[o] and o not in comp:
                comp[o] = self.model.add_column(cost=p.cost[o] * STEP)
                fresh = [r for r in p.reads[o] if r not in seen]
                seen.update(fresh)
                stack.extend(fresh)
        self.held.append(held)
        self.keep.append(keep)
        self.comp.append(comp)
        self.again.append(
            comp
            if i == len(self.cuts) - 1
            else {o: self.model.add_column(integer=False) for o in comp}
        )

    def supply(self, i: int, t: int, source: dict[int, int]) -> dict[int, float] | None:
        """Terms of keep[i,t] + source[writer of t]; None if no constraint can be made of it."""
        if t not in self.keep[i]:
            return None
        terms = {self.keep[i][t]: 1.0}
        column = source.get(self.problem.producer[t])
        if column is not None:
            terms[column] = 1.0
        return terms

    def at_least(self, terms: dict[int, float] | None, low: float, minus: int = -1) -> None:
        if terms is not None:
            if minus >= 0:
                terms[minus] = terms.get(minus, 0.0) - 1.0
            self.model.add_row(terms, lower=low)

    def add_rows(self, i: int) -> None:
        p, cut = self.problem, self.cuts[i]
        following = self.cuts[i + 1] if i + 1 < len(self.cuts) else None
        comp, again = self.comp[i], self.again[i]
        for t in self.keep[i]:
            after = [r for r in p.base_readers[t] if r in cut.after]
            if following is None:
                if after:
                    self.at_least(self.supply(i, t, comp), 1.0)
                continue
            if any(r in following.before for r in after):
                self.at_least(self.supply(i, t, comp), 1.0)
            if after:
                self.at_least(self.supply(i, t, again), 1.0)
            if t in self.held[i + 1]:
                self.at_least(self.supply(i, t, comp), 1.0)
            elif t in self.keep[i + 1]:
                self.at_least(self.supply(i, t, comp), 0.0, minus=self.keep[i + 1][t])
        for o, column in comp.items():
            for t in p.reads[o]:
                self.at_least(self.supply(i, t, comp), 0.0, minus=column)
                if following is not None:
                    self.at_least(self.supply(i, t, again), 0.0, minus=again[o])
            if following is not None:
                later = self.again[i + 1].get(o)
                terms = {column: 1.0}
                if later is not None:
                    terms[later] = 1.0
                    self.model.add_row({again[o]: 1.0, later: -1.0}, lower=0.0)
                self.at_least(terms, 0.0, minus=again[o])

    def add_memory(self, i: int) -> None:
        p, c = self.problem, self.cuts[i].operation
        fixed = p.workspace[c] + sum(p.size[t] for t in (*self.held[i], *p.writes[c]))
        if p.takes[c]:
            fixed -= p.size[p.writes[c][0]]
        # Rounding makes the row weaker only.
        unit = memory_unit(p, self.budget)
        row = {c: float(p.size[t] // unit) for t, c in self.keep[i].items()}
        self.model.add_row(row, upper=float((self.budget - fixed) // unit))


def order_cuts_model(problem: Problem, cuts: list[LossCut], budget: int) -> MipModel:
    """The MIP at `cuts`, of an unmerged problem, under `budget` bytes (without resident data)."""
    builder = _Builder(problem, cuts, budget)
    for i in range(len(cuts)):
        builder.add_columns(i)
    for i in range(len(cuts)):
        builder.add_rows(i)
        builder.add_memory(i)
    return builder.model


def start_order_cuts(
    graph: TrainingGraph, budget: int, *, most: int, time_limit: float, gap: float
) -> Solve | None:
    """Start solving `most` cuts of `graph` under `budget` bytes (resident included).

    The bound of its result, divided by STEP, is a fraction of the plain step's time; the result
    "infeasible" proves that no schedule in any order fits. None if there is nothing to cut.
    """
    cuts = find_cuts(graph, most)
    if not cuts:
        return None
    model = order_cuts_model(preprocess(graph, merge=False), cuts, budget - graph.resident)
    return Solve(model, time_limit=time_limit, gap=gap * STEP)


def order_cuts_bound(
    graph: TrainingGraph,
    budget: int,
    *,
    most: int = 4,
    time_limit: float = 10.0,
    gap: float = 1e-4,
) -> float:
    """A lower bound on the extra time (fraction of the plain step) of any schedule, in any order.

    Infinite if it proves that no schedule fits `budget` bytes (resident included).
    """
    run = start_order_cuts(graph, budget, most=most, time_limit=time_limit, gap=gap)
    if run is None:
        return 0.0
    try:
        return max(0.0, run.result().bound / STEP)
    finally:
        run.cancel()
