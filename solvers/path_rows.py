"""Rows that tie several stages of a relaxation together, found where its solution violates them.

In `stage_cuts`, fine stages let a linear relaxation execute half of an operation in one stage and
half in the next, for a use that needs all of it: the more cuts, the weaker. Let a path lead from
operation o over buffers t_1 (written by o), ..., t_m, each but the first written by an operation
that reads the one before. If something between the cuts a < b asks for t_m, then one of these
buffers was in memory as a first executed, or o is executed again between a and b:

    sum over stages of a..b of comp[.,o] + sum over k of keep[a,t_k] >= what asks for t_m,

which is 1 for a base operation between a and b, or keep[b,t_m], or comp[last stage before b, x]
for an x that reads t_m. There are exponentially many; for a given solution the most violated for
each a, b, o are found in O(cuts^2 edges) by passing demands from readers to writers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from optckpt.solvers.preprocess import Problem
from optckpt.solvers.stage_cuts import Relaxation

Demand = Literal["use", "keep", "again"]


@dataclass(frozen=True, slots=True)
class PathRow:
    """One row; it can be written down for any relaxation that cuts at `first` and `last`."""

    first: int
    last: int
    """The cuts a and b, as positions."""
    operation: int
    path: tuple[int, ...]
    """Buffers t_1, ..., t_m."""
    demand: Demand
    """What asks for t_m: a base operation between the cuts or at `last`, what is kept at
    `last`, or a re-execution of `reader` in the last stage before it."""
    reader: int = -1

    def terms(self, relaxation: Relaxation) -> tuple[dict[int, float], float] | None:
        """The row's coefficients by column, and its lower limit; None if it says nothing there."""
        cuts = relaxation.cuts
        if self.first not in cuts or self.last not in cuts:
            return None
        a, b = cuts.index(self.first), cuts.index(self.last)
        terms: dict[int, float] = {}

        def add(column: int, value: float) -> None:
            terms[column] = terms.get(column, 0.0) + value

        low = 0.0
        if self.demand == "use":
            low = 1.0
        elif self.demand == "keep":
            if self.path[-1] in relaxation.kept[b]:
                low = 1.0
            elif self.path[-1] in relaxation.keep[b]:
                add(relaxation.keep[b][self.path[-1]], -1.0)
            else:
                return None
        elif self.reader in relaxation.comp[b - 1]:
            add(relaxation.comp[b - 1][self.reader], -1.0)
        else:
            return None
        for t in self.path:
            if t in relaxation.kept[a]:
                return None
            if t in relaxation.keep[a]:
                add(relaxation.keep[a][t], 1.0)
        for stage in range(a, b):
            if self.operation in relaxation.comp[stage]:
                add(relaxation.comp[stage][self.operation], 1.0)
        return terms, low


def add_path_rows(relaxation: Relaxation, rows: Iterable[PathRow]) -> list[tuple[PathRow, int]]:
    """Put `rows` into the relaxation's model; returns those that it took, with their index."""
    placed = []
    for row in rows:
        written = row.terms(relaxation)
        if written is not None:
            placed.append((row, len(relaxation.model.row_lower)))
            relaxation.model.add_row(written[0], lower=written[1])
    return placed


def violated_paths(
    problem: Problem, relaxation: Relaxation, values: Sequence[float], least: float
) -> list[PathRow]:
    """The path rows that `values` (per column) violate by more than `least`.

    At most one for each two cuts and operation, the most violated one. Two neighbouring cuts, and
    the end in the place of the second, need none: the relaxation's own rows imply them.
    """
    found: list[PathRow] = []
    for a in range(len(relaxation.cuts)):
        ran = {o: values[c] for o, c in relaxation.comp[a].items()}
        for b in range(a + 2, len(relaxation.cuts)):
            for o, c in relaxation.comp[b - 1].items():
                if o in ran:
                    ran[o] += values[c]
            found += _between(problem, relaxation, values, least, a, b, ran)
    return found


def _between(
    p: Problem,
    relaxation: Relaxation,
    values: Sequence[float],
    least: float,
    a: int,
    b: int,
    ran: dict[int, float],
) -> list[PathRow]:
    """`violated_paths` for the cuts of index a and b; `ran`: sums of comp in between."""
    first, last = relaxation.cuts[a], relaxation.cuts[b]
    keep, kept = relaxation.keep[a], relaxation.kept[a]
    keep_last, kept_last, comp_last = relaxation.keep[b], relaxation.kept[b], relaxation.comp[b - 1]
    # Demand for a buffer, and from where: a kind and a reader, or the next buffer of a path.
    demand: dict[int, float] = {}
    source: dict[int, tuple[Demand, int] | int] = {}
    for t in keep:
        readers = p.base_readers[t]
        if any(first < r < last for r in readers):
            demand[t], source[t] = 1.0, ("use", -1)
        elif t in kept_last:
            demand[t], source[t] = 1.0, ("keep", -1)
        elif t in keep_last and values[keep_last[t]] > least:
            demand[t], source[t] = values[keep_last[t]], ("keep", -1)
    found = []
    seen = set()
    # Readers come before writers; those that share a column share the row.
    for o, column in reversed(relaxation.comp[a].items()):
        wanted, over = 0.0, -1
        for t in p.writes[o]:
            if t in demand and t not in kept:
                rest = demand[t] - (values[keep[t]] if t in keep else 0.0)
                if rest > wanted:
                    wanted, over = rest, t
        if wanted - ran[o] > least and column not in seen:
            found.append(_row(first, last, o, over, source))
        seen.add(column)
        own = values[comp_last[o]] if o in comp_last else 0.0
        if max(wanted, own) <= least:
            continue
        origin: tuple[Demand, int] | int = over if wanted >= own else ("again", o)
        for t in p.reads[o]:
            if max(wanted, own) > demand.get(t, 0.0):
                demand[t], source[t] = max(wanted, own), origin
    return found


def _row(
    first: int, last: int, o: int, t: int, source: dict[int, tuple[Demand, int] | int]
) -> PathRow:
    path = [t]
    while isinstance(origin := source[path[-1]], int):
        path.append(origin)
    return PathRow(first, last, o, tuple(path), *origin)
