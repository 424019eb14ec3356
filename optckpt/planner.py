"""Plan a graph: resolve the budget, solve, let the referee judge, report."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from optckpt.allocator import Reporter
from optckpt.budget import Budget, check_margin, check_price, format_bytes
from optckpt.errors import BudgetError, InfeasibleBudgetError, OptckptError, OverBudgetError
from optckpt.graph import TrainingGraph
from optckpt.judge import Judged, judge, plain_peak
from optckpt.schedule import Certificate, Plan, Schedule, Solution
from optckpt.solvers.floor import Floor, proven_floor
from optckpt.solvers.frontier import least_memory
from optckpt.solvers.registry import Order, SolveOptions, Strategy, find, solve

logger = logging.getLogger(__name__)

Repeat = Literal["auto", "forward", "all"]
"""Which operations may be executed again; "auto": backward ones only where the budget is not met
otherwise."""


def make_plan(
    graph: TrainingGraph,
    budget: Budget | int | float | str | None,
    strategy: str | Strategy = "optimal",
    options: SolveOptions | None = None,
    *,
    margin: float = 0.0,
    allocator: Reporter | None = None,
    plain_graph: TrainingGraph | None = None,
    max_overhead: float | None = None,
    reorder: bool = False,
    repeat: Repeat = "all",
) -> Plan:
    """Plan `graph` under `budget` (peak bytes, resident included; None: no limit).

    With `max_overhead` (extra time as a fraction of the plain step) in the place of a budget, the
    plan is the one that needs the fewest live bytes at that price; see
    `optckpt.solvers.frontier.least_memory`.

    With an `allocator`, peaks are what it will report, which is more than the live bytes; the
    solver's target is lowered until its schedule fits as reported. `margin` is a fraction of the
    budget held back besides. Both are given up where no schedule is found within what is left, and
    where the budget is exactly the plain peak: that asks for the plain step.

    `plain_graph` is the step before any rewriting, if that is another graph (with the same
    operations): the plain peak is its peak.

    With `reorder`, strategy "optimal" may change the order of the operations where keeping it costs
    time, or more bytes as reported than the budget; the order is kept unless that pays.

    `repeat` says which of the graph's repeatable operations may be executed again: "all", those of
    the forward pass ("forward"), or ("auto") these and, only where no schedule is found that fits
    as reported, backward ones as well. With `max_overhead`, "auto" tries backward ones if the
    others lead down to near their floor. A second search gets the time that is left, at least
    30 % of the limit.

    The plan may exceed the budget if the strategy is a heuristic; its certificate then says
    "over-budget", and `check_fits` raises.

    Raises:
        InfeasibleBudgetError: if it is proven that no schedule fits.
        BudgetError: if the solver stopped before it found a schedule; if both a budget and
            `max_overhead` are given; if one of these or `margin` is not what it should be.
        OptckptError: if the strategy is unknown, or `repeat` is none of the three.
    """
    check_price(budget, max_overhead)
    check_margin(margin)
    find(strategy)
    if repeat not in get_args(Repeat):
        raise OptckptError(f"repeat must be 'auto', 'forward' or 'all', got {repeat!r}")
    plain = judge(graph, Schedule.base(graph), allocator)
    peak = plain.reported if plain_graph is None else plain_peak(plain_graph, allocator)
    parsed = None if budget is None else Budget.parse(budget)
    limit = None if parsed is None else parsed.resolve(peak)
    options = options or SolveOptions()
    started = time.perf_counter()
    allowed = None if limit is None else limit if limit == peak else limit - int(margin * limit)
    search = _Search(limit, allowed, strategy, options, allocator, plain, reorder)
    found = _first_that_fits(search, _graphs(graph, repeat), max_overhead)
    cert = covering(found.solution.certificate, found.graph, graph)
    cert = replace(cert, seconds=time.perf_counter() - started)
    if found.solution.schedule is None:
        assert parsed is not None
        assert limit is not None
        # Perhaps a share was meant where so few bytes are asked for.
        few = limit <= 100 and parsed.fraction is None
        barred = found.solution.barred
        raise _failure(graph, limit, options.order, repeat, cert, few, barred)
    judged = judge(graph, found.solution.schedule, allocator)
    return Plan(
        fingerprint=graph.fingerprint,
        strategy=cert.solver,
        budget=limit,
        target=found.target,
        plain_peak=peak,
        predicted_peak=judged.reported,
        live_peak=judged.live,
        floor=proven_floor(widest(graph, repeat), found.order).bytes,
        overhead=judged.overhead,
        schedule=found.solution.schedule,
        certificate=cert,
    )


def _failure(
    graph: TrainingGraph,
    limit: int,
    order: Order,
    repeat: Repeat,
    certificate: Certificate,
    few: bool,
    barred: Sequence[int],
) -> BudgetError:
    """What to raise where there is no schedule within `limit` bytes."""
    allowed = widest(graph, repeat)
    floor = proven_floor(allowed, order)
    low = sentence_of(floor, graph, repeat)
    if certificate.status != "infeasible":
        return BudgetError(
            f"no schedule within {format_bytes(limit)} ({limit} bytes) was found in "
            f"{certificate.seconds:.1f} s, and none was ruled out; {low}; "
            f"{advice_when_stopped(graph, barred, 'the time limit')}"
        )
    advice = ["raise the budget", "reduce the batch size"]
    if few:
        advice.insert(0, f'write "{limit}%" if a share of the plain step\'s peak is meant')
    lowest = proven_floor(graph, order).bytes
    if allowed is not graph and lowest <= limit:
        advice.append(
            "try solver.repeat: all (with backward operations repeated, every schedule needs at "
            f"least {format_bytes(lowest)})"
        )
    lowest = proven_floor(allowed, "free").bytes
    if order == "fixed" and lowest <= limit:
        advice.append(f"try solver.order: free (every order needs at least {format_bytes(lowest)})")
    if limit >= floor.bytes:
        low = (
            f"proven by the solver in {certificate.seconds:.1f} s, so that the smallest possible "
            f"peak lies above it (the quick bound for it is lower: {low})"
        )
    return InfeasibleBudgetError(
        f"no schedule fits the budget of {format_bytes(limit)} ({limit} bytes): {low}; "
        f"{' or '.join(advice[:2])}{''.join(', or ' + a for a in advice[2:])}",
        floor=floor.bytes,
    )


def sentence_of(floor: Floor, graph: TrainingGraph, repeat: Repeat) -> str:
    """That every schedule needs so much, and what sets it."""
    place = floor.place(graph)
    setter = f"set by {place}" if place else "the resident bytes"
    return (
        f"{which_schedules(graph, repeat)} at least {format_bytes(floor.bytes)} "
        f"({floor.bytes} bytes, {setter}; {format_bytes(graph.resident)} of it are resident)"
    )


def advice_when_stopped(graph: TrainingGraph, barred: Sequence[int], time_limit: str) -> str:
    """What to do where nothing was found; `barred` as in `Solution`, `time_limit` its name."""
    if not barred:
        return f"raise the budget or {time_limit}"
    others = f" and {len(barred) - 1} more" if len(barred) > 1 else ""
    return (
        "the graph limits when operations may be executed again (repeat_before), and as these "
        "limits were in the way, the search did without executing "
        f"{graph.operations[barred[0]].name!r}{others} again: raise the budget"
    )


def which_schedules(graph: TrainingGraph, repeat: Repeat) -> str:
    """Beginning of the sentence that "every schedule needs" so much, as `repeat` narrows it."""
    if graph.only_forward_repeats is graph:
        return "every schedule needs"
    if repeat == "forward":
        return "every schedule that repeats forward operations alone needs"
    return "even if backward operations are repeated, every schedule needs"


@dataclass(frozen=True, slots=True)
class _Search:
    """What a graph is to be planned for; see `make_plan`."""

    limit: int | None
    allowed: int | None
    """The limit less the margin."""
    strategy: str | Strategy
    options: SolveOptions
    allocator: Reporter | None
    plain: Judged
    reorder: bool


@dataclass(frozen=True, slots=True)
class _Found:
    graph: TrainingGraph
    target: int | None
    """Bytes solved for."""
    solution: Solution
    order: Order
    """Whether the base order was kept."""


def _graphs(graph: TrainingGraph, repeat: Repeat) -> tuple[TrainingGraph, ...]:
    """What is searched, one after the other: in each, more operations are repeatable."""
    if repeat == "all" or graph.only_forward_repeats is graph:
        return (graph,)
    return (graph.only_forward_repeats,) + ((graph,) if repeat == "auto" else ())


def covering(certificate: Certificate, solved: TrainingGraph, graph: TrainingGraph) -> Certificate:
    """The certificate of a solution of `solved`, with what it covers of `graph`'s schedules.

    `solved` is `graph` itself or its `only_forward_repeats`.
    """
    # No schedule costs less than nothing, whatever it executes again.
    proven = certificate.bound > 0 or certificate.status == "infeasible"
    return replace(certificate, repeats="forward" if solved is not graph and proven else "all")


def widest(graph: TrainingGraph, repeat: Repeat) -> TrainingGraph:
    """The graph with what `repeat` allows, in the end, to execute again marked as repeatable."""
    return _graphs(graph, repeat)[-1]


def _first_that_fits(
    search: _Search, graphs: Sequence[TrainingGraph], max_overhead: float | None
) -> _Found:
    """What the first graph gives with which the budget is met, else the best of all."""
    begin = time.perf_counter()
    options = search.options
    best: _Found | None = None
    for graph in graphs:
        floor = proven_floor(graph, options.order).bytes
        if graph is not graphs[-1] and search.limit is not None and search.limit < floor:
            continue
        if best is not None:
            left = options.time_limit - (time.perf_counter() - begin)
            left = max(left, _SECOND_SHARE * options.time_limit)
            start = best.solution.schedule or options.start
            search = replace(search, options=replace(options, time_limit=left, start=start))
        if max_overhead is not None:
            found = _solve_for_price(graph, max_overhead, search)
            done = not _is_near_floor(graph, found, search)
        else:
            found = _solve(graph, search)
            done = _rank(search, found)[0] == 0
        if best is None or _rank(search, found) < _rank(search, best):
            best = found
        if done or found.solution.interrupted:
            break
    assert best is not None
    return best


def _rank(search: _Search, found: _Found) -> tuple[float, ...]:
    """The less, the better: bytes over the budget as reported, then extra time or live bytes."""
    schedule = found.solution.schedule
    if schedule is None:
        # The proof for more schedules says more.
        return (math.inf, -sum(op.repeatable for op in found.graph.operations))
    judged = judge(found.graph, schedule, search.allocator)
    if search.limit is None:
        return (0, judged.live, judged.overhead)
    return (max(0, judged.reported - search.limit), judged.overhead)


def _is_near_floor(graph: TrainingGraph, found: _Found, search: _Search) -> bool:
    """Whether the peak is in the lowest tenth of what can be saved."""
    assert found.target is not None
    floor = proven_floor(graph, found.order).bytes
    return found.target - floor <= _NEAR_FLOOR * (search.plain.live - floor)


def _solve(graph: TrainingGraph, search: _Search) -> _Found:
    limit, strategy, options = search.limit, search.strategy, search.options
    fixed = options.order
    floor = proven_floor(graph, fixed)
    plain, allowed = search.plain.reported, search.allowed
    if limit is None or allowed is None or plain <= allowed or limit < floor.bytes:
        return _Found(graph, limit, solve(graph, limit, strategy, options), fixed)
    reorder = search.reorder and strategy == "optimal" and fixed == "fixed"
    first = replace(options, time_limit=_FIXED_SHARE * options.time_limit) if reorder else options
    best, spent = _adjusted(graph, limit, allowed, search, first, floor)
    order: Order = fixed
    cheap = best is not None and best.rank <= (0, _CHEAP)
    if reorder and not cheap and not _is_final(best):
        left = min(options.time_limit - spent, (1 - _FIXED_SHARE) * options.time_limit)
        second = replace(options, order="free", time_limit=max(left, 0.1))
        floor = proven_floor(graph, "free")
        other, _ = _adjusted(graph, limit, allowed, search, second, floor)
        if other is not None and (
            best is None or (other.excess, other.overhead + _WORTH_REORDERING) < best.rank
        ):
            best, order = other, "free"
    if best is None or (best.excess > 0 and plain <= limit):
        return _Found(graph, limit, solve(graph, limit, strategy, options), fixed)
    # Perhaps above the budget as reported; the live bytes are not.
    cert = best.solution.certificate
    if cert.status == "optimal" and cert.gap is not None and cert.gap > options.gap:
        cert = replace(cert, status="feasible")
    return _Found(graph, best.target, replace(best.solution, certificate=cert), order)


def _is_final(found: _Round | None) -> bool:
    """Whether no other order can be cheaper, or Ctrl-C has ended the search."""
    if found is not None and found.solution.interrupted:
        return True
    if found is None or found.excess > 0:
        return False
    certificate = found.solution.certificate
    return certificate.status == "optimal" and certificate.valid_for == "any order"


def _solve_for_price(graph: TrainingGraph, max_overhead: float, search: _Search) -> _Found:
    """The lowest peak that costs at most `max_overhead`, and its schedule."""
    strategy, options = search.strategy, search.options
    found = least_memory(graph, max_overhead, options, strategy=strategy)
    certificate = Certificate(
        strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "custom"),
        "optimal" if found.gap <= options.gap else "feasible",
        found.overhead,
        found.bound,
        seconds=0.0,
        valid_for=found.valid_for,
    )
    solution = Solution(found.schedule, certificate, found.interrupted)
    return _Found(graph, found.peak, solution, options.order)


def _adjusted(
    graph: TrainingGraph,
    limit: int,
    allowed: int,
    search: _Search,
    options: SolveOptions,
    floor: Floor,
) -> tuple[_Round | None, float]:
    """The best of several rounds, between which the target follows what the allocator reports.

    How much is lost to chunks is a matter of the schedule: one more round at a slightly other
    target may lose less. None if the first round found nothing. Also returns the seconds spent.
    """
    spent = 0.0
    # Orders take longer to search.
    longer = 2 if options.order == "free" else 1
    slow = search.allocator is not None and search.allocator.is_slow
    worth = _MUCH_SPARE if slow else _SPARE
    best: _Round | None = None
    target, tried = allowed, set[int]()
    seen = set[Judged]()
    # No schedule is known at `low`; there is one at `high`, if any round has found one.
    low, high = floor.bytes - 1, allowed + 1
    for k in range(_ROUNDS):
        left = options.time_limit - spent
        if target <= low or target in tried or (k and left < _LEAST * options.time_limit):
            break
        if k:
            tried.add(target)
        limited = replace(
            options,
            gap=options.gap if k else max(options.gap, _ROUGH_GAP),
            time_limit=min(
                max(left, 0.1), longer * (_SHARE if k else _ROUGH_SHARE) * options.time_limit
            ),
        )
        solution = solve(graph, target, search.strategy, limited)
        cert = solution.certificate
        # Not by the clock: a strategy may have to be compiled first, once after installation.
        spent += cert.seconds
        if solution.schedule is None or cert.status == "over-budget":
            if best is None:
                break
            if solution.interrupted:
                best = best.interrupted()
                break
            low = target
            target = (low + high) // 2
            continue
        high = min(high, target)
        judged = judge(graph, solution.schedule, search.allocator)
        spare = allowed - judged.reported
        found = _Round(max(0, -spare), judged.overhead, target, solution)
        if best is None or found.rank < best.rank or found.proves_more_than(best):
            best = found
        if solution.interrupted:
            best = best.interrupted()
            break
        if spare < 0:
            lower = target - max(-spare if k == 0 else -spare // 2, limit // 500)
            if judged in seen:
                # Blocks are larger than such steps: the same would be found until the last round.
                lower = min(lower, judged.live - 1)
            seen.add(judged)
            target = max(lower, (low + target) // 2)
        elif spare > worth * limit and target < allowed:
            target = min(allowed, target + spare * 3 // 5)
        elif k == 0 and cert.gap is not None and cert.gap > options.gap:
            continue  # the same again, exactly
        else:
            break
    return best, spent


@dataclass(frozen=True, slots=True)
class _Round:
    excess: int
    """Bytes that the allocator reports beyond what is allowed."""
    overhead: float
    target: int
    solution: Solution

    def interrupted(self) -> _Round:
        """The same, after which the search was ended by Ctrl-C."""
        return replace(self, solution=replace(self.solution, interrupted=True))

    @property
    def rank(self) -> tuple[int, float]:
        return (self.excess, self.overhead)

    def proves_more_than(self, other: _Round) -> bool:
        """Whether this is as good a schedule for the same target, with a better bound."""
        return (
            self.rank == other.rank
            and self.target == other.target
            and self.solution.certificate.bound > other.solution.certificate.bound
        )


_ROUNDS = 12
_SECOND_SHARE = 0.3
"""Share of the time limit for the search with backward operations, whatever was used before."""
_NEAR_FLOOR = 0.1
_FIXED_SHARE = 0.6
"""Share of the time limit for the base order where another one may be tried."""
_CHEAP = 0.01
"""Extra time below which no other order is tried."""
_WORTH_REORDERING = 0.003
"""Extra time that another order has to save."""
_ROUGH_GAP = 0.02
_ROUGH_SHARE, _SHARE = 0.15, 0.3
"""Share of the time limit for the first, rough round and for each of the others."""
_LEAST = 0.1
"""Share of the time limit below which no further round is begun."""
_SPARE = 0.01
"""Share of the budget that is worth another round if the allocator leaves it unused."""
_MUCH_SPARE = 0.1
"""The same where it takes long to learn what a schedule needs."""


def check_fits(plan: Plan) -> Plan:
    """Return `plan`, or raise OverBudgetError if its live bytes exceed its budget.

    Warns if the live bytes fit, but the allocator will probably report more than the budget.
    """
    if plan.budget is None:
        return plan
    if plan.live_peak > plan.budget:
        raise OverBudgetError(
            f"strategy {plan.strategy!r} does not fit the budget of {format_bytes(plan.budget)} "
            f"({plan.budget} bytes): its lowest peak is {format_bytes(plan.predicted_peak)} "
            f"({plan.predicted_peak} bytes); raise the budget or use strategy 'optimal' "
            f"(floor {format_bytes(plan.floor)})",
            peak=plan.predicted_peak,
        )
    if plan.predicted_peak > plan.budget:
        logger.warning(
            "the live tensors need %s, within the budget of %s, but the allocator hands out whole "
            "chunks and is predicted to report %s: no better schedule was found (floor %s)",
            format_bytes(plan.live_peak),
            format_bytes(plan.budget),
            format_bytes(plan.predicted_peak),
            format_bytes(plan.floor),
        )
    return plan
