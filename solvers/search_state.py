"""What the parts of strategy `optimal` share: incumbent, bound, cuts, and when they are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from optckpt.graph import TrainingGraph
from optckpt.solvers.cut_choice import tighten
from optckpt.solvers.incumbent import WORTH, Incumbent
from optckpt.solvers.preprocess import Problem
from optckpt.solvers.registry import Progress, SolveOptions
from optckpt.solvers.strengthening import Strengthening

TOLERANCE = 1e-6
"""A gap this small (fraction of the step) is the solvers' own tolerance, not a gap."""


@dataclass
class SearchState:
    """The state of one call: incumbent, bound, cuts."""

    graph: TrainingGraph
    problem: Problem
    budget: int
    """Bytes without resident data."""
    options: SolveOptions
    started: float
    bound: float = 0.0
    cuts: set[int] = field(default_factory=set)
    moments: set[tuple[int, int]] = field(default_factory=set)
    cutting: int = 0
    """Rounds of new cuts so far."""
    effort: int = 10_000
    """Moves per annealing in this round."""
    refining: bool = False
    """Whether the tolerance is the small one."""

    @cached_property
    def incumbent(self) -> Incumbent:
        return Incumbent(
            self.graph, self.problem, self.budget, self.options, self.started, self.report
        )

    @property
    def tolerance(self) -> float:
        return max(WORTH if self.refining else self.options.gap, TOLERANCE)

    def closed(self) -> bool:
        return self.incumbent.found and self.is_best(self.bound)

    @cached_property
    def strengthening(self) -> Strengthening:
        return Strengthening(self.problem, self.budget)

    def report(self) -> None:
        if self.options.progress is not None:
            cost = self.incumbent.cost if self.incumbent.found else None
            self.options.progress(Progress(self.incumbent.elapsed(), cost, self.bound))

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            # A proof that nothing cheaper exists can overshoot by the solver's tolerance.
            self.bound = min(bound, self.incumbent.cost)
            self.report()

    def is_best(self, bound: float) -> bool:
        """Whether `bound` proves the incumbent to be the best within the tolerance."""
        return self.incumbent.cost - bound <= self.tolerance

    def cutoff(self) -> float:
        """Only schedules up to this overhead are of interest."""
        return self.incumbent.cost - self.tolerance / 4

    def add_cuts(self, sequence: Sequence[int]) -> bool:
        """Cut where `sequence` exceeds the budget most; False if there is nothing to add."""
        # Some bounds need the very peak's neighbours: taking turns was best on the whole.
        spread = self.cutting % 2 == 0
        self.cutting += 1
        more = tighten(self.problem, sequence, self.budget, self.cuts, self.moments, spread=spread)
        self.cuts.update(more.cuts)
        self.moments.update(more.moments)
        return bool(more.cuts or more.moments)
