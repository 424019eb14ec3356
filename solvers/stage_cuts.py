"""The relaxation: lazy stage cuts, a MIP over what is kept and re-executed between cuts.

Let c_1 < ... < c_K be base operations, the cuts; stage i is what happens after the first
execution of c_i and before the first execution of c_{i+1} (after c_K: until the end). For
schedules whose first executions follow the base order, binaries

    keep[i,t]   buffer t, computed before c_i, is in memory while c_i first executes;
    comp[i,o]   operation o < c_i is executed again in stage i;
    again[i,o]  operation o < c_i is executed again in some stage >= i

satisfy the rows below, so the cheapest solution bounds the cost of every schedule from below,
whatever the set of cuts. Memory is checked only as the cuts execute (and in moment rows, as
an operation is re-executed between two consecutive base operations), so more cuts make a
tighter bound. The variables again[i,o], which have no counterpart in Checkmate (Jain et al.,
MLSys 2020), keep the linear relaxation from spreading one re-execution over several stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optckpt.solvers.engine import INFINITY, MipModel
from optckpt.solvers.preprocess import Problem, memory_unit
from optckpt.solvers.units import joined

STEP = 1000.0
"""Objective value of the plain step's time: keeps coefficients in the solvers' good range."""


@dataclass(frozen=True)
class Relaxation:
    """The MIP for one set of cuts, and where its variables are."""

    model: MipModel
    cuts: tuple[int, ...]
    kept: tuple[frozenset[int], ...]
    """Per cut: buffers that are in memory there in any case."""
    keep: tuple[dict[int, int], ...]
    """Per cut: buffer -> column."""
    comp: tuple[dict[int, int], ...]
    """Per cut: operation -> column."""
    again: tuple[dict[int, int], ...]
    memory: tuple[int, ...]
    """Per cut: its memory row."""


@dataclass(frozen=True)
class Choice:
    """An integer solution of a relaxation, per cut."""

    cuts: tuple[int, ...]
    keep: tuple[frozenset[int], ...]
    comp: tuple[frozenset[int], ...]


def read_choice(relaxation: Relaxation, values: Sequence[float], share: float = 0.5) -> Choice:
    """The solution whose column values are `values`, rounded.

    What is in memory by more than `share` is kept, the rest may be executed again.
    """
    return Choice(
        relaxation.cuts,
        tuple(
            fixed | {t for t, c in columns.items() if values[c] > share}
            for fixed, columns in zip(relaxation.kept, relaxation.keep, strict=True)
        ),
        tuple(
            frozenset(o for o, c in columns.items() if values[c] > 1 - share)
            for columns in relaxation.comp
        ),
    )


def relevant(problem: Problem, cut: int) -> tuple[list[int], list[int]]:
    """Buffers computed before base operation `cut` that something from it on may read.

    Returns those buffers, and the operations before the cut whose re-execution after it can
    be of use to a base operation behind it or to a re-execution of any operation, both
    ascending.
    """
    buffers: set[int] = set()
    operations: set[int] = set()
    stack: list[int] = []
    for t, p in enumerate(problem.producer):
        if p < cut and problem.size[t] and problem.last_reader(t) >= cut:
            buffers.add(t)
            # What the cut alone still reads is wanted on only if the cut is executed again.
            if problem.last_reader(t) > cut or (cut < problem.n and problem.repeatable[cut]):
                stack.append(t)
    seen = set(stack)
    while stack:
        p = problem.producer[stack.pop()]
        if problem.repeatable[p] and p not in operations:
            operations.add(p)
            for t in problem.reads[p]:
                buffers.add(t)
                if t not in seen:
                    seen.add(t)
                    stack.append(t)
    return sorted(buffers), sorted(operations)


@dataclass
class _Builder:
    problem: Problem
    cuts: tuple[int, ...]
    budget: int
    """Bytes, resident data already subtracted."""
    unit: int
    moments: dict[int, list[int]]
    """Cut -> operations whose re-execution right after it gets a moment row."""
    joined: dict[int, int]
    """Operation -> the reader together with which alone it is executed again; see `units`."""
    model: MipModel = field(default_factory=MipModel)
    kept: list[frozenset[int]] = field(default_factory=list)
    keep: list[dict[int, int]] = field(default_factory=list)
    comp: list[dict[int, int]] = field(default_factory=list)
    again: list[dict[int, int]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def at_least(self, terms: dict[int, float], low: float) -> None:
        self.model.add_row(terms, lower=low)

    def add_columns(self, i: int) -> None:
        p, cut = self.problem, self.cuts[i]
        buffers, operations = relevant(p, cut)
        buffers = [t for t in buffers if self.joined.get(p.producer[t], cut) >= cut]
        read_here = set(p.reads[cut])
        fixed = frozenset(
            t
            for t in buffers
            if t in read_here or (not p.repeatable[p.producer[t]] and p.last_reader(t) >= cut)
        )
        self.kept.append(fixed)
        self.keep.append({t: self.model.add_column() for t in buffers if t not in fixed})
        self.comp.append(self.column_per_block(cut, operations, True))
        last = i == len(self.cuts) - 1
        self.again.append(self.comp[i] if last else self.column_per_block(cut, operations, False))

    def column_per_block(self, cut: int, operations: list[int], priced: bool) -> dict[int, int]:
        """Operation -> column, one for all that are executed again together after `cut`."""
        columns: dict[int, int] = {}
        for o in reversed(operations):
            reader = self.joined.get(o, cut)
            if reader < cut:
                columns[o] = columns[reader]
            else:
                columns[o] = self.model.add_column(integer=priced)
            if priced:
                self.model.cost[columns[o]] += self.problem.cost[o] * STEP
        return dict(sorted(columns.items()))

    def supply(self, i: int, t: int, source: dict[int, int]) -> dict[int, float] | None:
        """Terms of keep[i,t] + source[producer of t]; None if that is 1 in any case."""
        if t in self.kept[i]:
            return None
        terms = {self.keep[i][t]: 1.0} if t in self.keep[i] else {}
        column = source.get(self.problem.producer[t])
        if column is not None:
            terms[column] = 1.0
        return terms

    def add_stage(self, i: int) -> None:
        p, cut = self.problem, self.cuts[i]
        last = i == len(self.cuts) - 1
        end = p.n + 1 if last else self.cuts[i + 1]
        comp, again = self.comp[i], self.again[i]
        for t in (*self.keep[i], *self.kept[i]):
            readers = p.base_readers[t]
            if any(cut < r < end for r in readers):
                terms = self.supply(i, t, comp)
                if terms is not None:
                    self.at_least(terms, 1.0)
            if not last and p.last_reader(t) > cut:
                terms = self.supply(i, t, again)
                if terms is not None:
                    self.at_least(terms, 1.0)
            if not last and t in self.keep[i + 1]:
                terms = self.supply(i, t, comp)
                if terms is not None:
                    self.at_least({**terms, self.keep[i + 1][t]: -1.0}, 0.0)
            elif not last and t in self.kept[i + 1]:
                terms = self.supply(i, t, comp)
                if terms is not None:
                    self.at_least(terms, 1.0)
        for o, column in comp.items():
            for t in p.reads[o]:
                terms = self.supply(i, t, comp)
                if terms is not None and column not in terms:
                    self.at_least({**terms, column: -1.0}, 0.0)
        if last:
            return
        for o, column in again.items():
            later = self.again[i + 1].get(o)
            if self.joined.get(o, cut) >= cut:
                terms = {comp[o]: 1.0, column: -1.0}
                if later is not None:
                    terms[later] = 1.0
                    self.at_least({column: 1.0, later: -1.0}, 0.0)
                self.at_least(terms, 0.0)
            for t in p.reads[o]:
                more = self.supply(i, t, again)
                if more is not None and column not in more:
                    self.at_least({**more, column: -1.0}, 0.0)

    def add_memory(self, i: int) -> None:
        """Bytes in memory while c_i executes; sizes rounded so that the row only gets weaker."""
        p, cut = self.problem, self.cuts[i]
        fixed = sum(p.size[t] for t in self.kept[i])
        fixed += sum(p.size[t] for t in p.writes[cut]) + p.workspace[cut]
        terms = {c: float(p.size[t] // self.unit) for t, c in self.keep[i].items()}
        givers = self._givers(i)
        if givers is None:
            fixed -= p.size[p.writes[cut][0]]
        elif givers:
            gift = -float(-(-p.size[p.writes[cut][0]] // self.unit))
            if len(givers) == 1:
                taken = givers[0]
            else:
                taken = self.model.add_column(integer=False)
                self.at_least({**dict.fromkeys(givers, 1.0), taken: -1.0}, 0.0)
            terms[taken] = gift
        room = math.floor((self.budget - fixed) / self.unit)
        self.memory.append(len(self.model.row_lower))
        self.model.add_row({c: v for c, v in terms.items() if v}, upper=float(room))

    def add_moments(self, i: int) -> None:
        """Bytes in memory while an operation is re-executed between c_i and c_{i+1} = c_i + 1.

        A buffer in memory at both cuts, and not computed between them, is there throughout;
        the inputs and outputs of the operation are there as it executes. If it does not
        execute, the row says no more than the memory row of c_{i+1}.
        """
        p, cut = self.problem, self.cuts[i]
        wanted = [o for o in self.moments.get(cut, ()) if o in self.comp[i]]
        if not wanted or i + 1 == len(self.cuts) or self.cuts[i + 1] != cut + 1:
            return
        spans: dict[int, int | None] = {}
        comp_here = None
        for t in (*self.kept[i + 1], *self.keep[i + 1]):
            producer = p.producer[t]
            # spans >= keep[i,t] + keep[i+1,t] - comp[i,producer] - 1
            terms: dict[int, float] = {}
            low = -1.0
            for fixed, columns in (
                (self.kept[i], self.keep[i]),
                (self.kept[i + 1], self.keep[i + 1]),
            ):
                if t in columns:
                    terms[columns[t]] = -1.0
                elif t in fixed or producer == cut:
                    low += 1.0
            if producer == cut and p.repeatable[cut]:
                # Right after its first execution the cut may be executed again as well.
                if comp_here is None:
                    comp_here = self.model.add_column(cost=p.cost[cut] * STEP)
                terms[comp_here] = 1.0
            elif producer in self.comp[i]:
                terms[self.comp[i][producer]] = 1.0
            if not terms:
                spans[t] = None
                continue
            column = self.model.add_column(integer=False)
            spans[t] = column
            self.at_least({**terms, column: 1.0}, low)
        for o in wanted:
            givers = p.takes[o]
            charged = set(p.reads[o]) | set(p.writes[o])
            need = p.workspace[o] + sum(p.size[t] for t in charged)
            if len(givers) == 1:
                # The output takes over the input, unless that is needed on.
                need -= p.size[givers[0]]
                charged.discard(givers[0])
            elif givers:
                need -= p.size[givers[0]]
            room = self.budget
            row = {self.comp[i][o]: float(need // self.unit)}
            for t, span in spans.items():
                if t in charged:
                    continue
                if span is None:
                    room -= p.size[t]
                elif p.size[t] // self.unit:
                    row[span] = float(p.size[t] // self.unit)
            self.model.add_row(row, upper=float(math.floor(room / self.unit)))

    def _givers(self, i: int) -> list[int] | None:
        """Whose re-execution lets the cut take over an input: columns again[i,.].

        None: some input may die at the cut whatever is executed again; []: none can.
        """
        p, cut = self.problem, self.cuts[i]
        columns = []
        for t in p.takes[cut]:
            if p.last_reader(t) <= cut:
                return None
            column = self.again[i].get(p.producer[t])
            if column is not None:
                columns.append(column)
        return columns


def build(
    problem: Problem,
    cuts: Iterable[int],
    budget: int,
    *,
    moments: Iterable[tuple[int, int]] = (),
    cutoff: float = INFINITY,
) -> Relaxation:
    """The relaxation for `cuts` (positions, at least one) under `budget` bytes.

    Args:
        moments: pairs (cut, operation) that get a moment row if cut + 1 is a cut as well.
        cutoff: only solutions at most that expensive (fraction of the plain step) are wanted.
    """
    cuts = sorted(cuts)
    grouped: dict[int, list[int]] = {}
    for cut, o in sorted(moments):
        grouped.setdefault(cut, []).append(o)
    unit = memory_unit(problem, budget)
    blocks = {} if grouped else joined(problem)
    builder = _Builder(problem, tuple(cuts), budget, unit, grouped, blocks)
    for i in range(len(cuts)):
        builder.add_columns(i)
    for i in range(len(cuts)):
        builder.add_stage(i)
        builder.add_memory(i)
        builder.add_moments(i)
    if cutoff < INFINITY:
        priced = {c: v for c, v in enumerate(builder.model.cost) if v}
        builder.model.add_row(priced, upper=cutoff * STEP)
    return Relaxation(
        builder.model,
        builder.cuts,
        tuple(builder.kept),
        tuple(builder.keep),
        tuple(builder.comp),
        tuple(builder.again),
        tuple(builder.memory),
    )
