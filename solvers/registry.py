"""Strategies by name, and the one way to run them.

A strategy is a function of graph, budget (peak bytes, resident included; None: no limit) and
`SolveOptions` that returns a `Solution`. Users add their own with `register`.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

from optckpt.budget import whole_bytes
from optckpt.errors import OptckptError, ScheduleError
from optckpt.graph import TrainingGraph
from optckpt.registry import Registry
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running solver, for display."""

    seconds: float
    incumbent: float | None
    """Extra time of the best schedule within the budget, as a fraction of the plain step."""
    bound: float
    """Proven lower bound, as a fraction of the plain step."""


Order = Literal["fixed", "free"]

LONGEST_TIME_LIMIT = 1e6
"""Seconds (eleven days); waiting functions of the system refuse much longer ones."""
LARGEST_SEED = 2**31 - 1
"""What the engines take."""


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """What a strategy may be told. Heuristics ignore what does not concern them.

    Raises:
        OptckptError: on construction, if an option is not of its kind or out of range; names it.
    """

    time_limit: float = 30.0
    """Seconds of wall time."""
    gap: float = 0.001
    """Stop when cost - bound is at most this fraction of the plain step's time."""
    seed: int = 0
    threads: int = 0
    """Solver threads; 0: as many as the machine has, at most 8."""
    checkpoints: tuple[int, ...] | None = None
    """Buffers to keep, for the strategy `explicit`."""
    progress: Callable[[Progress], None] | None = None
    order: Order = "fixed"
    """Whether the base order of the operations must be kept ("fixed") or may be changed where
    dependencies allow ("free"); for `optimal`."""
    start: Schedule | None = None
    """A schedule that is known already; `optimal` begins from it. One that cannot be executed on
    the graph, or is in another order than a fixed one, is passed over."""

    def __post_init__(self) -> None:
        for name, (kind, fits, what) in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
                raise OptckptError(f"{name} must be {what}, got {value!r}")
        if self.order not in get_args(Order):
            raise OptckptError(f"order must be 'fixed' or 'free', got {self.order!r}")
        kept = self.checkpoints
        if kept is not None and not (isinstance(kept, Collection) and all(map(_is_index, kept))):
            raise OptckptError(
                "checkpoints must be the indices of the buffers to keep, such as (3, 7), got "
                f"{reprlib.repr(kept)}"
            )
        if self.progress is not None and not callable(self.progress):
            raise OptckptError(f"progress must be a function, got {reprlib.repr(self.progress)}")
        if self.start is not None and not isinstance(self.start, Schedule):
            raise OptckptError(f"start must be a Schedule, got {reprlib.repr(self.start)}")


def _is_index(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "time_limit": (
        Real,
        lambda value: 0 < value <= LONGEST_TIME_LIMIT,
        f"a positive number of seconds, at most {LONGEST_TIME_LIMIT:.0f}",
    ),
    "gap": (Real, lambda value: 0 <= value < math.inf, "a share of the plain step, 0 or more"),
    "seed": (
        Integral,
        lambda value: 0 <= value <= LARGEST_SEED,
        f"a whole number from 0 to {LARGEST_SEED}",
    ),
    "threads": (Integral, lambda value: value >= 0, "a whole number, 0 or more"),
}


FIRST_SHARE = 0.8
"""Share of the time for the first round where operations have limits; see `Operation`."""
LEAST_SHARE = 0.05
"""Share of the time that any round has."""
ROUNDS = 4
"""So many rounds bar what was repeated too late; the next one bars all that has a limit."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the best that a strategy had found by then."""

    def __init__(self, solution: Solution) -> None:
        super().__init__()
        self.solution = solution


class Strategy(Protocol):
    """Signature of a strategy."""

    def __call__(
        self, graph: TrainingGraph, budget: int | None, options: SolveOptions
    ) -> Solution: ...


# Imported when first used, so that OR-Tools loads only when needed.
_strategies: Registry[Strategy] = Registry(
    "strategy",
    {
        "optimal": "optckpt.solvers.optimal:optimal",
        "milp": "optckpt.solvers.milp:milp",
        "retention": "optckpt.solvers.retention:retention",
        "lp_rounding": "optckpt.solvers.lp_rounding:lp_rounding",
        "store_all": "optckpt.solvers.heuristics:store_all",
        "sqrt_n": "optckpt.solvers.heuristics:sqrt_n",
        "chen_greedy": "optckpt.solvers.heuristics:chen_greedy",
        "speed": "optckpt.solvers.heuristics:speed",
        "griewank": "optckpt.solvers.heuristics:griewank",
        "rotor": "optckpt.solvers.rotor:rotor",
        "knapsack": "optckpt.solvers.knapsack:knapsack",
        "explicit": "optckpt.solvers.heuristics:explicit",
    },
)


def names() -> list[str]:
    """All known strategy names, built-in ones first."""
    return _strategies.names()


def register(name: str, strategy: Strategy) -> None:
    """Add a strategy, or replace one, under `name` for this process."""
    _strategies.register(name, strategy)


def get(name: str) -> Strategy:
    """The strategy called `name`. Raises OptckptError listing the known names."""
    return _strategies.get(name)


def find(strategy: str | Strategy) -> Strategy:
    """The strategy of this name, or `strategy` itself if it is a function.

    Raises:
        OptckptError: if there is none of this name, or it is neither.
    """
    if isinstance(strategy, str):
        return get(strategy)
    if not callable(strategy):
        raise OptckptError(
            f"strategy= takes a name ({', '.join(names())}) or a function, got "
            f"{type(strategy).__name__}"
        )
    return strategy


def solve(
    graph: TrainingGraph,
    budget: int | None,
    strategy: str | Strategy = "optimal",
    options: SolveOptions | None = None,
) -> Solution:
    """Run a strategy and let the referee check its answer.

    After Ctrl-C it is the best so far, and `Solution.interrupted`.

    Raises:
        ScheduleError: if the strategy returned a schedule that cannot be executed.
        BudgetError: if `budget` is neither None nor a whole number of bytes.
        OptckptError: if the strategy is unknown, or claims what the simulation contradicts.
    """
    budget = whole_bytes(budget)
    run = find(strategy)
    if not isinstance(strategy, str):
        run = _checked(run)
    solution = _within_repeat_limits(graph, budget, run, options or SolveOptions())
    cert = solution.certificate
    if solution.schedule is None:
        return solution
    result = simulate(graph, solution.schedule)
    if cert.status in ("optimal", "feasible") and budget is not None and result.peak > budget:
        raise OptckptError(
            f"strategy {cert.solver!r} claims to fit {budget} bytes, but its schedule peaks at "
            f"{result.peak}; this is a fault of the strategy"
        )
    tolerance = 1e-9 + 1e-6 * abs(result.overhead)
    if cert.cost is None or abs(cert.cost - result.overhead) > tolerance:
        raise OptckptError(
            f"strategy {cert.solver!r} claims a cost of {cert.cost}, but its schedule costs "
            f"{result.overhead}; this is a fault of the strategy"
        )
    return solution


def _checked(strategy: Strategy) -> Strategy:
    """A caller's own strategy, whose answer is looked at."""

    def run(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
        answer: object = strategy(graph, budget, options)
        if not isinstance(answer, Solution):
            raise OptckptError(
                f"strategy {getattr(strategy, '__name__', 'custom')!r} returned a "
                f"{type(answer).__name__}: a strategy returns a Solution"
            )
        return answer

    return run


def _within_repeat_limits(
    graph: TrainingGraph, budget: int | None, run: Strategy, options: SolveOptions
) -> Solution:
    """The strategy's answer, in which nothing is repeated after what it reads was overwritten.

    Strategies do not know of `Operation.repeat_before`. They solve the graph without these limits,
    which hardly ever matter: a variable is updated when all that reads it has been done. Where
    they do, the operations concerned are not repeated at all, and the strategy solves once more,
    in the time that was left for that; in the last round nothing that has a limit is repeated.
    The bound is that of the graph without limits, of which each schedule of `graph` is one. An
    answer without a schedule is then "stopped", though one may exist; `Solution.barred` has the
    operations.
    """
    allowed, first = graph.without_repeat_limits, None
    limited = {o for o, op in enumerate(graph.operations) if op.repeat_before}
    start = _usable(options.start, allowed, options.order)
    end = time.perf_counter() + options.time_limit
    time_limit = (FIRST_SHARE if limited else 1.0) * options.time_limit
    barred: set[int] = set()
    spent, rounds = 0.0, 0
    while True:
        interrupted = False
        try:
            solution = run(allowed, budget, replace(options, start=start, time_limit=time_limit))
        except Interrupted as e:
            solution, interrupted = e.solution, True
        first = first or solution.certificate
        spent += solution.certificate.seconds
        rounds += 1
        late = set() if solution.schedule is None else _repeated_late(graph, solution.schedule)
        if not late:
            relaxed = _relaxed(solution.certificate, first, options)
            relaxed = replace(relaxed, seconds=spent)
            return Solution(solution.schedule, relaxed, interrupted, tuple(sorted(barred)))
        if interrupted:
            raise KeyboardInterrupt
        operations = list(allowed.operations)
        for o in late if rounds < ROUNDS else limited:
            if operations[o].repeatable:
                barred.add(o)
                operations[o] = replace(operations[o], repeatable=False)
        allowed, start = replace(allowed, operations=tuple(operations)), None
        time_limit = max((end - time.perf_counter()) / 2, LEAST_SHARE * options.time_limit)


def _usable(start: Schedule | None, graph: TrainingGraph, order: Order) -> Schedule | None:
    """`start` if it is a schedule that a strategy may return for `graph`, else None.

    What is known of a similar step, or of a graph in which more may be repeated, need not be.
    """
    if start is None or (order == "fixed" and not start.in_base_order):
        return None
    try:
        simulate(graph, start)
    except ScheduleError:
        return None
    return start


def _repeated_late(graph: TrainingGraph, schedule: Schedule) -> set[int]:
    """The operations that are repeated after what they read has been overwritten."""
    done: set[int] = set()
    late = set()
    for o, count in schedule.steps():
        if count and not done.isdisjoint(graph.operations[o].repeat_before):
            late.add(o)
        done.add(o)
    return late


def _relaxed(last: Certificate, first: Certificate, options: SolveOptions) -> Certificate:
    """The certificate of the last of several rounds; `first` is that of the one without limits."""
    if last is first:
        return last
    status = last.status
    if status == "infeasible":
        # So it is with some operations not repeated at all.
        status = "stopped"
    elif status == "optimal" and last.cost is not None and last.cost - first.bound > options.gap:
        status = "feasible"
    return replace(last, status=status, bound=first.bound, valid_for=first.valid_for)
