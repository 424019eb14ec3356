"""Plan a graph: resolve the budget, solve, let the referee judge, report."""

from __future__ import annotations

from optckpt.budget import Budget, format_bytes
from optckpt.errors import BudgetError, InfeasibleBudgetError, OverBudgetError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, Strategy, solve


def make_plan(
    graph: TrainingGraph,
    budget: Budget | int | float | str | None,
    strategy: str | Strategy = "optimal",
    options: SolveOptions | None = None,
    *,
    margin: float = 0.0,
) -> Plan:
    """Plan `graph` under `budget` (peak bytes, resident included; None: no limit).

    `margin` is the fraction of the budget held back for what the simulated peak does not know
    (allocator granularity). It is given up where the plain step fits the budget, or where no
    schedule is found within what is left.

    The plan may exceed the budget if the strategy is a heuristic; its certificate then says
    "over-budget", and `check_fits` raises.

    Raises:
        InfeasibleBudgetError: if it is proven that no schedule fits.
        BudgetError: if the solver stopped before it found a schedule.
    """
    plain = simulate(graph, Schedule.base(graph))
    limit = None if budget is None else Budget.parse(budget).resolve(plain.peak)
    floor = static_floor(graph)
    target = limit
    if limit is not None and plain.peak > limit:
        target = limit - int(margin * limit)
        if target < floor.bytes:
            target = limit
    solution = solve(graph, target, strategy, options)
    if target != limit and solution.certificate.status not in ("optimal", "feasible"):
        target = limit
        solution = solve(graph, target, strategy, options)
    cert = solution.certificate
    if solution.schedule is None:
        assert limit is not None
        setter = (
            f"set by {graph.operations[floor.operation].name!r}"
            if floor.operation >= 0
            else "the resident bytes"
        )
        low = (
            f"every schedule needs at least {format_bytes(floor.bytes)} ({floor.bytes} bytes, "
            f"{setter}; {format_bytes(graph.resident)} of it are resident)"
        )
        if cert.status == "infeasible":
            raise InfeasibleBudgetError(
                f"no schedule fits the budget of {format_bytes(limit)} ({limit} bytes): "
                + (
                    low
                    if limit < floor.bytes
                    else f"proven by the solver in {cert.seconds:.1f} s; {low}"
                )
                + "; raise the budget or reduce the batch size",
                floor=floor.bytes,
            )
        raise BudgetError(
            f"no schedule within {format_bytes(limit)} ({limit} bytes) was found in "
            f"{cert.seconds:.1f} s, and none was ruled out; {low}; raise the budget or the time "
            "limit"
        )
    result = simulate(graph, solution.schedule)
    return Plan(
        fingerprint=graph.fingerprint,
        strategy=cert.solver,
        budget=limit,
        target=target,
        plain_peak=plain.peak,
        predicted_peak=result.peak,
        floor=floor.bytes,
        overhead=result.overhead,
        schedule=solution.schedule,
        certificate=cert,
    )


def check_fits(plan: Plan) -> Plan:
    """Return `plan`, or raise OverBudgetError if its predicted peak exceeds its budget."""
    if plan.budget is not None and plan.predicted_peak > plan.budget:
        raise OverBudgetError(
            f"strategy {plan.strategy!r} does not fit the budget of {format_bytes(plan.budget)} "
            f"({plan.budget} bytes): its lowest peak is {format_bytes(plan.predicted_peak)} "
            f"({plan.predicted_peak} bytes); raise the budget or use strategy 'optimal' "
            f"(floor {format_bytes(plan.floor)})",
            peak=plan.predicted_peak,
        )
    return plan
