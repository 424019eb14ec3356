"""What is known beside the rows of `stage_cuts`, and is put into every further relaxation.

Path rows that some linear solution violated, and facts about all schedules cheaper than the best.
Both are about schedules, not about one choice of cuts, so they outlive it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from optckpt.solvers.engine import INFINITY
from optckpt.solvers.facts import Facts
from optckpt.solvers.path_rows import PathRow, add_path_rows, violated_paths
from optckpt.solvers.preprocess import Problem
from optckpt.solvers.stage_cuts import Relaxation, build
from optckpt.solvers.units import joined

VIOLATION = 0.02
"""Path rows that are violated by no more are left out."""
SLACK = 1e-6
"""A path row that a solution satisfies by more is dropped again."""


@dataclass
class Strengthened:
    """A relaxation with path rows and facts."""

    relaxation: Relaxation
    open: int
    """Columns that no fact decides."""
    cutoff: float
    """The relaxation says nothing about schedules dearer than this."""
    rows: list[tuple[PathRow, int]]
    """The path rows in it, with the index of each."""

    def slack_cuts(self, duals: Sequence[float]) -> set[int]:
        """The cuts whose memory does not bear on the value of the linear relaxation."""
        rows = zip(self.relaxation.cuts, self.relaxation.memory, strict=True)
        return {cut for cut, row in rows if not duals[row]}


@dataclass
class Strengthening:
    """Path rows and facts of one search under `budget` bytes (without resident data)."""

    problem: Problem
    budget: int
    paths: dict[PathRow, None] = field(default_factory=dict)

    @cached_property
    def facts(self) -> Facts:
        return Facts(self.problem)

    @cached_property
    def joins(self) -> bool:
        """Whether some operations are taken to run again together."""
        return bool(joined(self.problem))

    def build(
        self,
        cuts: Collection[int],
        moments: Iterable[tuple[int, int]] = (),
        cutoff: float = INFINITY,
    ) -> Strengthened:
        """The relaxation for `cuts`; the arguments are those of `stage_cuts.build`."""
        moments = list(moments)
        relaxation = build(self.problem, cuts, self.budget, moments=moments, cutoff=cutoff)
        rows = add_path_rows(relaxation, self.paths)
        if moments and self.joins:
            # Facts are about schedules that run joined operations together.
            return Strengthened(relaxation, len(relaxation.model.cost), cutoff, rows)
        return Strengthened(
            relaxation, self.facts.apply(relaxation), min(cutoff, self.facts.cutoff), rows
        )

    def separate(self, strengthened: Strengthened, values: Sequence[float]) -> int:
        """Take up path rows that `values` violate, drop loose ones; returns how many are new."""
        model = strengthened.relaxation.model
        activity = dict.fromkeys((index for _, index in strengthened.rows), 0.0)
        if activity:
            first = min(activity)
            for k in range(len(model.row) - 1, -1, -1):
                if model.row[k] < first:
                    break
                if model.row[k] in activity:
                    activity[model.row[k]] += model.value[k] * values[model.column[k]]
        for row, index in strengthened.rows:
            if activity[index] > model.row_lower[index] + SLACK:
                self.paths.pop(row, None)
        new = violated_paths(self.problem, strengthened.relaxation, values, VIOLATION)
        self.paths.update(dict.fromkeys(new))
        return len(new)
