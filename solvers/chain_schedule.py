"""A schedule from the bound for chains: the cheapest way through the relaxed chain, decoded.

The relaxed problem of `chain_bound` looks at one path, and at first executions only. Where it
is tight, what it holds is nearly a schedule: what else the backward pass reads is kept throughout,
what is missing is computed as late as possible, and annealing repairs the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from optckpt.solvers.chain_bound import chain_program
from optckpt.solvers.decode import decode
from optckpt.solvers.preprocess import Problem
from optckpt.solvers.stage_cuts import Choice


@dataclass(frozen=True)
class Chained:
    """What a problem's chain says about a budget."""

    bound: float
    """As that of `chain_bound`."""
    sequence: list[int] | None
    """A sequence that nearly fits and nearly costs that, in favourable cases; None if infinite."""


def chained(
    problem: Problem, budget: int, proceed: Callable[[], bool] = lambda: True
) -> Chained | None:
    """Bound and sequence for `budget` bytes (resident data subtracted).

    None if the problem has no chain, or if `proceed`, asked now and then, said no.
    """
    p = problem
    found = chain_program(p, budget, proceed)
    if found is None:
        return None
    program, path, moments = found
    if math.isinf(program.bound):
        return Chained(program.bound, None)
    begin = p.n + 1 - len(moments)
    turn: dict[int, int] = {}
    for q, moment in enumerate(moments, begin):
        if moment.wanted:
            turn.setdefault(moment.top, q)
    elements = {path[k] for k in turn}
    beside = [
        t for t, o in enumerate(p.producer) if t not in elements and p.size[t] and p.repeatable[o]
    ]
    since = program.since()
    cuts: list[int] = []
    keep: list[frozenset[int]] = []
    comp: list[frozenset[int]] = []
    before: set[int] = set()
    for j in range(len(since) - 1, 0, -1):
        cut = turn[int(program.chain.place[j])]
        held = {path[program.chain.place[s]] for s in range(1, j + 1) if since[s] >= j}
        if cuts:
            comp.append(frozenset(p.producer[t] for t in held - before))
        cuts.append(cut)
        keep.append(frozenset(held.union(t for t in beside if p.last_reader(t) >= cut)))
        before = held
    comp.append(frozenset())
    return Chained(program.bound, decode(p, Choice(tuple(cuts), tuple(keep), tuple(comp))))
