"""The strategy `optimal`: lazy stage cuts for the bound, annealing for the schedule.

Each round solves the relaxation of `stage_cuts` for the current cuts, whose value bounds
every schedule in base order; meanwhile this process anneals the incumbent. The relaxed
solution is decoded into a sequence and simulated; where it exceeds the budget, new cuts make
the next relaxation tighter, and annealing repairs the sequence. It ends when incumbent and
bound meet within the tolerance, when a relaxation is infeasible (a proof), or at the time
limit, then with the best schedule and bound so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution, Status
from optckpt.simulate import simulate
from optckpt.solvers import engine
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.decode import decode
from optckpt.solvers.floor import static_floor
from optckpt.solvers.local_search import Arrays, anneal, to_arrays
from optckpt.solvers.loss_cut import start_loss_cut
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.registry import Progress, SolveOptions
from optckpt.solvers.sequence import cost, originals, profile
from optckpt.solvers.stage_cuts import STEP, Choice, build, read_choice

logger = logging.getLogger("optckpt.solvers.optimal")

NEW_CUTS = 3
"""Cuts added per round; more make the relaxation grow faster than its bound."""
FIRST_TRY = 4000
"""Moves of the annealing that looks for a first schedule."""
EXHAUSTIVE = 12
"""Graphs with at most so many buffers are searched exhaustively if the cuts do not settle them."""
LAST_TRIES = 6
"""Annealings from an incumbent that no cut can help to judge."""
TOLERANCE = 1e-6
"""A gap this small (fraction of the step) is the solvers' own tolerance, not a gap."""


def optimal(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule in base order that fits `budget` bytes, with a proof of how near.

    Returns status "optimal" (cost - bound <= options.gap), "infeasible" (proven), "feasible"
    (time limit, gap open) or "stopped" (time limit, no schedule yet). Re-executions may stand
    anywhere behind the first execution of their operation, as often as they pay.

    Raises:
        KeyboardInterrupt: if interrupted before a fitting schedule was found; afterwards an
            interrupt ends the search with the best schedule so far.
        OptckptError: if OR-Tools cannot be run.
    """
    started = time.monotonic()
    plain = simulate(graph, Schedule.base(graph))
    if budget is None or plain.peak <= budget:
        seconds = time.monotonic() - started
        return Solution(
            Schedule.base(graph),
            Certificate("optimal", "optimal", 0.0, 0.0, seconds, seconds, "any order"),
        )
    if static_floor(graph).bytes > budget:
        seconds = time.monotonic() - started
        return Solution(None, Certificate("optimal", "infeasible", None, 0.0, seconds))
    engine.warm_up()
    search = _Search(graph, preprocess(graph), budget - graph.resident, options, started)
    try:
        status = search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        status = "feasible"
    return search.solution(status)


@dataclass
class _Search:
    """The state of one call: incumbent, bound, cuts."""

    graph: TrainingGraph
    problem: Problem
    budget: int
    """Bytes without resident data."""
    options: SolveOptions
    started: float
    best: list[int] | None = None
    best_cost: float = float("inf")
    bound: float = 0.0
    any_order: float = 0.0
    """A bound that holds for any order of the base operations."""
    exact: Schedule | None = None
    """Found by exhaustive search; takes the place of `best`."""
    seconds_first: float | None = None
    cuts: set[int] = field(default_factory=set)
    moments: set[tuple[int, int]] = field(default_factory=set)
    rounds: int = 0
    _arrays: Arrays | None = None

    @property
    def arrays(self) -> Arrays:
        if self._arrays is None:
            self._arrays = to_arrays(self.problem)
        return self._arrays

    @property
    def tolerance(self) -> float:
        return max(self.options.gap, TOLERANCE)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def remaining(self) -> float:
        return self.options.time_limit - self.elapsed()

    def closed(self) -> bool:
        return self.best is not None and self.best_cost - self.bound <= self.tolerance

    def report(self) -> None:
        if self.options.progress is not None:
            incumbent = None if self.best is None else self.best_cost
            self.options.progress(Progress(self.elapsed(), incumbent, self.bound))

    def offer(self, sequence: Sequence[int]) -> None:
        """Take `sequence` as incumbent if it fits and is cheaper."""
        price = cost(self.problem, sequence)
        if price < self.best_cost and max(profile(self.problem, sequence)) <= self.budget:
            if self.best is None:
                self.seconds_first = self.elapsed()
            self.best, self.best_cost = list(sequence), price
            self.report()

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            # A proof that nothing cheaper exists can overshoot by the solver's tolerance.
            self.bound = min(bound, self.best_cost)
            self.report()

    def improve(
        self, sequence: Sequence[int], iterations: int, seed: int, *, hot: float, cold: float
    ) -> None:
        """Anneal from `sequence` and offer what comes out."""
        found = anneal(
            self.arrays,
            sequence,
            self.budget,
            iterations=iterations,
            hot=hot,
            cold=cold,
            seed=self.options.seed * 7919 + seed,
            known=self.best_cost,
            stop=lambda: self.remaining() <= 0,
        )
        if found.best is not None:
            self.offer(found.best)

    def run(self) -> Status:
        base = list(range(self.problem.n))
        if not self.first_bound(base):
            return "infeasible"
        sequence = base
        while True:
            if self.closed():
                return "optimal"
            if not self.add_cuts(sequence):
                return self.exhausted()
            if self.remaining() <= 0:
                break
            choice = self.solve_round()
            if choice is None:
                if self.best is None and self.bound == float("inf"):
                    return "infeasible"
                if self.closed():
                    return "optimal"
                break
            sequence = decode(self.problem, choice)
            self.offer(sequence)
            if not self.closed():
                self.improve(sequence, 20_000, 3 * self.rounds, hot=0.3, cold=0.01)
        return "stopped" if self.best is None else "feasible"

    def first_bound(self, base: Sequence[int]) -> bool:
        """A first schedule by annealing `base`, and the loss cut meanwhile.

        Returns False if the loss cut proves that no schedule fits.
        """
        run = start_loss_cut(
            self.graph,
            self.budget + self.graph.resident,
            time_limit=max(0.1, self.remaining() / 4),
            gap=self.tolerance / 4,
        )
        try:
            self.improve(base, FIRST_TRY, 1, hot=1.0, cold=0.1)
            if run is None:
                return True
            result = run.result()
        finally:
            if run is not None:
                run.cancel()
        if result.status == "infeasible":
            return False
        self.any_order = max(0.0, result.bound / STEP)
        self.raise_bound(self.any_order)
        return True

    def exhausted(self) -> Status:
        """What to do when every cut is made and the relaxed solution still does not fit.

        What is left is the memory of several re-executions between two base operations, which
        the relaxation does not see. A tiny graph is searched exhaustively; otherwise only the
        schedule can still improve.
        """
        if len(self.problem.size) <= EXHAUSTIVE:
            found = cheapest(self.graph, self.budget + self.graph.resident)
            if found is None:
                return "infeasible"
            self.exact = found[1]
            self.best_cost = self.bound = simulate(self.graph, found[1]).overhead
            return "optimal"
        base = list(range(self.problem.n))
        for k in range(1_000_000):
            if self.remaining() <= 0 or (self.best is not None and k >= LAST_TRIES):
                break
            start = base if self.best is None or k % 2 else self.best
            self.improve(start, 100_000, 1000 + k, hot=3.0, cold=0.01)
        return "stopped" if self.best is None else "feasible"

    def solve_round(self) -> Choice | None:
        """Solve the relaxation for the current cuts, annealing meanwhile.

        Raises the bound. Returns None if there is no solution: the relaxation is infeasible,
        or dearer than the incumbent, or the time is over.
        """
        self.rounds += 1
        cutoff = self.best_cost - self.tolerance / 2
        relaxation = build(
            self.problem, self.cuts, self.budget, moments=self.moments, cutoff=cutoff
        )
        run = engine.Solve(
            relaxation.model,
            time_limit=max(0.1, self.remaining()),
            gap=self.tolerance / 4 * STEP,
            seed=self.options.seed,
        )
        try:
            start = self.best if self.best is not None else list(range(self.problem.n))
            iterations = 20_000 + 10 * len(relaxation.model.cost)
            self.improve(start, iterations, 3 * self.rounds + 1, hot=1.0, cold=0.01)
            result = run.result()
        finally:
            run.cancel()
        logger.debug(
            "round %d: %d cuts, %d columns, %s, bound %.5f, incumbent %.5f, %.1f s",
            self.rounds, len(self.cuts), len(relaxation.model.cost), result.status,
            result.bound / STEP, self.best_cost, self.elapsed(),
        )  # fmt: skip
        if result.status == "infeasible":
            self.raise_bound(cutoff)
            return None
        self.raise_bound(min(result.bound / STEP, cutoff))
        return None if result.values is None else read_choice(relaxation, result.values)

    def add_cuts(self, sequence: Sequence[int]) -> bool:
        """Cut where `sequence` exceeds the budget most; False if there is nothing to add."""
        use = profile(self.problem, sequence)
        original = originals(self.problem, sequence)
        excess = sorted(
            (s for s, bytes_ in enumerate(use) if bytes_ > self.budget),
            key=lambda s: (-use[s], s),
        )
        before = -1
        previous = []
        for o, is_original in zip(sequence, original, strict=True):
            if is_original:
                before = o
            previous.append(before)
        added = 0
        for s in excess:
            if added == NEW_CUTS:
                break
            o = sequence[s]
            if original[s]:
                wanted = [o]
            else:
                wanted = [previous[s] + 1, previous[s]]
            for cut in wanted:
                if cut not in self.cuts:
                    self.cuts.add(cut)
                    added += 1
                    break
            else:
                if not original[s] and (previous[s], o) not in self.moments:
                    self.moments.add((previous[s], o))
                    added += 1
        if not added:
            original_use = sorted(
                (-b, o) for b, o, f in zip(use, sequence, original, strict=True) if f
            )
            fresh = [o for _, o in original_use if o not in self.cuts]
            self.cuts.update(fresh[:NEW_CUTS])
            added = len(fresh)
        return added > 0

    def solution(self, status: Status) -> Solution:
        seconds = self.elapsed()
        if self.exact is not None:
            schedule = self.exact
        elif self.best is not None:
            schedule = Schedule(self.problem.expand(self.best))
        else:
            bound = 0.0 if status == "infeasible" else self.bound
            return Solution(None, Certificate("optimal", status, None, bound, seconds))
        overhead = simulate(self.graph, schedule).overhead
        proven = status == "optimal" and overhead - self.any_order <= self.tolerance
        bound = self.any_order if proven else self.bound
        return Solution(
            schedule,
            Certificate(
                "optimal",
                status,
                overhead,
                max(0.0, min(bound, overhead)),
                seconds,
                self.seconds_first if self.seconds_first is not None else seconds,
                "any order" if proven else "base order",
            ),
        )
