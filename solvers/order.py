"""The order of operations as a decision: the search over orders.

The base order of a graph is one of many that its dependencies allow, and what must be in memory
at once depends on it: weight gradients computed early let activations go, gradients that stay
to the end had better come late. `free_order` tries a few annealed orders and the given one,
shortens each by annealing orders and re-executions together, has the most promising solved as if
its order were given, and goes on annealing from the best. Bounds and proofs are those that hold
in any order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution, Status
from optckpt.solvers import engine
from optckpt.solvers.floor import any_order_floor, static_floor
from optckpt.solvers.incumbent import WORTH, known_schedule, prepare
from optckpt.solvers.local_search import anneal, to_arrays
from optckpt.solvers.loss_cut import start_loss_cut
from optckpt.solvers.order_chain import order_chain_bound
from optckpt.solvers.order_cuts import start_order_cuts
from optckpt.solvers.order_search import (
    MIX,
    PEAK,
    Weights,
    anneal_order,
)
from optckpt.solvers.order_sequence import Heat
from optckpt.solvers.order_state import AT_ONCE, OrderState
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import Interrupted, Progress, SolveOptions

logger = logging.getLogger("optckpt.solvers.order")

ORDER_MOVES = 700
"""Shifts per operation in the annealing of an order."""
MOST_ORDER_MOVES = 1_000_000
ORDER_WORK = 2_000_000_000
"""Shifts times operations at most."""
HEATS = ((PEAK, 0.1), (MIX, 0.001), (PEAK, 0.001), (MIX, 0.0003))
"""What orders are annealed for, and from which temperature."""
FIRST_MOVES = 20_000
"""Moves per candidate of the annealing that ranks it."""
LEAST = 0.5
"""Seconds below which no order is solved any more."""
CUTS = 3
"""Cuts of the second bound; more take long and hardly raise it."""
STARTS = 2
"""Orders from which orders and re-executions are annealed together."""
START_MOVES = 100_000
"""Moves of these annealings."""
POLISH_MOVES = 300_000
"""Moves per annealing of the final search; twice as many after a round without improvement, ..."""
MOST_POLISH = 2_000
"""... but at most so many per operation."""
PATIENCE = 12
"""Rounds of the final search without improvement after which it ends."""
SCHEDULES_SHARE = 0.2
"""Share of the time for schedules that rules and dynamic programs know in base order, at most."""
SHARE = 0.5
"""Share of the time left for solving one order as if it were given."""
BASE_SHARE, LONG_BASE_SHARE = 0.5, 0.75
"""The same for the base order: where another one looks better, and where none does."""
BETTER = 0.9
"""What a better order's first rough schedule costs at most, as a share of the base order's."""
HOPE = 0.75
"""What solving may make of the cost of a first rough schedule in the same order."""
RETRY_HEAT = 0.0003
"""Temperature from which other orders are annealed later on."""
RETRY_HOPE = 0.9
"""The same as HOPE for these, of which there may be many."""

SCRATCH = Heat(1e-3, 1e-5, 0.0, 0.8, together=0.8)
"""From a sequence that may be changed entirely."""
WARM = Heat(1e-4, 1e-5, 0.0, 0.7)
"""From a good one, where orders hardly matter."""
LEAN = (Heat(3e-6, 1e-7, 0.01, 0.6), Heat(1e-5, 1e-8, 0.01, 0.7))
"""From a good one whose order must not get lost."""

InOrder = Callable[[TrainingGraph, int, SolveOptions], tuple[Solution, bool]]
"""Solves a graph in its base order; also says whether the user interrupted it."""


def free_order(
    graph: TrainingGraph, budget: int, options: SolveOptions, in_order: InOrder
) -> Solution:
    """The cheapest schedule found, in any order, within `budget` bytes (resident included).

    The certificate's bound holds for any order; "optimal" means that it is met within
    `options.gap`, "infeasible" that it is proven that no order helps. `in_order` solves the base
    order, as it would by itself, until its gap is closed, or its bound says that it cannot get
    below what is known, or its share of the time is over. In the first two cases the schedule is
    never dearer than the base order's; in the third, a longer search there might have found more.

    Raises:
        KeyboardInterrupt: if interrupted before a fitting schedule was found.
        Interrupted: if interrupted afterwards, with the best schedule so far.
        OptckptError: if OR-Tools cannot be run.
    """
    search = _FreeOrder(graph, budget, options, in_order=in_order)
    if any_order_floor(graph).bytes > budget:
        return search.solution("infeasible")
    engine.warm_up()
    try:
        status = search.run()
        if status == "optimal":
            search.compare_with_base()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        status, search.interrupted = "feasible", True
    finally:
        if search.bounding is not None:
            search.bounding.cancel()
    solution = search.solution(status)
    if search.interrupted and solution.schedule is not None:
        raise Interrupted(solution)
    return solution


class _HopelessError(Exception):
    """What is solved cannot become cheaper than what is known."""


@dataclass
class _FreeOrder(OrderState):
    """The search of one call."""

    in_order: InOrder = field(kw_only=True)

    def compile(self) -> None:
        before = time.monotonic()
        base = list(range(self.problem.n))
        anneal_order(self.arrays, base, self.room, weights=MIX, moves=1)
        self.anneal((base, 1, WARM))
        prepare(to_arrays(self.problem), base, self.room)
        self.compiling = time.monotonic() - before
        if self.compiling > 1:
            logger.info("compiled the search over orders in %.1f s (once)", self.compiling)

    def offer_base_schedules(self) -> None:
        """Offer what is quickly known in base order; on long chains annealing finds nothing."""
        if not self.over() and static_floor(self.graph).bytes <= self.budget:
            known = known_schedule(
                self.graph,
                self.budget,
                replace(self.options, time_limit=max(0.01, SCHEDULES_SHARE * self.remaining())),
            )
            if known is not None:
                self.offer(list(known.executions))

    def bound_chain(self) -> bool:
        """Raise the bound by that for chains; False if it proves that nothing fits."""
        bound = order_chain_bound(self.graph, self.budget, lambda: not self.over())
        if bound == float("inf"):
            return False
        self.bound = max(self.bound, min(bound or 0.0, self.cost))
        return True

    def run(self) -> Status:
        self.start_bound(start_loss_cut)
        self.compile()
        if not self.bound_chain():
            return "infeasible"
        if self.options.start is not None:
            self.offer(list(self.options.start.executions))
        base = list(range(self.problem.n))
        self.offer_base_schedules()
        if self.closed():
            return "optimal"
        rough = self.roughly([base])
        orders: list[list[int]] = []
        for k in range(0, len(HEATS), AT_ONCE):
            orders += self.annealed([(base, *heat) for heat in HEATS[k : k + AT_ONCE]])
            for order in orders[k:]:
                self.offer(order)
            if self.closed():
                return "optimal"
        rough += self.roughly(orders)
        if not self.raise_bound():
            return "infeasible"
        if not self.done():
            self.start_bound(start_order_cuts, most=CUTS)
        ranked = sorted(range(len(rough)), key=lambda k: rough[k][0])
        starts = [rough[k][1] for k in ranked[:STARTS]]
        if not self.done():
            begun = self.anneal(*((start, START_MOVES, LEAN[0]) for start in starts))
            starts = [found.best or start for found, start in zip(begun, starts, strict=True)]
        if not self.done():
            # An order in which nothing fits yet says nothing against the base order.
            better = rough[ranked[0]][0] < BETTER * rough[0][0] < float("inf")
            self.solve_in_order(base, BASE_SHARE if better else LONG_BASE_SHARE)
        k = ranked[0]
        first = rough[k][0]
        if k and not self.done() and (first == float("inf") or first * HOPE <= self.cost):
            self.solve_in_order(orders[k - 1], SHARE)
        logger.debug("orders solved: %.5f, %.1f s", self.cost, self.elapsed())
        if not self.raise_bound():
            return "infeasible"
        self.polish(starts)
        if self.closed():
            return "optimal"
        return "stopped" if self.best is None else "feasible"

    def annealed(self, starts: Sequence[tuple[list[int], Weights, float]]) -> list[list[int]]:
        """Orders annealed from others for given weights, from given temperatures."""
        n = max(1, self.problem.n)
        moves = min(ORDER_MOVES * max(500, n), MOST_ORDER_MOVES, ORDER_WORK // n)

        def call(order: list[int], weights: Weights, hot: float, seed: int) -> list[int]:
            return anneal_order(
                self.arrays,
                order,
                self.room,
                weights=weights,
                moves=moves,
                hot=hot,
                cold=hot * 1e-3,
                seed=seed,
                stop=lambda: self.interrupted or self.over(),
            )[0]

        return self.at_once([partial(call, *start, self.seed()) for start in starts])

    def roughly(self, orders: Sequence[list[int]]) -> list[tuple[float, list[int]]]:
        """A first schedule with each base order, which is offered, and its cost; infinity and
        the order itself where none was found."""

        def call(order: list[int]) -> tuple[float, list[int]]:
            if self.interrupted or self.over():
                return float("inf"), order
            graph = self.graph.in_order(order)
            if static_floor(graph).bytes > self.budget:
                return float("inf"), order
            problem = preprocess(graph)
            found = anneal(
                to_arrays(problem),
                range(problem.n),
                self.room,
                iterations=FIRST_MOVES,
                seed=self.options.seed,
                stop=lambda: self.interrupted or self.over(),
            )
            if found.best is None:
                return float("inf"), order
            executions = Schedule(problem.expand(found.best))
            return found.cost, list(executions.out_of(order).executions)

        results = self.at_once([partial(call, order) for order in orders])
        for _, sequence in results:
            self.offer(sequence)
        return results

    def solve_in_order(self, order: list[int], share: float) -> None:
        """Solve the graph with base order `order` in a share of the time left, or until it is
        proven that nothing cheaper than what is known has this order."""
        before = self.remaining()
        if before < LEAST:
            return
        self.solved.append(order)
        base = order == list(range(len(order)))
        graph = self.graph.in_order(order)
        start = None
        if self.best is not None and not base and list(dict.fromkeys(self.best)) == order:
            place = {o: k for k, o in enumerate(order)}
            start = Schedule(tuple(place[o] for o in self.best))
        options = replace(
            self.options,
            order="fixed",
            time_limit=share * before,
            # The base order is solved as it would be alone, and so no worse. Of other orders only
            # the schedule counts.
            gap=self.options.gap if base else self.options.gap / 2,
            start=self.options.start if base else start,
            progress=self.relay,
        )
        try:
            solution, self.interrupted = self.in_order(graph, self.budget, options)
        except _HopelessError:
            logger.debug("an order: beaten, %.1f s", before - self.remaining())
            return
        logger.debug("an order: %s, %.1f s", solution.certificate, before - self.remaining())
        if solution.schedule is not None:
            self.offer(list(solution.schedule.out_of(order).executions))

    def compare_with_base(self) -> None:
        """Solve the base order, too, if that may give something cheaper within the tolerance."""
        base = list(range(self.problem.n))
        if self.cost - self.bound > WORTH and base not in self.solved and not self.interrupted:
            self.solve_in_order(base, BASE_SHARE)

    def relay(self, inner: Progress) -> None:
        """Report the progress of a solver that works on one order; end it if it is hopeless."""
        if inner.bound >= self.cost and (inner.incumbent is None or inner.incumbent >= self.cost):
            raise _HopelessError
        if self.options.progress is not None:
            known = [c for c in (inner.incumbent, self.cost) if c is not None]
            found = min(known)
            self.options.progress(
                Progress(self.elapsed(), None if found == float("inf") else found, self.bound)
            )

    def polish(self, starts: Sequence[list[int]]) -> None:
        """Look for something better in rounds, until nothing more comes of it: anneal from the
        best and from other starts, try other orders."""
        base = list(range(self.problem.n))
        others = [*starts, base]
        idle = k = 0
        while not self.done() and idle < PATIENCE:
            before = self.cost
            moves = min(POLISH_MOVES << min(idle // 3, 3), MOST_POLISH * max(10, self.problem.n))
            best = self.best or others[k % len(others)]
            if k % 3 == 0:
                self.anneal(*((best, moves, heat) for heat in LEAN))
            elif k % 3 == 1:
                self.anneal((best, moves, WARM), (others[k // 3 % len(others)], moves, SCRATCH))
            else:
                self.try_orders(best)
            if self.best is not None and self.cost == before:
                k += 1
                idle += 1
            else:
                # What helps may help again.
                k += self.best is None
                idle = 0

    def try_orders(self, best: Sequence[int]) -> None:
        """Solve the order of `best`, if that is new, or other ones that look promising."""
        order = list(dict.fromkeys(best))
        if order not in self.solved:
            self.solve_in_order(order, SHARE)
            return
        base = list(range(self.problem.n))
        tried = self.annealed([(base, MIX, RETRY_HEAT), (order, PEAK, RETRY_HEAT)])
        rough = self.roughly(tried)
        k = 0 if rough[0][0] <= rough[1][0] else 1
        if rough[k][0] * RETRY_HOPE <= self.cost and not self.done():
            self.solve_in_order(tried[k], SHARE)
