"""What the search over orders (`order`) knows: its best schedule, its bound, its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution, Status
from optckpt.simulate import simulate
from optckpt.solvers import engine
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.loss_cut import STEP
from optckpt.solvers.order_search import OrderArrays, to_order_arrays
from optckpt.solvers.order_sequence import Annealed, Heat, anneal_sequence
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.registry import Progress, SolveOptions
from optckpt.solvers.sequence import cost, profile

AT_ONCE = 2
"""Annealings that run at the same time; whatever the machine, so that results do not depend on
it."""
TOLERANCE = 1e-6
"""A gap this small (fraction of the step) is the solvers' own tolerance, not a gap."""
ANY_ORDER = "any order"

T = TypeVar("T")


@dataclass
class OrderState:
    """One call: the best schedule, the bound, the time, and annealings that use them."""

    graph: TrainingGraph
    budget: int
    options: SolveOptions
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
    solved: list[list[int]] = field(default_factory=list)
    """Orders that have been solved as if they were given."""
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

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of calls that spend their time in compiled code."""
        workers = min(AT_ONCE, self.options.threads or AT_ONCE)
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self.interrupted = True
                raise

    def seed(self) -> int:
        self.tries += 1
        return self.options.seed * 7919 + self.tries

    def anneal(self, *starts: tuple[list[int], int, Heat]) -> list[Annealed]:
        """Anneal orders and re-executions together, from sequences with so many moves each, and
        offer what comes out."""

        def call(sequence: list[int], moves: int, heat: Heat, seed: int) -> Annealed:
            return anneal_sequence(
                self.arrays,
                drop_dead(self.problem, sequence),
                self.room,
                heat,
                moves=moves,
                seed=seed,
                enough=self.bound,
                stop=lambda: self.interrupted or self.over(),
            )

        annealed = self.at_once([partial(call, *start, self.seed()) for start in starts])
        for found in annealed:
            if found.best is not None:
                self.offer(found.best)
        return annealed

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
        while not self.bounding.ready():
            if self.over():
                return True
            time.sleep(0.01)
        result = self.bounding.result()
        self.bounding = None
        if result.status == "infeasible":
            return False
        self.bound = max(self.bound, min(result.bound / STEP, self.cost))
        self.report()
        return True

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
