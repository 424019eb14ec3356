"""The memory-time curve of a graph: its floor, its frontier, and the least memory at a price.

Built on any strategy that proves bounds (by default `optimal`). A schedule for one budget fits
every larger one, and a bound for one budget holds for every smaller one; both are handed on, so
that the curve is monotone by construction: a smaller budget never peaks higher nor costs less.
Ctrl-C during a search ends the whole of it, with what was found by then, or with KeyboardInterrupt
if the strategy has nothing to hand over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from optckpt.budget import check_overhead, points_of
from optckpt.errors import BudgetError, OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import Simulation, simulate
from optckpt.solvers.floor import proven_floor
from optckpt.solvers.registry import SolveOptions, Strategy, solve

_ANY_GAP = 1e9
"""Any schedule will do."""
_RESOLUTION = 500
"""The floor is searched for to within this part of the bytes above the resident ones."""
_OVERHEAD_RESOLUTION = 200
"""The same for the least memory at a price."""
_DIVES = ("chen_greedy", "sqrt_n", "griewank")
"""Heuristics whose lowest peak the search for the floor begins from."""


@dataclass(frozen=True, slots=True)
class FloorBracket:
    """The smallest reachable peak lies between `bound` and `peak`. Bytes, resident included."""

    bound: int
    """Proven: no schedule peaks lower."""
    peak: int
    """Reached by `schedule`."""
    schedule: Schedule
    overhead: float
    """Extra time of `schedule` as a fraction of the plain step; not the least for its peak."""
    valid_for: str
    """What the bound covers: schedules in the given base order, or in any order."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The cheapest schedule found within `budget`. Bytes, resident included."""

    budget: int
    peak: int
    overhead: float
    """Extra time as a fraction of the plain step."""
    bound: float
    """Proven lower bound on the extra time within `budget`, as a fraction of the plain step."""
    schedule: Schedule
    valid_for: str
    """What the bound covers: schedules in the given base order, or in any order."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search for it."""

    @property
    def gap(self) -> float:
        """overhead - bound."""
        return max(0.0, self.overhead - self.bound)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Points by ascending budget; peaks ascend and overheads descend with them."""

    points: tuple[FrontierPoint, ...]
    floor: FloorBracket | None
    """None if the budgets were given."""

    @property
    def knee(self) -> FrontierPoint:
        """The point where saving more begins to cost much more: the farthest below the chord.

        Memory and time are scaled to [0, 1] first (Satopaa et al., "Finding a Kneedle in a
        Haystack", ICDCSW 2011).
        """
        low, high = self.points[0], self.points[-1]
        bytes_ = max(1, high.peak - low.peak)
        share = max(low.overhead - high.overhead, 1e-12)

        def below(p: FrontierPoint) -> float:
            return (high.peak - p.peak) / bytes_ - (p.overhead - high.overhead) / share

        return max(self.points, key=below)


def floor(
    graph: TrainingGraph,
    options: SolveOptions | None = None,
    *,
    strategy: str | Strategy = "optimal",
) -> FloorBracket:
    """Bracket the smallest peak that any schedule reaches, by bisection over the budget.

    `options.time_limit` is for the whole search. Ends early when bound and peak are within 0.2 %
    of the bytes above the resident ones.
    """
    options = options or SolveOptions()
    end = time.monotonic() + options.time_limit
    base = Schedule.base(graph)
    best, schedule = simulate(graph, base), base
    proven = proven_floor(graph, options.order).bytes
    valid_for = "base order" if options.order == "fixed" else "any order"
    quick = replace(options, time_limit=min(1.0, options.time_limit / 10), progress=None)
    for name in _DIVES:
        try:
            dive = solve(graph, proven, name, quick)
        except OptckptError:
            continue
        if dive.schedule is not None:
            found = simulate(graph, dive.schedule)
            if found.peak < best.peak:
                best, schedule = found, dive.schedule
    step = max(1, (best.peak - graph.resident) // _RESOLUTION)
    # What lies at or below `open_below` was tried without an answer.
    open_below = first = proven - 1
    while best.peak - step > open_below:
        left = end - time.monotonic()
        if left <= 0:
            break
        target = open_below + max(1, (best.peak - open_below) // 2)
        if open_below == first and target - proven < best.peak // 20:
            # The static floor itself is often reached.
            target = proven
        answer = solve(
            graph,
            target,
            strategy,
            replace(options, gap=_ANY_GAP, time_limit=max(0.1, left / 3), start=schedule),
        )
        status = answer.certificate.status
        if answer.schedule is not None and status in ("optimal", "feasible"):
            schedule = answer.schedule
            best = simulate(graph, schedule)
            if not answer.interrupted:
                continue
        if answer.interrupted:
            break
        open_below = target
        if status == "infeasible":
            proven = target + 1
            valid_for = answer.certificate.valid_for
    return FloorBracket(min(proven, best.peak), best.peak, schedule, best.overhead, valid_for)


def frontier(
    graph: TrainingGraph,
    points: int | Sequence[int] = 9,
    options: SolveOptions | None = None,
    *,
    strategy: str | Strategy = "optimal",
    progress: Callable[[FrontierPoint], None] | None = None,
) -> Frontier:
    """The cheapest schedules over a range of budgets.

    Args:
        points: how many budgets, evenly from the floor to the plain peak, or the budgets
            themselves (bytes, resident included).
        options: `time_limit` is for the whole curve.
        progress: called with each point when it is first found, smallest budget first. Later
            points may still improve it.

    Budgets that no schedule was found for are left out; after Ctrl-C, those not reached yet.

    Raises:
        BudgetError: if there is none that a schedule was found for, fewer than two points
            are asked for, or `points` is neither a number nor a list of whole numbers.
    """
    options = options or SolveOptions()
    end = time.monotonic() + options.time_limit
    base = Schedule.base(graph)
    plain = simulate(graph, base)
    bracket: FloorBracket | None = None
    known: list[tuple[Simulation, Schedule]] = [(plain, base)]
    points = points_of(points)
    if isinstance(points, int):
        bracket = floor(
            graph, replace(options, time_limit=options.time_limit / 4), strategy=strategy
        )
        low = bracket.peak
        budgets = [low + (plain.peak - low) * k // (points - 1) for k in range(points)]
        known.append((simulate(graph, bracket.schedule), bracket.schedule))
    else:
        budgets = points
    budgets = sorted(set(budgets))
    bounds: list[tuple[float, str]] = []
    for k, budget in enumerate(budgets):
        left = end - time.monotonic()
        start = _cheapest(known, budget)
        limited = replace(
            options,
            time_limit=max(0.1, left / (len(budgets) - k)),
            start=None if start is None else start[1],
        )
        answer = solve(graph, budget, strategy, limited)
        cert = answer.certificate
        if answer.schedule is not None:
            known.append((simulate(graph, answer.schedule), answer.schedule))
        infinite = cert.status == "infeasible"
        bounds.append((float("inf") if infinite else cert.bound, cert.valid_for))
        if progress is not None and _cheapest(known, budget) is not None:
            progress(_point(budget, known, bounds[-1]))
        if answer.interrupted:
            break
    # A bound for more bytes holds for fewer.
    for k in range(len(bounds) - 2, -1, -1):
        if bounds[k + 1][0] > bounds[k][0]:
            bounds[k] = bounds[k + 1]
    found = [
        _point(budget, known, bound)
        for budget, bound in zip(budgets, bounds, strict=False)
        if _cheapest(known, budget) is not None
    ]
    if not found:
        raise BudgetError(
            f"no schedule was found within any of the {len(budgets)} budgets, the largest of "
            f"which is {budgets[-1] if budgets else 0} bytes; the plain step needs {plain.peak}"
        )
    return Frontier(tuple(found), bracket)


def least_memory(
    graph: TrainingGraph,
    max_overhead: float,
    options: SolveOptions | None = None,
    *,
    strategy: str | Strategy = "optimal",
) -> FrontierPoint:
    """The lowest peak found for at most `max_overhead` extra time (fraction of the plain step).

    By bisection over the budget, between budgets for which none was found that cheap, and one for
    which one was; that there is none for the former is not proven. `options.time_limit` is for the
    whole search. The point's budget is its peak.

    Raises:
        BudgetError: if `max_overhead` is negative or no number.
    """
    check_overhead(max_overhead)
    options = options or SolveOptions()
    end = time.monotonic() + options.time_limit
    base = Schedule.base(graph)
    known = [(simulate(graph, base), base)]
    low = proven_floor(graph, options.order).bytes - 1
    step = max(1, (known[0][0].peak - graph.resident) // _OVERHEAD_RESOLUTION)
    best = _point(known[0][0].peak, known, (0.0, "any order"))
    while best.peak - step > low:
        left = end - time.monotonic()
        if left <= 0:
            break
        target = (low + best.peak) // 2
        answer = solve(
            graph,
            target,
            strategy,
            replace(options, time_limit=max(0.1, left / 3), start=best.schedule),
        )
        cert = answer.certificate
        if answer.schedule is not None and cert.status in ("optimal", "feasible"):
            found = simulate(graph, answer.schedule)
            known.append((found, answer.schedule))
            if found.overhead <= max_overhead + 1e-9:
                best = _point(found.peak, known, (cert.bound, cert.valid_for))
                if not answer.interrupted:
                    continue
        if answer.interrupted:
            return replace(best, interrupted=True)
        low = target
    return best


def _cheapest(
    known: Sequence[tuple[Simulation, Schedule]], budget: int
) -> tuple[Simulation, Schedule] | None:
    """The cheapest of the schedules within `budget`; of equally cheap ones the lowest."""
    fitting = [entry for entry in known if entry[0].peak <= budget]
    return min(fitting, key=lambda e: (e[0].overhead, e[0].peak), default=None)


def _point(
    budget: int, known: Sequence[tuple[Simulation, Schedule]], bound: tuple[float, str]
) -> FrontierPoint:
    found = _cheapest(known, budget)
    assert found is not None
    result, schedule = found
    return FrontierPoint(
        budget, result.peak, result.overhead, min(bound[0], result.overhead), schedule, bound[1]
    )
