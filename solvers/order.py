"""The order of operations as a decision: reordered graphs, and the search over orders.

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
from functools import cached_property

from optckpt.errors import GraphError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution, Status
from optckpt.simulate import simulate
from optckpt.solvers import engine
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.floor import any_order_floor, static_floor
from optckpt.solvers.local_search import anneal, to_arrays
from optckpt.solvers.loss_cut import STEP, start_loss_cut
from optckpt.solvers.order_cuts import start_order_cuts
from optckpt.solvers.order_search import (
    MIX,
    PEAK,
    OrderArrays,
    Weights,
    anneal_order,
    to_order_arrays,
)
from optckpt.solvers.order_sequence import Annealed, anneal_sequence
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.registry import Progress, SolveOptions
from optckpt.solvers.sequence import cost, profile

logger = logging.getLogger("optckpt.solvers.order")

ORDER_MOVES = 700
"""Shifts per operation in the annealing of an order."""
MOST_ORDER_MOVES = 2_000_000
HEATS = ((PEAK, 0.1), (PEAK, 0.001), (MIX, 0.001), (MIX, 0.0003))
"""What orders are annealed for, and from which temperature."""
FIRST_MOVES = 20_000
"""Moves per candidate of the annealing that ranks it."""
LEAST = 0.5
"""Seconds below which no order is solved any more."""
CUTS = 3
"""Cuts of the second bound; more take long and hardly raise it."""
STARTS = 2
"""Orders from which orders and re-executions are annealed together."""
POLISH_MOVES = 100_000
"""Moves per annealing of the final search."""
PATIENCE = 12
"""Annealings of the final search without improvement after which it ends."""
SHARE = 0.6
"""Share of the time left for solving one order as if it were given."""
HOT, COLD = 2e-3, 1e-5
"""First and last temperature of a search from scratch, fractions of the step."""
WARM = 1e-4
"""First temperature of a search from a good sequence."""
SHIFTS = 0.8
"""Share of moves that shift executions."""
HOPE = 0.75
"""What solving may make of the cost of a first rough schedule in the same order."""
RETRY_HEAT = 0.0003
"""Temperature from which other orders are annealed later on."""
RETRY_HOPE = 0.9
"""The same as HOPE for these, of which there may be many."""
TOLERANCE = 1e-6
"""A gap this small (fraction of the step) is the solvers' own tolerance, not a gap."""
ANY_ORDER = "any order"

InOrder = Callable[[TrainingGraph, int, SolveOptions], tuple[Solution, bool]]
"""Solves a graph in its base order; also says whether the user interrupted it."""


def reorder(graph: TrainingGraph, order: Sequence[int]) -> TrainingGraph:
    """`graph` with its operations in another base order; `order[k]` is the one at place k.

    Buffers keep their numbers. O(operations + edges).

    Raises:
        GraphError: if `order` is no permutation, or an operation comes before one that it needs.
    """
    n = len(graph.operations)
    if sorted(order) != list(range(n)):
        raise GraphError(f"the order is no permutation of the graph's {n} operations")
    place = [0] * n
    for k, o in enumerate(order):
        place[o] = k
    operations = []
    for o in order:
        op = graph.operations[o]
        operations.append(replace(op, after=tuple(sorted(place[a] for a in op.after))))
    return replace(graph, operations=tuple(operations))


def restore(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The schedule of the original graph that `schedule`, of the reordered one, stands for."""
    return Schedule(tuple(order[o] for o in schedule.executions))


def free_order(
    graph: TrainingGraph, budget: int, options: SolveOptions, in_order: InOrder
) -> Solution:
    """The cheapest schedule found, in any order, within `budget` bytes (resident included).

    The certificate's bound holds for any order; "optimal" means that it is met within
    `options.gap`, "infeasible" that it is proven that no order helps. `in_order` solves the
    order in which a rough search came off cheapest, and the base order; neither if that search was
    far dearer there than what is known by then, or time is over. So the schedule may be dearer
    than what `in_order` alone would find for the base order.

    Raises:
        KeyboardInterrupt: if interrupted before a fitting schedule was found.
        OptckptError: if OR-Tools cannot be run.
    """
    search = _FreeOrder(graph, budget, options, in_order)
    if any_order_floor(graph).bytes > budget:
        return search.solution("infeasible")
    engine.warm_up()
    try:
        status = search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
        status = "feasible"
    finally:
        if search.bounding is not None:
            search.bounding.cancel()
    return search.solution(status)


@dataclass
class _FreeOrder:
    """The state of one call."""

    graph: TrainingGraph
    budget: int
    options: SolveOptions
    in_order: InOrder
    started: float = field(default_factory=time.monotonic)
    compiling: float = 0.0
    """Seconds spent on compiling, once after installation; not counted as search."""
    best: list[int] | None = None
    """Executions of the best schedule that fits."""
    cost: float = float("inf")
    """Its extra time as a fraction of the plain step."""
    bound: float = 0.0
    seconds_first: float | None = None
    tries: int = 0
    interrupted: bool = False
    bounding: engine.Solve | None = None
    """What is being solved for a bound meanwhile."""

    @cached_property
    def problem(self) -> Problem:
        # Unmerged, so that its operations are the graph's.
        return preprocess(self.graph, merge=False)

    @cached_property
    def arrays(self) -> OrderArrays:
        graph = self.graph
        parents = [
            sorted({graph.producer[b] for b in op.reads} | set(op.after)) for op in graph.operations
        ]
        return to_order_arrays(self.problem, parents)

    @property
    def room(self) -> int:
        return self.budget - self.graph.resident

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def remaining(self) -> float:
        return self.options.time_limit + self.compiling - self.elapsed()

    def over(self) -> bool:
        return self.remaining() <= 0

    def done(self) -> bool:
        return self.interrupted or self.closed() or self.over()

    def closed(self) -> bool:
        return self.cost - self.bound <= max(self.options.gap, TOLERANCE)

    def report(self) -> None:
        if self.options.progress is not None:
            found = None if self.best is None else self.cost
            self.options.progress(Progress(self.elapsed(), found, self.bound))

    def offer(self, sequence: list[int]) -> None:
        """Take `sequence` as the best if it fits and is cheaper."""
        price = cost(self.problem, sequence)
        if price < self.cost and max(profile(self.problem, sequence), default=0) <= self.room:
            if self.best is None:
                self.seconds_first = self.elapsed()
            self.best, self.cost = sequence, price
            self.report()

    def compile(self) -> None:
        before = time.monotonic()
        base = list(range(self.problem.n))
        anneal_order(self.arrays, base, self.room, weights=MIX, moves=1)
        self.anneal(base, 1, HOT)
        self.compiling = time.monotonic() - before
        if self.compiling > 1:
            logger.info("compiled the search over orders in %.1f s (once)", self.compiling)

    def anneal(
        self, sequence: list[int], moves: int, hot: float, shifts: float = SHIFTS
    ) -> Annealed:
        """Anneal orders and re-executions together and offer what comes out."""
        self.tries += 1
        found = anneal_sequence(
            self.arrays,
            drop_dead(self.problem, sequence),
            self.room,
            moves=moves,
            hot=hot,
            cold=min(COLD, hot),
            shifts=shifts,
            seed=self.options.seed * 7919 + self.tries,
            enough=self.bound,
            stop=self.over,
        )
        if found.best is not None:
            self.offer(found.best)
        return found

    def start_bound(self, start: Callable[..., engine.Solve | None], **more: int) -> None:
        self.bounding = start(
            self.graph,
            self.budget,
            time_limit=max(0.1, min(self.options.time_limit / 4, self.remaining())),
            gap=self.options.gap / 4,
            **more,
        )

    def raise_bound(self) -> bool:
        """Wait for the bound that is being solved for; False if it proves that nothing fits."""
        if self.bounding is None:
            return True
        result = self.bounding.result()
        self.bounding = None
        if result.status == "infeasible":
            return False
        self.bound = max(self.bound, min(result.bound / STEP, self.cost))
        self.report()
        return True

    def run(self) -> Status:
        self.start_bound(start_loss_cut)
        self.compile()
        if self.options.start is not None:
            self.offer(list(self.options.start.executions))
        base = list(range(self.problem.n))
        rough = [(self.roughly(base), 0, base)]
        orders = self.orders(base)
        if self.closed():
            return "optimal"
        for order in orders:
            if not self.done():
                rough.append((self.roughly(order), len(rough), order))
        if not self.raise_bound():
            return "infeasible"
        if not self.done():
            self.start_bound(start_order_cuts, most=CUTS)
        starts: list[tuple[float, int, list[int]]] = []
        for *_, order in sorted(rough)[:STARTS]:
            if not self.done():
                found = self.anneal(order, FIRST_MOVES, WARM)
                starts.append((found.cost, len(starts), found.best or found.last))
        # The most promising order first, then the base order if it may still be better.
        ranked = sorted(rough)[:1] + [r for r in rough[:1] if r is not min(rough)]
        for first, _, order in ranked:
            # No rough schedule says nothing about the order.
            if not self.done() and (first == float("inf") or first * HOPE <= self.cost):
                self.solve_in_order(order, SHARE)
        logger.debug("orders solved: %.5f, %.1f s", self.cost, self.elapsed())
        if not self.raise_bound():
            return "infeasible"
        self.polish([s for *_, s in sorted(starts)])
        if self.closed():
            return "optimal"
        return "stopped" if self.best is None else "feasible"

    def orders(self, base: list[int]) -> list[list[int]]:
        """Annealed orders; each is offered as it stands."""
        found = []
        for weights, hot in HEATS:
            if self.done():
                break
            found.append(self.annealed(base, weights, hot))
            self.offer(found[-1])
        return found

    def annealed(self, order: list[int], weights: Weights, hot: float) -> list[int]:
        self.tries += 1
        return anneal_order(
            self.arrays,
            order,
            self.room,
            weights=weights,
            moves=min(ORDER_MOVES * max(500, len(order)), MOST_ORDER_MOVES),
            hot=hot,
            cold=hot * 1e-3,
            seed=self.options.seed * 7919 + self.tries,
            stop=self.over,
        )[0]

    def roughly(self, order: list[int]) -> float:
        """The cost of a first schedule with base order `order`, which is offered."""
        graph = reorder(self.graph, order)
        if static_floor(graph).bytes > self.budget:
            return float("inf")
        problem = preprocess(graph)
        found = anneal(
            to_arrays(problem),
            range(problem.n),
            self.room,
            iterations=FIRST_MOVES,
            seed=self.options.seed,
            stop=self.over,
        )
        if found.best is not None:
            executions = problem.expand(found.best)
            self.offer(list(restore(Schedule(executions), order).executions))
        return found.cost

    def solve_in_order(self, order: list[int], share: float) -> None:
        """Solve the graph with base order `order` in a share of the time left."""
        before = self.remaining()
        if before < LEAST:
            return
        graph = reorder(self.graph, order)
        start = None
        if self.best is not None and list(dict.fromkeys(self.best)) == order:
            place = {o: k for k, o in enumerate(order)}
            start = Schedule(tuple(place[o] for o in self.best))
        solution, self.interrupted = self.in_order(
            graph,
            self.budget,
            replace(
                self.options,
                order="fixed",
                # Its bound proves nothing here; its schedule is what counts.
                gap=self.options.gap / 2,
                time_limit=share * before,
                start=start,
                progress=self.relay if self.options.progress is not None else None,
            ),
        )
        logger.debug("an order: %s, %.1f s", solution.certificate, before - self.remaining())
        if solution.schedule is not None:
            self.offer(list(restore(solution.schedule, order).executions))

    def relay(self, inner: Progress) -> None:
        """Report the progress of a solver that works on one order."""
        if self.options.progress is not None:
            known = [c for c in (inner.incumbent, self.cost) if c is not None]
            found = min(known)
            self.options.progress(
                Progress(self.elapsed(), None if found == float("inf") else found, self.bound)
            )

    def polish(self, starts: list[list[int]]) -> None:
        """Look for something better in turns, until nothing more comes of it: anneal from the
        best and from other starts, try other orders."""
        base = list(range(self.problem.n))
        idle = k = 0
        while not self.done() and idle < PATIENCE:
            before = self.cost
            if k % 4 == 0:
                sequence = self.best or (starts[0] if starts else base)
                self.anneal(sequence, POLISH_MOVES, WARM)
            elif k % 4 == 2 and starts:
                self.anneal(starts[k // 4 % len(starts)], POLISH_MOVES, HOT)
            else:
                order = self.annealed(base, MIX, RETRY_HEAT)
                if self.roughly(order) * RETRY_HOPE <= before and not self.done():
                    self.solve_in_order(order, SHARE)
            k += 1
            idle = 0 if self.cost < before or self.best is None else idle + 1

    def solution(self, status: Status) -> Solution:
        seconds = self.elapsed()
        if self.best is None:
            bound = 0.0 if status == "infeasible" else self.bound
            return Solution(
                None, Certificate("optimal", status, None, bound, seconds, None, ANY_ORDER)
            )
        schedule = Schedule(tuple(self.best))
        overhead = simulate(self.graph, schedule).overhead
        return Solution(
            schedule,
            Certificate(
                "optimal",
                status,
                overhead,
                min(self.bound, overhead),
                seconds,
                self.seconds_first,
                ANY_ORDER,
            ),
        )
