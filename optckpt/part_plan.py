"""The plan of a part: a schedule with which it fits, what it keeps for its backward pass included.

What crosses from the forward into the backward pass stays in memory until that has ended, longer
than a plan for one step has it. So the solver is given an aim below the budget, and what its
schedule really needs decides which aim comes next.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import cached_property

from optckpt.allocator import Reporter
from optckpt.budget import Budget, format_bytes
from optckpt.errors import BudgetError, InfeasibleBudgetError, OverBudgetError
from optckpt.graph import TrainingGraph
from optckpt.judge import plain_peak
from optckpt.planner import Repeat, check_fits, make_plan, sentence_of, widest
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import Floor, proven_floor
from optckpt.solvers.registry import SolveOptions, Strategy

logger = logging.getLogger("optckpt.part")

_ROUNDS = 8
"""Aims of one strategy at most."""
_LEAST_ROUNDS = 4
"""So many aims are tried whatever the clock says, unless a schedule that fits is known."""
_FIRST_SHARE, _SHARE, _LEAST_SHARE = 0.5, 0.4, 0.1
"""Of the time limit for the first aim; of what is left, and of the limit at least, for others."""
_FINE = 0.01
"""Aims closer than this share of the budget are not told apart."""
_REFINED = 3
"""Aims above one that led to a plan that fits."""
_CHEAP = 0.01
"""Extra time below which no cheaper schedule is looked for."""
_QUICK = ("griewank", "chen_greedy", "sqrt_n")
"""Rules that need no search. They keep few tensors in between, which may be what fits."""


@dataclass(frozen=True, kw_only=True)
class PartProblem:
    """A part that is to be planned; see `optckpt.planner.make_plan` for what is not said here."""

    name: str
    """Of the function, for messages."""
    graph: TrainingGraph
    backward: frozenset[int]
    """Operations of the backward pass."""
    plain_graph: TrainingGraph
    budget: Budget | None
    strategy: str | Strategy
    options: SolveOptions
    margin: float
    allocator: Reporter | None
    max_overhead: float | None
    repeat: Repeat

    def solve(self) -> Plan:
        """The cheapest plan found with which the part fits.

        Raises:
            InfeasibleBudgetError: if it is proven that there is none.
            OverBudgetError: if the best that was found does not fit.
            BudgetError: if none was found at all, and none was ruled out.
        """
        limit = None
        if self.budget is not None:
            limit = self.budget.resolve(plain_peak(self.plain_graph, self.allocator))
        logger.info(
            "planning %r: %d operations, %s, time limit %.0f s",
            self.name,
            len(self.graph.operations),
            "no budget" if limit is None else f"budget {format_bytes(limit)}",
            self.options.time_limit,
        )
        if limit is None:
            return _grown(*self.planned(None, self.strategy, self.options))
        return _Search(self, limit).run()

    def planned(
        self, aim: int | None, strategy: str | Strategy, options: SolveOptions
    ) -> tuple[Plan, int]:
        """A plan of the part as one step within `aim`, and what it keeps longer beside."""
        plan = make_plan(
            self.graph,
            None if aim is None else Budget(bytes=aim),
            strategy,
            options,
            margin=self.margin,
            allocator=self.allocator,
            plain_graph=self.plain_graph,
            max_overhead=self.max_overhead,
            repeat=self.repeat,
        )
        return plan, kept_longer(self.graph, plan.schedule, self.backward)


def _grown(plan: Plan, more: int) -> Plan:
    return replace(plan, live_peak=plan.live_peak + more, predicted_peak=plan.predicted_peak + more)


@dataclass
class _Search:
    """The search for a plan within `limit` bytes."""

    problem: PartProblem
    limit: int
    began: float = field(default_factory=time.perf_counter)
    first: Plan | None = None
    """What the strategy asked for gives for the limit itself, whose bound holds for the part."""
    met: bool = False
    """Whether that fits as one step."""
    best: Plan | None = None
    error: BudgetError | None = None
    """Why there is no plan for the limit itself."""

    def run(self) -> Plan:
        problem = self.problem
        fits = self.lower(problem.strategy, 1)
        if isinstance(self.error, InfeasibleBudgetError):
            raise self.infeasible()
        if problem.strategy == "optimal" and not fits:
            # At no cost, and then there is something that a search has to better.
            for name in _QUICK:
                self.lower(name, _ROUNDS)
        if not fits and self.error is None:
            self.lower(problem.strategy, _ROUNDS)
        if self.best is None:
            raise self.not_found()
        if self.best.live_peak > self.limit:
            raise self.over_budget(self.best)
        return check_fits(self.certified(self.best))

    def lower(self, strategy: str | Strategy, most: int) -> bool:
        """Try up to `most` aims, from the limit downwards. Returns whether the limit itself led to
        a plan that fits, below which there is nothing to look for."""
        problem, limit = self.problem, self.limit
        low = self.floor.bytes - 1
        high, aim = limit, limit
        fits: int | None = None
        refined = 0
        plan, met = self.first, self.met
        for k in range(most):
            if k or plan is None or strategy != problem.strategy:
                if k and not self.may_go_on(k):
                    break
                plan, met = self.try_aim(aim, strategy, first=not k)
            if plan is not None and plan.predicted_peak <= limit:
                if aim == limit or plan.overhead <= _CHEAP:
                    return aim == limit
                # Fewer bytes than the part needed: an aim in between may be cheaper.
                fits = aim
            elif plan is None or not met:
                if aim == limit:
                    break
                low = max(low, aim)
            else:
                high = aim
            below = low if fits is None else fits
            refined += fits is not None
            if high - below <= _FINE * limit or refined > _REFINED:
                break
            aim = (below + high) // 2
            if fits is None and plan is not None and met:
                # By what it is too much, but no lower than half-way to where there is nothing.
                lower = max(plan.predicted_peak - limit, int(_FINE * limit) << k)
                aim = max(aim, high - lower)
        return False

    def may_go_on(self, rounds: int) -> bool:
        fits = self.best is not None and self.best.predicted_peak <= self.limit
        if not fits and rounds < _LEAST_ROUNDS:
            return True
        return self.left() >= _LEAST_SHARE * self.problem.options.time_limit

    def left(self) -> float:
        return self.problem.options.time_limit - (time.perf_counter() - self.began)

    def try_aim(self, aim: int, strategy: str | Strategy, first: bool) -> tuple[Plan | None, bool]:
        """What the part needs by a plan for `aim` (None: there is none), and whether that meets
        the aim as a step."""
        problem = self.problem
        whole = problem.options.time_limit
        share = _FIRST_SHARE * whole if first else _SHARE * self.left()
        options = replace(problem.options, time_limit=max(share, _LEAST_SHARE * whole))
        asked = strategy == problem.strategy
        try:
            plan, more = problem.planned(aim, strategy, options)
        except BudgetError as e:
            if asked and aim == self.limit:
                self.error = e
            return None, False
        met = plan.live_peak <= aim
        plan = _grown(plan, more)
        if asked and aim == self.limit:
            self.first, self.met = plan, met
        logger.debug(
            "%r: %s for %s needs %s",
            problem.name,
            plan.strategy,
            format_bytes(aim),
            format_bytes(plan.predicted_peak),
        )
        if self.best is None or self.rank(plan) < self.rank(self.best):
            self.best = plan
        return plan, met

    def rank(self, plan: Plan) -> tuple[int, float]:
        return (max(0, plan.predicted_peak - self.limit), plan.overhead)

    def certified(self, plan: Plan) -> Plan:
        """`plan` with what is proven for the part: the bound for a lower aim is too high for it."""
        certificate, first = plan.certificate, self.first
        seconds = time.perf_counter() - self.began
        if first is None:
            certificate = replace(certificate, status="feasible", bound=0.0, seconds=seconds)
            return replace(plan, budget=self.limit, target=self.limit, certificate=certificate)
        if plan is not first:
            proof = first.certificate
            bound = min(proof.bound, plan.overhead)
            proven = plan.overhead - bound <= self.problem.options.gap
            certificate = replace(
                certificate,
                status="optimal" if proven and proof.status == "optimal" else "feasible",
                bound=bound,
                valid_for=proof.valid_for,
                repeats=proof.repeats,
            )
        certificate = replace(certificate, seconds=seconds)
        return replace(plan, budget=self.limit, target=first.target, certificate=certificate)

    # --- What is said if there is none. Another order is no way out: see `_Part`.

    def asked(self) -> str:
        return f"its budget of {format_bytes(self.limit)} ({self.limit} bytes)"

    @cached_property
    def floor(self) -> Floor:
        return proven_floor(widest(self.problem.graph, self.problem.repeat), "fixed")

    def low(self) -> str:
        return sentence_of(self.floor, self.problem.graph, self.problem.repeat)

    def infeasible(self) -> InfeasibleBudgetError:
        graph, repeat = self.problem.graph, self.problem.repeat
        advice = ["raise the budget", "reduce the batch size"]
        if self.limit <= 100:
            advice.insert(0, f'write "{self.limit}%" if a share of what the part needs is meant')
        if repeat == "forward" and proven_floor(graph, "fixed").bytes <= self.limit:
            advice.append("try solver.repeat: all")
        proof = "" if self.limit < self.floor.bytes else "proven by the solver; "
        return InfeasibleBudgetError(
            f"{self.problem.name!r}: no schedule fits {self.asked()}: {proof}{self.low()}; "
            f"{', '.join(advice[:-1])} or {advice[-1]}",
            floor=self.floor.bytes,
        )

    def not_found(self) -> BudgetError:
        return BudgetError(
            f"{self.problem.name!r}: no schedule within {self.asked()} was found in "
            f"{time.perf_counter() - self.began:.1f} s, and none was ruled out; {self.low()}; "
            "raise the budget or the time limit"
        )

    def over_budget(self, best: Plan) -> OverBudgetError:
        strategy = self.problem.strategy
        other = "reduce the batch size" if strategy == "optimal" else "use strategy 'optimal'"
        found = "was found" if strategy == "optimal" else f"was found by strategy {strategy!r}"
        return OverBudgetError(
            f"{self.problem.name!r}: no schedule within {self.asked()} {found}: with what is kept "
            f"until its backward pass has ended, the best needs {format_bytes(best.predicted_peak)}"
            f" ({best.predicted_peak} bytes); raise the budget to that or {other}",
            peak=best.predicted_peak,
        )


def kept_longer(graph: TrainingGraph, schedule: Schedule, backward: frozenset[int]) -> int:
    """Bytes by which the peak grows if what crosses into the backward pass stays until the end.

    `backward`: the operations of the backward pass. Copies that are made before the first of them
    runs, or a forward operation is executed again, cross if they are read later.
    """
    executions = schedule.executions
    counts: set[int] = set()
    cut = len(executions)
    for k, o in enumerate(executions):
        if o in backward or o in counts:
            cut = k
            break
        counts.add(o)
    last: dict[int, int] = {}
    copy: dict[int, int] = {}
    for k, o in enumerate(executions):
        for b in graph.operations[o].reads:
            if k >= cut and copy[b] < cut:
                last[b] = k
        for b in graph.operations[o].writes:
            copy[b] = k
    more = [0] * (len(executions) + 1)
    for b, k in last.items():
        if b in graph.outputs:
            continue
        taken_over = b in graph.operations[executions[k]].inplace
        more[k if taken_over else k + 1] += graph.buffers[b].size
    simulated = simulate(graph, schedule)
    highest = held = 0
    for k, size in enumerate(simulated.profile):
        held += more[k]
        highest = max(highest, size + held)
    return highest - simulated.peak
