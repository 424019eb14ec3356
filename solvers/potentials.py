"""What comes before costs at least so much, given what must be in memory: a linear program.

For the exact search (`exact`), whose states are a position p, the buffers W that must be in memory
there, and the operations A that are executed again from there on. The linear program has a stage
for every position; its dual values bound the cost of all re-executions before the state from
below, for all states at once. See docs/solver.md, section 11.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from optckpt.solvers import engine
from optckpt.solvers.engine import MipModel
from optckpt.solvers.preprocess import Problem

Floats = npt.NDArray[np.float64]
STEP = 1000.0
"""Objective value of the plain step's time, as in `stage_cuts`."""
MAX_COLUMNS = 20_000
"""Of a linear program that is solved in seconds."""
SAFETY = 1e-9
"""Taken off every bound (share of the step): far more than rounding adds up to."""


@dataclass(frozen=True)
class Potentials:
    """What is still to be paid before a state (p, W, A), as fractions of the plain step:

    at least 0, and at least constant[p] - (again[p, o] summed over o in A) + the sum over all
    o < p of the smaller of (wanted[p, t] summed over t in W that o writes) and of repeated[p, o],
    less again[p, o] if o is not in A.
    """

    constant: Floats
    """Per position, the end included."""
    wanted: Floats
    """Per position and buffer."""
    again: Floats
    """Per position and operation."""
    repeated: Floats
    """Per position and operation; infinite where the operation cannot be executed again."""


def _useful(problem: Problem, position: int) -> tuple[list[int], list[int]]:
    """Buffers that may be held on at `position`, operations that may be executed again from there.

    Buffers that base operations from there on read, and what the operations read; operations that
    write such buffers again. Both ascend. Other re-executions would be dead.
    """
    stack = [
        t
        for t, p in enumerate(problem.producer)
        if problem.size[t] and p < position <= problem.last_reader(t)
    ]
    buffers = set(stack)
    operations: set[int] = set()
    while stack:
        p = problem.producer[stack.pop()]
        if problem.repeatable[p] and p not in operations:
            operations.add(p)
            fresh = [t for t in problem.reads[p] if t not in buffers]
            buffers.update(fresh)
            stack.extend(fresh)
    return sorted(buffers), sorted(operations)


@dataclass
class _Builder:
    """The linear program; rows and columns belong to a stage each."""

    problem: Problem
    budget: int
    model: MipModel = field(default_factory=MipModel)
    row_stage: list[int] = field(default_factory=list)
    column_stage: list[int] = field(default_factory=list)
    held: list[dict[int, int]] = field(default_factory=list)
    again: list[dict[int, int]] = field(default_factory=list)
    here: list[dict[int, int]] = field(default_factory=list)

    def column(self, stage: int, cost: float = 0.0) -> int:
        self.column_stage.append(stage)
        return self.model.add_column(cost, integer=False)

    def at_least(self, stage: int, terms: dict[int, float], low: float) -> None:
        self.row_stage.append(stage)
        self.model.add_row(terms, lower=low)

    def add_columns(self, stage: int) -> None:
        p = self.problem
        buffers, operations = _useful(p, stage)
        self.held.append({t: self.column(stage) for t in buffers})
        possible = [o for o in operations if self.possible(stage, o)]
        self.here.append({o: self.column(stage, p.cost[o] * STEP) for o in possible})
        if stage == p.n:
            self.again.append(self.here[-1])
        else:
            self.again.append({o: self.column(stage) for o in operations})

    def possible(self, stage: int, o: int) -> bool:
        """Whether `o` fits into the memory beside what cannot be computed again."""
        p = self.problem
        there = {*p.reads[o], *p.writes[o]}
        there.update(
            t
            for t, w in enumerate(p.producer)
            if w < stage <= p.last_reader(t) and not p.repeatable[w]
        )
        gift = max((p.size[t] for t in p.takes[o]), default=0)
        return p.workspace[o] + sum(p.size[t] for t in there) - gift <= self.budget

    def supply(self, stage: int, t: int, source: dict[int, int]) -> dict[int, float]:
        """Terms of held[stage, t] + source[writer of t]."""
        terms = {self.held[stage][t]: 1.0}
        column = source.get(self.problem.producer[t])
        if column is not None:
            terms[column] = 1.0
        return terms

    def add_stage(self, stage: int) -> None:
        p = self.problem
        held, here, again = self.held[stage], self.here[stage], self.again[stage]
        last = stage == p.n
        for o, column in here.items():
            for t in p.reads[o]:
                terms = self.supply(stage, t, here)
                self.at_least(stage, {**terms, column: -1.0}, 0.0)
        for t in p.reads[stage]:
            self.at_least(stage, self.supply(stage, t, here), 1.0)
        if last:
            return
        for t in held:
            if p.last_reader(t) >= stage:
                self.at_least(stage, self.supply(stage, t, again), 1.0)
            if t in self.held[stage + 1]:
                terms = self.supply(stage, t, here)
                self.at_least(stage, {**terms, self.held[stage + 1][t]: -1.0}, 0.0)
        for o, column in again.items():
            for t in p.reads[o]:
                terms = self.supply(stage, t, again)
                self.at_least(stage, {**terms, column: -1.0}, 0.0)
            terms = {column: -1.0}
            if o in here:
                terms[here[o]] = 1.0
            later = self.again[stage + 1].get(o)
            if later is not None:
                terms[later] = 1.0
                self.at_least(stage, {column: 1.0, later: -1.0}, 0.0)
            self.at_least(stage, terms, 0.0)
        self.add_memory(stage)

    def add_memory(self, stage: int) -> None:
        """Bytes in memory while base operation `stage` is executed for the first time."""
        p = self.problem
        there = {*p.reads[stage], *p.writes[stage]}
        room = self.budget - p.workspace[stage] - sum(p.size[t] for t in there)
        scale = max(1, self.budget)
        terms = {c: p.size[t] / scale for t, c in self.held[stage + 1].items() if t not in there}
        takes = p.takes[stage]
        if any(p.last_reader(t) <= stage for t in takes):
            room += p.size[p.writes[stage][0]]
        elif takes:
            given = self.column(stage)
            terms[given] = -p.size[p.writes[stage][0]] / scale
            # Who gives is not held any more, and is computed again before it is read.
            rows: tuple[dict[int, float], dict[int, float]] = ({given: -1.0}, {given: -1.0})
            for t in takes:
                rows[0][self.held[stage + 1][t]] = -1.0
                column = self.again[stage + 1].get(p.producer[t])
                if column is not None:
                    rows[1][column] = 1.0
            self.at_least(stage, rows[0], -float(len(takes)))
            self.at_least(stage, rows[1], 0.0)
        self.row_stage.append(stage)
        self.model.add_row(terms, upper=room / scale)


def potentials(problem: Problem, budget: int, *, time_limit: float) -> Potentials | None:
    """The potentials of `problem` under `budget` bytes (without resident ones).

    None if the linear program is too large, has no solution, or takes longer than `time_limit`
    seconds.
    """
    builder = _Builder(problem, budget)
    for stage in range(problem.n + 1):
        builder.add_columns(stage)
        if len(builder.model.cost) > MAX_COLUMNS:
            return None
    for stage in range(problem.n + 1):
        builder.add_stage(stage)
    result = engine.solve_mip(builder.model, time_limit=time_limit, relax=True)
    return None if result.duals is None else _from_duals(builder, np.array(result.duals))


def _from_duals(builder: _Builder, duals: Floats) -> Potentials:
    """Potentials from any dual values: approximate ones give weaker bounds, never wrong ones."""
    model, problem = builder.model, builder.problem
    low, high = np.array(model.row_lower), np.array(model.row_upper)
    # A dual value of the wrong sign would ask for a side of the row that is infinite.
    duals = np.where(np.isinf(np.where(duals > 0, low, high)), 0.0, duals)
    side = np.where(duals > 0, low, high)
    share = np.where(duals == 0, 0.0, duals * np.where(duals == 0, 0.0, side))
    row_stage, column_stage = np.array(builder.row_stage), np.array(builder.column_stage)
    row, column = np.array(model.row), np.array(model.column)
    price = duals[row] * np.array(model.value)
    columns = len(column_stage)
    # A stage's rows speak of its own columns and of the next stage's.
    by_previous = row_stage[row] < column_stage[column]
    reduced = np.array(model.cost) - np.bincount(column, price, columns)
    inherited = np.bincount(column[by_previous], price[by_previous], columns) / STEP
    stages = problem.n + 1
    paid = np.bincount(row_stage, share, stages)
    paid += np.bincount(column_stage, np.minimum(0.0, reduced), stages)
    constant = np.append(0.0, np.cumsum(paid)[:-1]) / STEP - SAFETY
    wanted = np.zeros((stages, len(problem.size)))
    again = np.zeros((stages, problem.n))
    for stage in range(stages):
        for t, c in builder.held[stage].items():
            wanted[stage, t] = -inherited[c]
        for o, c in builder.again[stage].items():
            again[stage, o] = inherited[c]
    repeated = np.full((stages, problem.n), np.inf)
    for stage in range(stages):
        for o in builder.here[stage]:
            repeated[stage, o] = problem.cost[o]
    return Potentials(constant, wanted, again, repeated)
