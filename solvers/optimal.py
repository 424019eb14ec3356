"""The strategy `optimal`: lazy stage cuts for the bound, annealing for the schedule.

Each round solves the relaxation of `stage_cuts` for the current cuts, whose value bounds
every schedule in base order; meanwhile this process anneals the incumbent. The relaxed
solution is decoded into a sequence and simulated; where it exceeds the budget, new cuts make
the next relaxation tighter, and annealing repairs the sequence. The first rounds do without
integrality, to find where to cut. It ends when incumbent and bound meet within the tolerance,
when a relaxation is infeasible (a proof), or at the time limit, then with the best schedule and
bound so far.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution, Status
from optckpt.simulate import simulate
from optckpt.solvers import engine
from optckpt.solvers.chain_schedule import chained
from optckpt.solvers.decode import decode
from optckpt.solvers.exact import Search, compile_search
from optckpt.solvers.floor import static_floor
from optckpt.solvers.incumbent import LARGE, WORTH
from optckpt.solvers.linear_rounds import linear_rounds
from optckpt.solvers.loss_cut import start_loss_cut
from optckpt.solvers.order import free_order
from optckpt.solvers.order_chain import order_chain_bound
from optckpt.solvers.potentials import potentials
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import Interrupted, SolveOptions
from optckpt.solvers.search_state import SearchState
from optckpt.solvers.stage_cuts import STEP, Choice, read_choice

logger = logging.getLogger("optckpt.solvers.optimal")

EXACT_OPERATIONS = 400
"""Graphs of at most so many operations are searched exactly beside the cuts."""
EXACT_FIRST = 120
"""Graphs of at most so many operations are given a long exact search before any cuts."""
EXACT_WORK = (8_000_000, 80_000_000)
"""States times operations of the exact search in the first turn, and in each later one."""
FINE = 2e-3
"""Who asks for a gap up to this (of the step) wants a good schedule, not just any."""
REFINEMENTS, REFINE_NODES, REFINE_COLUMNS = 6, 300, (4000, 4000, 1500)
"""Rounds after the gap is closed; nodes of the search tree in each; open columns at most in the
first, the second, and each further one."""
CHAIN_LIKE = 0.75
"""Share of the incumbent's cost above which the bound for chains knows most of a problem."""
LARGE_RELAXATION = 2000
"""Open columns from which SCIP proves more than HiGHS; see `engine`."""
LAST_SHARE = 0.1
"""Share of the time left that a relaxation leaves for what its solution leads to."""
REFINE_EFFORT = 80_000
"""Moves of the annealings in each of these rounds."""
LAST_TRIES = 6
"""Annealings from an incumbent that no cut can help to judge."""


def optimal(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule that fits `budget` bytes, with a proof of how near.

    In base order, or with `options.order` "free" in any order (see `order.free_order`).
    Returns status "optimal" (cost - bound <= options.gap), "infeasible" (proven), "feasible"
    (time limit, gap open) or "stopped" (time limit, no schedule yet). Re-executions may stand
    anywhere behind the first execution of their operation, as often as they pay.

    Raises:
        KeyboardInterrupt: if interrupted before a fitting schedule was found.
        Interrupted: if interrupted afterwards, with the best schedule so far.
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
    if options.order == "free":
        return free_order(graph, budget, options, in_base_order)
    solution, interrupted = in_base_order(graph, budget, options)
    if interrupted:
        raise Interrupted(solution)
    return solution


def in_base_order(
    graph: TrainingGraph, budget: int, options: SolveOptions
) -> tuple[Solution, bool]:
    """`optimal` in base order, and whether an interrupt ended the search.

    Raises:
        KeyboardInterrupt: if interrupted before a fitting schedule was found.
    """
    started = time.monotonic()
    if static_floor(graph).bytes > budget:
        seconds = time.monotonic() - started
        return Solution(None, Certificate("optimal", "infeasible", None, 0.0, seconds)), False
    engine.warm_up()
    search = _Search(graph, preprocess(graph), budget - graph.resident, options, started)
    try:
        status = search.run()
        if status == "optimal":
            search.refine()
            search.bound_any_order()
        search.incumbent.polish(search.bound)
        return search.solution(status), False
    except KeyboardInterrupt:
        if not search.incumbent.found:
            raise
        search.refining = False
        return search.solution(search.out_of_time()), True


@dataclass
class _Search(SearchState):
    """One call."""

    any_order: float = 0.0
    """A bound that holds for any order of the base operations."""
    bound_by_chain: float = 0.0
    """What the operations of one path alone cost."""
    rounds: int = 0
    exact: Search | None = None
    exact_led: bool = False
    """Whether potentials for the exact search have been asked for."""

    def run(self) -> Status:
        self.incumbent.compile()
        if self.problem.n <= EXACT_OPERATIONS:
            self.incumbent.compiling += compile_search()
        if self.options.start is not None:
            self.incumbent.offer_schedule(self.options.start)
        if self.problem.n > LARGE:
            # The rules are the quickest; by then even the loss cut takes a second.
            self.incumbent.offer_heuristics()
            if self.incumbent.remaining() <= 0:
                return self.out_of_time()
        if not self.first_bound():
            return "infeasible"
        status = self.search_exactly(EXACT_WORK[0])
        if status is None and self.problem.n <= EXACT_FIRST:
            status = self.search_exactly(EXACT_WORK[1])
        if status is not None:
            return status
        sequence = linear_rounds(self)
        solve_first = bool(self.cuts)
        while True:
            if self.closed():
                return "optimal"
            if self.bound == float("inf"):
                return "infeasible"
            if not solve_first and not self.add_cuts(sequence):
                return self.exhausted()
            solve_first = False
            status = self.search_exactly(EXACT_WORK[1])
            if status is not None:
                return status
            if self.incumbent.remaining() <= 0:
                break
            choice = self.solve_round()
            if choice is None:
                if self.bound == float("inf"):
                    return "infeasible"
                return "optimal" if self.closed() else self.out_of_time()
            sequence = decode(self.problem, choice)
            self.incumbent.offer(sequence)
            for hot in (1.0, 0.3):
                if not self.closed():
                    self.incumbent.improve(sequence, self.effort, hot)
        return self.out_of_time()

    def refine(self) -> None:
        """Look for what a schedule within the tolerance may still cost too much.

        The bound closes in on whatever schedule there is, which is seldom the best within the
        tolerance. A few more rounds with a smaller one, limited by work and not by the clock, find
        it as a rule.
        """
        if not WORTH < self.options.gap <= FINE or not self.incumbent.found:
            return
        self.refining = True
        if not self.cuts and not self.closed():
            linear_rounds(self)
        for k in range(REFINEMENTS):
            if self.closed() or not self.cuts or self.incumbent.remaining() <= 0:
                break
            most = REFINE_COLUMNS[min(k, len(REFINE_COLUMNS) - 1)]
            choice = self.solve_round(REFINE_NODES, most)
            if choice is None:
                break
            sequence = decode(self.problem, choice)
            self.incumbent.offer(sequence)
            # Next to the optimum: what a few steps exceed the budget by has to go first of all.
            for price in (10.0, 1000.0):
                self.incumbent.improve(sequence, REFINE_EFFORT, 0.3, price)
            if not self.add_cuts(sequence) or self.moments:
                # Moment rows make relaxations too large for an afterthought.
                break
        self.refining = False

    def out_of_time(self) -> Status:
        self.incumbent.take_spare()
        if self.closed():
            return "optimal"
        return "feasible" if self.incumbent.found else "stopped"

    def first_bound(self) -> bool:
        """First schedules and the bound for chains, and the loss cut meanwhile.

        Returns False if one of the bounds proves that no schedule fits.
        """
        run = start_loss_cut(
            self.graph,
            self.budget + self.graph.resident,
            time_limit=max(0.1, self.incumbent.remaining() / 4),
            gap=self.tolerance / 4,
        )
        try:
            self.incumbent.first_schedules()
            if not self.closed():
                chain = chained(self.problem, self.budget, lambda: self.incumbent.remaining() > 0)
                if chain is not None:
                    if chain.sequence is None:
                        return False
                    self.bound_by_chain = chain.bound
                    self.raise_bound(chain.bound)
                    self.incumbent.offer(chain.sequence)
                    if not self.closed() and chain.bound > CHAIN_LIKE * self.incumbent.cost:
                        self.incumbent.improve(chain.sequence, self.effort, hot=0.3)
            if run is None or self.closed():
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

    def bound_any_order(self) -> None:
        """Find out whether the bound for chains, if it settled the matter, holds in any order."""
        if self.bound_by_chain > self.any_order and not self.is_best(self.any_order):
            bound = order_chain_bound(
                self.graph,
                self.budget + self.graph.resident,
                lambda: self.incumbent.remaining() > 0,
            )
            self.any_order = max(self.any_order, min(bound or 0.0, self.incumbent.cost))

    def exhausted(self) -> Status:
        """What to do when every cut is made and the relaxed solution still does not fit.

        What is left is the memory of several re-executions between two base operations, which
        the relaxation does not see, but the exact search does. Where that is too much for it,
        only the schedule can still improve.
        """
        status = self.search_exactly()
        if status is not None:
            return status
        k = 0
        while self.incumbent.remaining() > 0 and (not self.incumbent.found or k < LAST_TRIES):
            warm = self.incumbent.best if k % 2 else None
            self.incumbent.improve(warm or self.incumbent.base, 100_000, hot=3.0)
            k += 1
        return self.out_of_time()

    def search_exactly(self, work: int | None = None) -> Status | None:
        """Go on with the exact search, for so many states times operations; None if that is open.

        Its share is counted, not timed, so that what it finds does not depend on the machine.
        """
        if self.problem.n > EXACT_OPERATIONS or self.closed():
            return None
        if self.exact is None:
            self.exact = Search(self.problem, self.budget)
        elif not self.exact_led:
            # Small graphs are done before the linear program for these would be.
            self.exact_led = True
            led = potentials(
                self.problem, self.budget, time_limit=max(0.1, self.incumbent.remaining() / 4)
            )
            if led is not None:
                self.exact = Search(self.problem, self.budget, potentials=led)
        self.exact.cutoff = self.incumbent.cost - self.tolerance / 2
        outcome = self.exact.run(
            lambda: self.incumbent.remaining() <= 0,
            None if work is None else work // self.problem.n,
        )
        if outcome.finished and outcome.bound == float("inf"):
            return "infeasible"
        if outcome.sequence is not None:
            self.incumbent.offer(outcome.sequence)
        self.raise_bound(outcome.bound)
        return "optimal" if self.closed() else None

    def solve_round(self, nodes: int | None = None, columns: int | None = None) -> Choice | None:
        """Solve the relaxation for the current cuts, annealing meanwhile.

        Raises the bound. Goes through at most `nodes` nodes of the search tree. Returns None if
        there is no solution: the relaxation is infeasible, or dearer than the incumbent, or the
        time is over; and at once if more than `columns` columns are open.
        """
        strengthened = self.strengthening.build(self.cuts, self.moments, self.cutoff())
        if columns is not None and strengthened.open > columns:
            return None
        self.rounds += 1
        relaxation, cutoff = strengthened.relaxation, strengthened.cutoff
        # Larger relaxations take longer, which leaves this process more time.
        self.effort = 20_000 * min(self.rounds, 4) + 20 * len(relaxation.model.cost)
        alone = self.options.threads == 1
        if alone:
            self.anneal_round()
        run = engine.Solve(
            relaxation.model,
            time_limit=max(0.1, (1 - LAST_SHARE) * self.incumbent.remaining()),
            gap=self.tolerance / 4 * STEP,
            seed=self.options.seed,
            nodes=nodes,
            engine="scip" if strengthened.open > LARGE_RELAXATION else "highs",
        )
        try:
            if not alone:
                self.anneal_round()
                self.incumbent.improve_while(lambda: not run.ready(), seed=self.rounds)
            result = run.result()
        finally:
            run.cancel()
        logger.debug(
            "round %d: %d cuts, %d of %d columns, %s, bound %.5f, incumbent %.5f, %.1f s",
            self.rounds, len(self.cuts), strengthened.open, len(relaxation.model.cost),
            result.status, result.bound / STEP, self.incumbent.cost, self.incumbent.elapsed(),
        )  # fmt: skip
        if result.status == "infeasible":
            self.raise_bound(cutoff)
            return None
        self.raise_bound(min(result.bound / STEP, cutoff))
        return None if result.values is None else read_choice(relaxation, result.values)

    def anneal_round(self) -> None:
        self.incumbent.improve(self.incumbent.base, self.effort, hot=3.0)
        if self.incumbent.best is not None:
            self.incumbent.improve(self.incumbent.best, self.effort, hot=1.0)

    def solution(self, status: Status) -> Solution:
        seconds, first = self.incumbent.elapsed(), self.incumbent.seconds_first
        schedule = self.incumbent.schedule()
        if schedule is None:
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
                seconds if first is None else first,
                "any order" if proven else "base order",
            ),
        )
