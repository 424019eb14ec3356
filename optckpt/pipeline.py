"""From a captured step to a rewritten graph: measure, solve, rewrite."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import Any

import tensorflow as tf

from optckpt import costs, device
from optckpt.allocator import Allocator, Reporter
from optckpt.backends.tensorflow import rewrite
from optckpt.backends.xla_figures import XlaFigures
from optckpt.backends.xla_ties import rewrite_for_xla
from optckpt.budget import Budget, format_bytes, short_name
from optckpt.coming import blocks_to_come, larger_arguments
from optckpt.config import Config
from optckpt.costs.signature import environment
from optckpt.distribute import workers
from optckpt.errors import OptckptError, OverBudgetError
from optckpt.frontends.tensorflow import Capture
from optckpt.graph import TrainingGraph
from optckpt.plan_cache import cache_for
from optckpt.planner import check_fits
from optckpt.request import Checkpoints, Request
from optckpt.reuse import Problem, plan_once
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers.registry import SolveOptions
from optckpt.xla import is_compiled, refuse_marked

logger = logging.getLogger(__name__)

_SMALL_STEP = 32 << 20
"""Bytes below which a chunk or two that come otherwise are much of a step: free chunks then say
less, and are not looked for beyond what was in use before."""

_last_plan: Plan | None = None
_last_plans: dict[str, Plan] = {}


def last_plan() -> Plan:
    """The latest plan that was applied in this process; of a step on several devices, that of the
    device with the most bytes.

    Raises:
        OptckptError: if there has been none.
    """
    if _last_plan is None:
        raise OptckptError("there is no plan yet: no budget has been applied")
    return _last_plan


def last_plans() -> dict[str, Plan]:
    """Device ("GPU:1") -> the latest plan that was applied for it in this process."""
    return dict(_last_plans)


def remember(plan: Plan, device: str | None = None) -> None:
    """Make it the latest plan of all, and of the device if one is given."""
    global _last_plan
    _last_plan = plan
    if device is not None:
        _last_plans[short_name(device)] = plan


def measure(
    found: Capture, settings: Config, progress: bool | costs.ProgressCallback = True
) -> TrainingGraph:
    """The captured graph with its costs, and with all that the device holds now as resident."""
    options: dict[str, Any] = {"repeats": settings.costs.repeats, "progress": progress}
    if settings.costs.cache is not True:
        options["cache"] = settings.costs.cache or None
    graph = costs.cost(found.sized or found, settings.costs.model, **options)
    coming = sum(found.folded) + sum(blocks_to_come(found))
    coming += sum(size - here for size, here in larger_arguments(found))
    in_use = device.bytes_in_use(found.device) + coming
    if in_use > graph.resident:
        # Of what the step does not hold, what is in Python's reference cycles is free to be used.
        gc.collect()
        in_use = device.bytes_in_use(found.device) + coming
    graph = replace(graph, resident=max(graph.resident, in_use))
    if any(found.away):
        # Measured where they run, which is not here.
        pairs = zip(graph.operations, found.away, strict=True)
        here = tuple(replace(op, workspace=0) if away else op for op, away in pairs)
        graph = replace(graph, operations=here)
    return graph


def allocator_of(found: Capture) -> Allocator | None:
    """A model of the allocator that will serve the captured step, if it has one to report."""
    return device.allocator(found.device, found.count_from, found.resident_blocks)


def _allocator_now(found: Capture, wanted: int = 0) -> Allocator | None:
    """As `allocator_of`, for a step in this process: with the chunks that are free now.

    `wanted`: bytes that the step may take; see `device.free_chunks`.
    """
    allocator = allocator_of(found)
    if allocator is None or allocator.region:
        return allocator
    larger = (size for size, _ in larger_arguments(found))
    coming = (*found.folded, *blocks_to_come(found), *larger)
    free = device.free_chunks(found.device, allocator.smallest, wanted)
    in_use = device.bytes_in_use(found.device) if wanted else 0
    return replace(allocator, free=free, in_use=in_use, coming=coming)


def _reporter(
    found: Capture, graph: TrainingGraph, request: Request, compiled: bool
) -> Reporter | None:
    budget, wanted = request.budget_on(found.device), 0
    if budget is not None:
        peak = simulate(graph, Schedule.base(graph)).peak
        wanted = min(budget.resolve(peak), peak) - graph.resident
    allocator = _allocator_now(found, wanted if wanted >= _SMALL_STEP else 0)
    return XlaFigures(found, allocator) if compiled else allocator


def _check_compiled(plan: Plan) -> None:
    """Raise OverBudgetError if XLA's step will exceed the budget: it has said so by itself."""
    if plan.budget is not None and plan.predicted_peak > plan.budget:
        raise OverBudgetError(
            f"compiled by XLA (jit_compile=True) the step needs "
            f"{format_bytes(plan.predicted_peak)} ({plan.predicted_peak} bytes) along the best "
            f"schedule found, more than the budget of {format_bytes(plan.budget)} "
            f"({plan.budget} bytes): raise the budget or set jit_compile=False, with which the "
            f"tensors need {format_bytes(plan.live_peak)}",
            peak=plan.predicted_peak,
        )


def apply(found: Capture, request: Request) -> Plan:
    """Plan the captured step as requested and rewrite its graph.

    Raises:
        InfeasibleBudgetError, OverBudgetError, BudgetError, PlanError: see `optckpt.gradients`.
    """
    begin = time.perf_counter()
    settings, plan = request.settings, request.plan
    asked = budget = request.budget_on(found.device)
    refuse_marked(found)
    compiled = is_compiled(found.tf_graph)
    if budget is None and request.max_overhead is None and request.strategy == "optimal":
        budget = Budget(bytes=device.memory_limit(found.device))
    if plan is None:
        graph = measure(found, settings)
        measured = time.perf_counter()
        problem = Problem(
            graph=graph,
            budget=budget,
            strategy=request.strategy,
            options=_solve_options(settings, found, request.checkpoints),
            margin=settings.memory.margin,
            allocator=_reporter(found, graph, request, compiled),
            plain_graph=graph if compiled else found.plain(graph),
            max_overhead=request.max_overhead,
            # XLA orders by itself.
            reorder=settings.solver.order == "auto" and not compiled,
            repeat=settings.solver.repeat,
            surroundings={
                **environment(found.device),
                "costs": settings.costs.model,
                "count_from": found.count_from,
                "chain_from": found.chain_from,
                "compiled": compiled,
            },
            limit_of_device=budget is not asked,
        )
        plan = check_fits(plan_once(problem, cache_for(settings.plans.cache), workers()))
    else:
        measured = begin
        plan.check_graph(found.graph)
        if compiled:
            in_use = max(found.graph.resident, device.bytes_in_use(found.device))
            figures = XlaFigures(found, _allocator_now(found))
            peak = figures.peak(replace(found.graph, resident=in_use), plan.schedule)
            plan = replace(plan, predicted_peak=peak)
    if compiled:
        _check_compiled(plan)
    solved = time.perf_counter()
    report = (rewrite_for_xla if compiled else rewrite)(found, plan.schedule)
    logger.info(
        "%s: budget %s, floor %s, plain peak %s, predicted peak %s, overhead %.2f %%, gap %s, "
        "%d clones; measure %.2f s, solve %.2f s, rewrite %.2f s",
        plan.strategy,
        "none" if plan.budget is None else format_bytes(plan.budget),
        format_bytes(plan.floor),
        format_bytes(plan.plain_peak),
        format_bytes(plan.predicted_peak),
        100 * plan.overhead,
        "unknown" if plan.certificate.gap is None else f"{100 * plan.certificate.gap:.2f} %",
        len(report.clones),
        measured - begin,
        solved - measured,
        time.perf_counter() - solved,
    )
    remember(plan, found.device)
    if request.on_plan is not None:
        request.on_plan(plan)
    return plan


def _solve_options(
    settings: Config, found: Capture, checkpoints: Checkpoints | None
) -> SolveOptions:
    kept = None
    if checkpoints is not None and checkpoints not in ("memory", "speed"):
        if isinstance(checkpoints, str):
            tensors = found.tf_graph.get_collection("checkpoints")
            if not tensors:
                raise OptckptError(
                    'checkpoints="collection", but the graph collection "checkpoints" is empty: '
                    'add tensors with tf.compat.v1.add_to_collection("checkpoints", tensor)'
                )
        else:
            tensors = [_tensor(found, t) for t in checkpoints]
        kept = found.buffers_of(tensors)
    return replace(settings.solve_options(), checkpoints=kept)


def _tensor(found: Capture, checkpoint: Any) -> tf.Tensor:
    """The tensor (or the one of this name) to keep; must belong to the captured step."""
    name = checkpoint if isinstance(checkpoint, str) else getattr(checkpoint, "name", checkpoint)
    if isinstance(checkpoint, str):
        try:
            full = checkpoint if ":" in checkpoint else f"{checkpoint}:0"
            checkpoint = found.tf_graph.get_tensor_by_name(full)
        except (KeyError, ValueError):
            raise OptckptError(
                f"checkpoint {name!r}: the graph has no tensor of that name"
            ) from None
    if getattr(checkpoint, "graph", None) is not found.tf_graph or (
        checkpoint.op not in set(found.members)
    ):
        raise OptckptError(
            f"checkpoint {name!r} is no part of what the gradients are computed from: give "
            "tensors of the forward pass"
        )
    return checkpoint
