"""Plans made once: a step that was planned before gets that plan again, judged as it is now.

A plan is found by what was asked for (`optckpt.plan_cache.Asked`), which holds neither names nor
measured seconds: a retrace, a restart and a second replica ask for the same, a changed model or
setting for something else.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import optckpt
from optckpt.allocator import Reporter
from optckpt.budget import Budget, format_bytes
from optckpt.errors import PlanError, ScheduleError
from optckpt.graph import TrainingGraph
from optckpt.interruption import interruption
from optckpt.judge import Judged, judge, plain_peak
from optckpt.plan_cache import Asked, PlanCache, StoredPlan, from_text, to_text
from optckpt.planner import Repeat, make_plan, widest
from optckpt.schedule import Certificate, Plan, Schedule
from optckpt.solvers import registry
from optckpt.solvers.floor import proven_floor
from optckpt.solvers.registry import Order, SolveOptions, Strategy
from optckpt.warm import memory

logger = logging.getLogger("optckpt.reuse")

_SPARE = 0.05
"""Share of the budget: so much more room than the plan was made for is worth another search."""
_SHORT, _HARDLY_MORE = 0.1, 1.1
"""Share of the time limit for a step that resembles one planned before, whose schedule costs here
at most so many times what it does there."""
_LONGER, _MORE = 2.0, 60.0
"""Time limits of the solver, and seconds, for which the chief's plan is waited for."""
_DEARER, _MUCH_DEARER = 0.01, 1.25
"""Costs that have changed may make a plan so much dearer, and by this factor, before it is solved
again."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned; as the arguments of `optckpt.planner.make_plan`."""

    graph: TrainingGraph
    budget: Budget | None
    strategy: str | Strategy
    options: SolveOptions
    margin: float
    allocator: Reporter | None
    plain_graph: TrainingGraph
    max_overhead: float | None
    reorder: bool
    repeat: Repeat
    surroundings: Mapping[str, Any]
    """JSON-able: what beside the graph and these arguments the plan depends on."""
    limit_of_device: bool = False
    """Whether the budget is what the device has; that may differ a little from run to run."""

    def solve(self, start: Schedule | None = None) -> Plan:
        """Make the plan. Raises as `make_plan`. `start`: a schedule that is known already."""
        logger.info(
            "planning: %d operations, %s, time limit %.0f s",
            len(self.graph.operations),
            self._aim,
            self.options.time_limit,
        )
        return make_plan(
            self.graph,
            self.budget,
            self.strategy,
            self.options if start is None else replace(self.options, start=start),
            margin=self.margin,
            allocator=self.allocator,
            plain_graph=self.plain_graph,
            max_overhead=self.max_overhead,
            reorder=self.reorder,
            repeat=self.repeat,
        )

    @property
    def _aim(self) -> str:
        if self.max_overhead is not None:
            return f"at most {100 * self.max_overhead:g} % more time"
        if self.budget is None:
            return "no budget"
        if self.budget.bytes is not None:
            return f"budget {format_bytes(self.budget.bytes)}"
        assert self.budget.fraction is not None
        return f"budget {100 * self.budget.fraction:g} % of the plain peak"

    @property
    def asked(self) -> Asked | None:
        """What the plan is found by; None if the strategy is not one of optckpt's own."""
        strategy = self.strategy
        if not isinstance(strategy, str):
            return None
        if not getattr(registry.get(strategy), "__module__", "").startswith("optckpt."):
            return None
        options = self.options
        budget: Any = None if self.budget is None else asdict(self.budget)
        return Asked(
            {
                "optckpt": optckpt.__version__,
                "fingerprint": self.graph.fingerprint,
                "strategy": strategy,
                "budget": "device" if self.limit_of_device else budget,
                "max_overhead": self.max_overhead,
                "margin": self.margin,
                "reorder": self.reorder,
                "repeat": self.repeat,
                "solver": {
                    "time_limit": options.time_limit,
                    "gap": options.gap,
                    "seed": options.seed,
                    "threads": options.threads,
                    "order": options.order,
                    "checkpoints": None
                    if options.checkpoints is None
                    else list(options.checkpoints),
                },
                "surroundings": dict(self.surroundings),
            }
        )


class Peers(Protocol):
    """Other processes that plan the same step at the same time; see `optckpt.distribute`."""

    @property
    def is_chief(self) -> bool: ...

    def publishing(self, key: str) -> AbstractContextManager[Callable[[str], None]]: ...

    def receive(self, key: str, seconds: float) -> str | None: ...


def plan_once(problem: Problem, cache: PlanCache, peers: Peers | None = None) -> Plan:
    """The plan of `problem`: from the cache if it is still good, else solved and stored there.

    With `peers`, the chief's plan, wherever the chief has it from, if it fits here as well.

    Raises as `optckpt.planner.make_plan`.
    """
    asked = problem.asked
    if asked is None:
        if peers is not None:
            logger.warning("strategies of your own are run by each worker for itself")
        return problem.solve()
    with cache.one_at_a_time(asked):
        plan = _plan(problem, asked, cache, peers)
    memory.remember(problem.graph, plan.schedule, plan.overhead)
    return plan


def _plan(problem: Problem, asked: Asked, cache: PlanCache, peers: Peers | None) -> Plan:
    if peers is None:
        return _own_plan(problem, asked, cache)
    if any(again(known, problem)[0] is not None for known in cache.recall(asked)):
        return _own_plan(problem, asked, cache)
    if peers.is_chief:
        with peers.publishing(_shared_key(asked)) as publish:
            plan = _own_plan(problem, asked, cache)
            publish(to_text([_stored(problem, asked, plan)]))
            return plan
    text = peers.receive(_shared_key(asked), _LONGER * problem.options.time_limit + _MORE)
    if text is not None:
        try:
            chiefs = replace(from_text(text)[0], asked=asked)
            found, remark = again(chiefs, problem, critical=False)
        except PlanError as e:
            found, remark = None, str(e)
        if found is not None:
            logger.info("the chief's plan is used: %s", remark)
            cache.put(chiefs)
            return found
        logger.warning(
            "the chief's plan is not used, and this worker has one of its own: %s", remark
        )
    return _own_plan(problem, asked, cache)


def _shared_key(asked: Asked) -> str:
    """Equal for workers that ask for the same on different machines."""
    surroundings = dict(asked.fields["surroundings"])
    for name in ("hardware", "threads"):
        surroundings.pop(name, None)
    return Asked({**asked.fields, "surroundings": surroundings}).key


def _own_plan(problem: Problem, asked: Asked, cache: PlanCache) -> Plan:
    known = sorted(cache.get(asked), key=lambda stored: stored.plan.overhead)
    for stored in known:
        plan, remark = again(stored, problem)
        age = format_age(time.time() - stored.made_at)
        if plan is not None:
            logger.info("the plan of %s ago is used again: %s", age, remark)
            return plan
        logger.info("the plan of %s ago is not used again: %s", age, remark)
    if known:
        return _solve(problem, asked, cache, known[-1].plan.schedule)
    return _solve(_warmed(problem), asked, cache)


def _solve(problem: Problem, asked: Asked, cache: PlanCache, start: Schedule | None = None) -> Plan:
    plan, hurried = _solved(problem, start)
    # What did not fit is refused, and what was cut short can be done better.
    if not hurried and (plan.budget is None or plan.live_peak <= plan.budget):
        cache.put(_stored(problem, asked, plan))
    return plan


def _warmed(problem: Problem) -> Problem:
    """`problem`, with the schedule of a step that resembles it to begin from, if there is one.

    If that fits as it is, and costs hardly more than it did there (the last batch of an epoch,
    which is smaller), little is to be gained by a long search.
    """
    start = memory.start(problem.graph)
    if start is None:
        return problem
    options = replace(problem.options, start=start.schedule)
    if problem.budget is not None:
        judged = judge(problem.graph, start.schedule, problem.allocator)
        limit = problem.budget.resolve(plain_peak(problem.plain_graph, problem.allocator))
        fits = judged.reported <= limit - int(problem.margin * limit)
        if fits and judged.overhead <= _HARDLY_MORE * start.overhead + problem.options.gap:
            options = replace(options, time_limit=_SHORT * options.time_limit)
            logger.info(
                "a step like this one was planned before; its schedule fits with an overhead of "
                "%.2f %%, and the search for a better one is a short one",
                100 * judged.overhead,
            )
    return replace(problem, options=options)


def _stored(problem: Problem, asked: Asked, plan: Plan) -> StoredPlan:
    operations = problem.graph.operations
    return StoredPlan(
        asked=asked,
        plan=plan,
        seconds=tuple(op.seconds for op in operations),
        workspace=tuple(op.workspace for op in operations),
        resident=problem.graph.resident,
        made_at=time.time(),
    )


def _solved(problem: Problem, start: Schedule | None) -> tuple[Plan, bool]:
    """The plan, and whether Ctrl-C cut its search short."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return problem.solve(start), False
    with interruption() as was_interrupted:
        return problem.solve(start), was_interrupted()


def again(
    stored: StoredPlan, problem: Problem, *, critical: bool = True
) -> tuple[Plan | None, str]:
    """The stored plan for the step as it is now, and a remark; None if it had better be solved.

    Unless `critical`, a plan that fits is good enough, however much better it could be by now; and
    a budget that is a share of the plain peak leaves at least as much as when the plan was made.

    Peaks, overhead and floor are those of the present graph and allocator. The certificate stays
    valid: see `_certificate`.
    """
    graph, old = problem.graph, stored.plan
    if len(stored.seconds) != len(graph.operations) or old.fingerprint != graph.fingerprint:
        return None, "it is of another graph"
    try:
        judged = judge(graph, old.schedule, problem.allocator)
    except ScheduleError as e:
        return None, f"it cannot be executed ({e})"
    peak = plain_peak(problem.plain_graph, problem.allocator)
    limit = None if problem.budget is None else problem.budget.resolve(peak)
    if not critical and problem.budget is not None and problem.budget.bytes is None:
        assert limit is not None
        limit = max(limit, (old.budget or 0) + graph.resident - stored.resident)
    objection = _misfit(old, judged, limit, problem)
    if objection is None and critical:
        objection = _waste(old, judged, limit, problem)
    if objection is not None:
        return None, objection
    certificate, target, remark = _certificate(stored, judged, problem)
    order: Order = "fixed" if old.schedule.in_base_order else "free"
    if problem.options.order == "free":
        order = "free"
    plan = replace(
        old,
        budget=limit,
        target=target,
        plain_peak=peak,
        predicted_peak=judged.reported,
        live_peak=judged.live,
        floor=proven_floor(widest(graph, problem.repeat), order).bytes,
        overhead=judged.overhead,
        certificate=certificate,
        source="cache" if certificate == old.certificate else "cache, other costs",
    )
    return plan, remark


def _misfit(old: Plan, judged: Judged, limit: int | None, problem: Problem) -> str | None:
    """Why the plan is not what was asked for any more."""
    if problem.max_overhead is not None and judged.overhead > problem.max_overhead + 1e-9:
        return f"it now takes {100 * judged.overhead:.2f} % more time"
    if limit is None or old.budget is None:
        return None
    # Some of the margin may be used up by what the process has done meanwhile.
    allowed = limit * max(1 - problem.margin / 2, old.predicted_peak / old.budget)
    if judged.live > limit or judged.reported > allowed:
        return f"it now needs {format_bytes(judged.reported)} of {format_bytes(limit)}"
    return None


def _waste(old: Plan, judged: Judged, limit: int | None, problem: Problem) -> str | None:
    """Why another search is likely to find a better plan."""
    if judged.overhead > _MUCH_DEARER * old.overhead + _DEARER:
        return f"it now takes {100 * judged.overhead:.2f} % more time"
    if limit is None or old.budget is None:
        return None
    unused = limit - judged.reported - max(0, old.budget - old.predicted_peak)
    if judged.overhead > problem.options.gap and unused > _SPARE * limit:
        return f"there are {format_bytes(unused)} more than it was made for"
    return None


def _certificate(
    stored: StoredPlan, judged: Judged, problem: Problem
) -> tuple[Certificate, int | None, str]:
    """What of the stored certificate holds now, for which target (live bytes), and a remark.

    With the same costs all of it does, for a target that moves with the resident bytes. Otherwise,
    let c be the old costs and c' the new ones, r the least c'/c over the operations that may be
    executed again, T and T' the plain step's times. The extra time of a schedule is a sum of such
    c' and so at least r times what it was, hence at least r * bound * T: the bound becomes
    r * bound * T / T'. And a schedule that needs M' live bytes now needed at most
    M' - resident' + resident + the largest decrease of a workspace: the target moves by as much.
    """
    graph, old = problem.graph, stored.plan
    certificate = old.certificate
    operations = graph.operations
    less = max(
        (was - op.workspace for was, op in zip(stored.workspace, operations, strict=True)),
        default=0,
    )
    target = old.target
    if target is not None:
        target += graph.resident - stored.resident - max(0, less)
    before, now = sum(stored.seconds), graph.seconds
    if stored.seconds == tuple(op.seconds for op in operations):
        text = "costs are as they were, and its bound holds"
        return certificate, target, text
    covered = graph.only_forward_repeats if certificate.repeats == "forward" else graph
    ratio = min(
        (
            op.seconds / was
            for was, op in zip(stored.seconds, covered.operations, strict=True)
            if op.repeatable and was > 0
        ),
        default=0.0,
    )
    bound = ratio * certificate.bound * before / now if now > 0 else 0.0
    cost = judged.overhead
    bound = min(bound, cost)
    proven = certificate.status == "optimal" and cost - bound <= problem.options.gap
    scaled = replace(
        certificate, status="optimal" if proven else "feasible", cost=cost, bound=bound
    )
    return (
        scaled,
        target,
        f"costs have changed; its bound of {100 * certificate.bound:.2f} % was proven with others, "
        f"of which {100 * bound:.2f} % remain proven",
    )


def format_age(seconds: float) -> str:
    """Seconds for people: "3 hours"."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{max(0, int(seconds))} s"
