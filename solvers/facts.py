"""What holds for every schedule that is cheaper than the best one known.

Linear relaxations prove such facts by their reduced costs: with dual values y, the Lagrangian
L(y) = y.b + the sum over columns of the least of (c - A'y)_j x_j bounds every solution, and those
in which x_j takes its dearer value by |(c - A'y)_j| more. If that exceeds what is asked for, the
other value is a fact. It holds for schedules, not for one relaxation alone: what is not executed
between two cuts is not executed between any two in between, and so on. So facts found with few
cuts make the relaxations with more cuts smaller.

A relaxation's solutions stand for schedules in which operations that `units.joined` names run
again together. Facts hold for these; a relaxation without joined operations must not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from optckpt.solvers.engine import INFINITY, MipModel
from optckpt.solvers.preprocess import Problem
from optckpt.solvers.stage_cuts import STEP, Relaxation

SAFETY = 1e-6
"""Share of the objective by which a fact's proof has to exceed what is asked for."""


@dataclass
class Facts:
    """Facts about the schedules with an overhead of at most `cutoff`."""

    problem: Problem
    cutoff: float = INFINITY
    keep: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(cut, buffer): whether it is in memory as the cut first executes."""
    later: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(cut, operation): whether it is executed again after the cut."""
    busy: set[tuple[int, int, int]] = field(default_factory=set)
    """(cut, cut or n + 1, operation): it is executed again in between."""
    idle: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Operation -> (cut, cut or n + 1) between which it is not executed again."""

    def learn(self, relaxation: Relaxation, duals: Sequence[float], cutoff: float) -> int:
        """Take in what `duals`, of the rows, prove about schedules of at most `cutoff`.

        `cutoff` must not rise from call to call. Returns the number of columns decided.
        """
        self.cutoff = min(self.cutoff, cutoff)
        decided = decide(relaxation.model, duals, self.cutoff * STEP)
        ends = (*relaxation.cuts[1:], self.problem.n + 1)
        for i, (cut, end) in enumerate(zip(relaxation.cuts, ends, strict=True)):
            for t, c in relaxation.keep[i].items():
                if c in decided:
                    self.keep[cut, t] = decided[c]
            for o, c in relaxation.comp[i].items():
                if c in decided:
                    if decided[c]:
                        self.busy.add((cut, end, o))
                    elif not self._idle(o, cut, end):
                        self.idle.setdefault(o, []).append((cut, end))
            for o, c in relaxation.again[i].items():
                if c in decided:
                    self.later[cut, o] = decided[c]
        return len(decided)

    def _idle(self, o: int, cut: int, end: int) -> bool:
        if self.later.get((cut, o)) is False:
            return True
        return any(a <= cut and end <= b for a, b in self.idle.get(o, ()))

    def apply(self, relaxation: Relaxation) -> int:
        """Put the facts into the relaxation's model; returns the number of columns left open."""
        model = relaxation.model
        ends = (*relaxation.cuts[1:], self.problem.n + 1)

        def fix(column: int, value: bool) -> None:
            if value:
                model.lower[column] = 1.0
            else:
                model.upper[column] = 0.0

        for i, (cut, end) in enumerate(zip(relaxation.cuts, ends, strict=True)):
            for t, c in relaxation.keep[i].items():
                if (cut, t) in self.keep:
                    fix(c, self.keep[cut, t])
            for o, c in relaxation.comp[i].items():
                if self._idle(o, cut, end):
                    fix(c, False)
            for o, c in relaxation.again[i].items():
                if (cut, o) in self.later:
                    fix(c, self.later[cut, o])
        stage = {cut: i for i, cut in enumerate(relaxation.cuts)}
        stage[self.problem.n + 1] = len(relaxation.cuts)
        for first, last, o in sorted(self.busy):
            if first in stage and last in stage:
                columns = [
                    comp[o] for comp in relaxation.comp[stage[first] : stage[last]] if o in comp
                ]
                if len(columns) == 1:
                    fix(columns[0], True)
                else:
                    model.add_row(dict.fromkeys(columns, 1.0), lower=1.0)
        for c, low in enumerate(model.lower):
            # Contradicting facts: no schedule is that cheap, and the model has to say so.
            if low > model.upper[c]:
                model.upper[c] = low
                model.add_row({c: 1.0}, upper=0.0)
        return sum(low < high for low, high in zip(model.lower, model.upper, strict=True))


def decide(model: MipModel, duals: Sequence[float], cutoff: float) -> dict[int, bool]:
    """Columns of [0, 1] that have one value in all solutions with an objective up to `cutoff`.

    Holds for 0/1 values, whatever `duals` are; the better these, the more columns.
    """
    y = np.asarray(duals)
    low, high = np.asarray(model.row_lower), np.asarray(model.row_upper)
    y = np.where((y > 0) & np.isinf(low) | (y < 0) & np.isinf(high), 0.0, y)
    limits = np.where(y > 0, np.where(np.isinf(low), 0.0, low), np.where(np.isinf(high), 0.0, high))
    reduced = np.asarray(model.cost) - np.bincount(
        np.asarray(model.column, np.int64),
        np.asarray(model.value) * y[np.asarray(model.row, np.int64)],
        len(model.cost),
    )
    lower, upper = np.asarray(model.lower), np.asarray(model.upper)
    value = y @ limits + np.minimum(reduced * lower, reduced * upper).sum()
    spare = cutoff - value + SAFETY * max(1.0, abs(value))
    open_ = (lower == 0) & (upper == 1)
    zero = {int(c): False for c in np.flatnonzero(open_ & (reduced > spare))}
    one = {int(c): True for c in np.flatnonzero(open_ & (-reduced > spare))}
    return zero | one
