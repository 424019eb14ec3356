"""The best schedule found so far, and where schedules come from: rules, blocks, annealing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import block_dp, chain_bound
from optckpt.solvers.chain_schedule import chained
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.heuristics import chen_greedy, griewank, speed, sqrt_n
from optckpt.solvers.knapsack import knapsack
from optckpt.solvers.local_search import Arrays, anneal, to_arrays
from optckpt.solvers.order_search import OrderArrays, to_order_arrays
from optckpt.solvers.order_sequence import Heat, anneal_sequence
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.registry import SolveOptions, Strategy
from optckpt.solvers.rotor import rotor
from optckpt.solvers.sequence import cost, profile

logger = logging.getLogger("optckpt.solvers.incumbent")

FIRST_TRIES = (3000, 10_000, 30_000)
"""Moves of the annealings that look for a first schedule."""
HEURISTIC_SECONDS = 0.3
"""Time for each heuristic that is tried for an incumbent, per thousand operations."""
BLOCKS_SHARE = 0.25
"""Share of the time left for the block program."""
KNAPSACK_SHARE = 0.15
"""Share of the time left for the strategy `knapsack`."""
POLISH = 20_000
"""Moves of the annealings that start from a schedule made by a rule."""
WORTH = 1e-4
"""A gap (fraction of the plain step) that is worth a last annealing."""
SHORT = 3.0
"""Seconds of a time limit below which the rules, the quickest, come first."""
LARGE = 3000
"""Operations beyond which everything takes its time."""
WORK = 60_000_000
"""Executions that one annealing goes through at most, moves times length: a second or two."""
LONG = 1500
"""Operations from which moves are weighed by what they change, and not by going through all."""
LOCAL_MOVES = 3
"""How many such moves take the place of one; they take half the time of one, or less."""
LOCAL_COOLING = 1e-2
"""Last temperature of these annealings, as a share of the first."""


@dataclass
class Incumbent:
    """The best schedule of one search; `found` says whether there is one."""

    graph: TrainingGraph
    problem: Problem
    budget: int
    """Bytes without resident data."""
    options: SolveOptions
    started: float
    """Of the search, on the monotonic clock."""
    report: Callable[[], None]
    """Called when there is a better schedule."""
    cost: float = float("inf")
    """Extra time as a fraction of the plain step."""
    best: list[int] | None = None
    """The cheapest sequence of the problem's operations."""
    exact: Schedule | None = None
    """A cheaper schedule of the graph's operations that is no sequence of the problem's."""
    seconds_first: float | None = None
    compiling: float = 0.0
    """Seconds spent on compiling, once after installation; not counted as search."""
    tries: int = 0
    ruled: bool = False
    """Whether the rules have been asked."""
    spare: list[int] | None = None
    """A cheaper sequence found in spare time; see `improve_while`."""
    spare_cost: float = float("inf")

    @cached_property
    def arrays(self) -> Arrays:
        return to_arrays(self.problem)

    @cached_property
    def local_arrays(self) -> OrderArrays:
        p = self.problem
        parents = [sorted({p.producer[t] for t in p.reads[o]}) for o in range(p.n)]
        return to_order_arrays(p, parents)

    @property
    def long(self) -> bool:
        """Whether a pass over the sequence takes too long to make one for every move."""
        return self.problem.n >= LONG

    @cached_property
    def base(self) -> list[int]:
        """The plain step."""
        return list(range(self.problem.n))

    @property
    def found(self) -> bool:
        return self.best is not None or self.exact is not None

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def remaining(self) -> float:
        return self.options.time_limit + self.compiling - self.elapsed()

    def schedule(self) -> Schedule | None:
        if self.exact is not None:
            return self.exact
        return None if self.best is None else Schedule(self.problem.expand(self.best))

    def compile(self) -> None:
        """Have the compiled code ready."""
        before = time.monotonic()
        prepare(self.arrays, self.base, self.budget)
        if self.long:
            self._anneal(self.base, 1, 1.0, 10.0, 0, self.cost, lambda: False)
        self.compiling = time.monotonic() - before
        if self.compiling > 1:
            logger.info("compiled the local search in %.1f s (once)", self.compiling)

    def offer(self, sequence: Sequence[int]) -> bool:
        """Take `sequence` if it fits and is cheaper."""
        price = cost(self.problem, sequence)
        if price >= self.cost or max(profile(self.problem, sequence)) > self.budget:
            return False
        self._take(price)
        self.best, self.exact = list(sequence), None
        self.report()
        return True

    def offer_schedule(self, schedule: Schedule) -> None:
        """Take a schedule of the graph's operations if it fits and is cheaper."""
        firsts = {members[0]: unit for unit, members in enumerate(self.problem.members)}
        sequence = [firsts[o] for o in schedule.executions if o in firsts]
        self.offer(sequence)
        if self.problem.expand(sequence) == schedule.executions:
            return
        result = simulate(self.graph, schedule)
        if result.peak <= self.budget + self.graph.resident:
            self.offer_exact(schedule, result.overhead)

    def offer_exact(self, schedule: Schedule, price: float) -> None:
        """Take `schedule`, which fits and is none of the problem's sequences, if cheaper."""
        if price < self.cost:
            self._take(price)
            self.exact = schedule
            self.report()

    def _take(self, price: float) -> None:
        if not self.found:
            self.seconds_first = self.elapsed()
        self.cost = price

    def first_schedules(self) -> None:
        """A first schedule, from whatever finds one, and the best that fixed rules know."""
        if self.options.time_limit < SHORT:
            self.offer_heuristics()
        if self.problem.n <= LARGE:
            self.improve(self.base, FIRST_TRIES[0], hot=3.0)
        self.offer_heuristics()
        if self.remaining() > 0 and self.cost > 0:
            self.offer_blocks()
        self.offer_knapsack(KNAPSACK_SHARE)
        for iterations in FIRST_TRIES[1:]:
            if not self.found:
                self.improve(self.base, iterations, hot=3.0)

    def offer_heuristics(self) -> None:
        """Offer the schedules of the literature's rules, once.

        They know low peaks on chains that annealing does not find.
        """
        if self.ruled or self.remaining() <= 0:
            return
        self.ruled = True
        seconds = HEURISTIC_SECONDS * max(1.0, len(self.graph.operations) / 1000)
        seconds = min(seconds, max(0.01, self.remaining() / 4))
        limited = replace(self.options, time_limit=seconds, progress=None)
        for strategy in (sqrt_n, griewank, rotor, chen_greedy, speed):
            self._offer_strategy(strategy, limited)

    def offer_knapsack(self, share: float) -> None:
        """Offer what `knapsack` finds in this share of the time, on thousands of operations.

        There it is better than annealing, but takes seconds.
        """
        if self.problem.n <= LARGE or self.remaining() <= 0 or self.cost <= 0:
            return
        seconds = max(0.01, share * self.remaining())
        self._offer_strategy(knapsack, replace(self.options, time_limit=seconds, progress=None))

    def _offer_strategy(self, strategy: Strategy, options: SolveOptions) -> None:
        with contextlib.suppress(OptckptError):
            solution = strategy(self.graph, self.budget + self.graph.resident, options)
            if solution.schedule is not None and solution.certificate.status == "feasible":
                self.offer_schedule(solution.schedule)

    def offer_blocks(self) -> None:
        """Offer what the block program finds, if the problem is a chain of blocks."""
        ops = self.graph.operations
        forward_end = next(
            (u for u, members in enumerate(self.problem.members) if not ops[members[0]].forward),
            None,
        )
        if forward_end is None:
            return
        # Where no two blocks are alike, it goes through each, which takes seconds.
        left = (1 - BLOCKS_SHARE) * self.remaining()
        program = block_dp.block_program(self.problem, forward_end, lambda: self.remaining() < left)
        if program is None or self.remaining() < left:
            return
        sequences = program.sequences(self.budget, lambda: self.remaining() < left)
        for sequence in sequences:
            self.offer(sequence)
        for sequence in sequences:
            before = self.cost
            for iterations in (POLISH, 5 * POLISH):
                if self.remaining() > 0:
                    self.improve(sequence, iterations, hot=0.3)
                # Where a short annealing helps, near the floor mostly, a long one helps much more.
                if self.cost >= before:
                    break

    def improve(
        self, sequence: Sequence[int], iterations: int, hot: float, price: float = 10.0
    ) -> None:
        """Anneal from `sequence` and offer what comes out; `price` is that of `anneal`."""
        self.tries += 1
        if self.remaining() <= 0:
            return
        best = self._anneal(
            sequence,
            # A small graph is soon searched through.
            min(iterations, 300 * self.problem.n, WORK // len(sequence)),
            hot,
            price,
            self.options.seed * 7919 + self.tries,
            self.cost,
            lambda: self.remaining() <= 0,
        )
        if best is not None:
            self.offer(best)

    def _anneal(
        self,
        sequence: Sequence[int],
        iterations: int,
        hot: float,
        price: float,
        seed: int,
        known: float,
        stop: Callable[[], bool],
    ) -> list[int] | None:
        """The cheapest sequence that annealing from `sequence` finds, if cheaper than `known`.

        The numbers are those of `anneal`, also where a quicker annealing takes its place.
        """
        if not self.long:
            return anneal(
                self.arrays, sequence, self.budget,
                iterations=iterations, hot=hot, price=price, seed=seed, known=known, stop=stop,
            ).best  # fmt: skip
        hot /= self.problem.n
        heat = Heat(hot, hot * LOCAL_COOLING, lean=0.0, shifts=0.0)
        return anneal_sequence(
            self.local_arrays, drop_dead(self.problem, sequence), self.budget, heat,
            moves=LOCAL_MOVES * iterations, price=price, seed=seed, known=known, stop=stop,
        ).best  # fmt: skip

    def polish(self, bound: float) -> None:
        """Anneal the best schedule once more if it is within the tolerance but may be dearer.

        A search ends as soon as the gap is small enough, often with what was found on the way.
        """
        for hot in (1.0, 0.3):
            if self.best is not None and self.cost - bound > WORTH and self.remaining() > 0:
                self.improve(self.best, 2 * POLISH, hot)

    def improve_while(self, busy: Callable[[], bool], seed: int) -> None:
        """Anneal as long as `busy` and there is time.

        How far that gets depends on the machine's speed, so what it finds is put aside, to be
        used only when the time limit ends the search: whatever ends before it is repeatable.
        """
        k = 0
        while busy() and self.remaining() > 0:
            k += 1
            known = min(self.cost, self.spare_cost)
            warm = self.spare or self.best
            fresh = warm is None or k % 2 > 0
            found = self._anneal(
                self.base if fresh or warm is None else warm,
                # The longer, the better; but time may be over at any moment.
                60_000 << min(k // 2, 4),
                3.0 if fresh else 0.5,
                10.0,
                self.options.seed * 7919 + 1_000_000 + 1000 * seed + k,
                known,
                lambda: not busy() or self.remaining() <= 0,
            )
            if found is not None:
                self.spare, self.spare_cost = found, cost(self.problem, found)

    def take_spare(self) -> None:
        """Offer what was put aside."""
        if self.spare is not None:
            self.offer(self.spare)


def prepare(arrays: Arrays, base: Sequence[int], budget: int) -> None:
    """Have the compiled code ready that an incumbent comes from; `base` is the plain step."""
    anneal(arrays, base, budget, iterations=1)
    block_dp.prepare()
    chain_bound.prepare()


def known_schedule(graph: TrainingGraph, budget: int, options: SolveOptions) -> Schedule | None:
    """The cheapest schedule in base order that rules, block program or chain know, without search.

    None if none of theirs fits `budget` bytes (resident included), or none is found in time.
    """
    problem, room = preprocess(graph), budget - graph.resident
    known = Incumbent(graph, problem, room, options, time.monotonic(), lambda: None)
    known.offer_heuristics()
    if known.remaining() > 0:
        known.offer_blocks()
    if known.remaining() > 0:
        chain = chained(problem, room, lambda: known.remaining() > 0)
        if chain is not None and chain.sequence is not None:
            known.offer(chain.sequence)
    known.offer_knapsack(1.0)
    return known.schedule()
