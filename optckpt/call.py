"""The call: tf.gradients under a memory budget.

capture -> measure -> solve -> simulate -> rewrite, each in its own module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf
from tensorflow.python.ops import gradients as _gradients_module
from tensorflow.python.ops import gradients_impl as _gradients_impl

from optckpt import costs, device
from optckpt.allocator import Allocator
from optckpt.backends.tensorflow import rewrite
from optckpt.budget import Budget, format_bytes
from optckpt.config import Config, find_config
from optckpt.errors import CaptureError, OptckptError, PlanError
from optckpt.frontends.tensorflow import Capture, capture
from optckpt.frontends.tf_traced import as_traced
from optckpt.graph import TrainingGraph
from optckpt.planner import check_fits, check_price, make_plan
from optckpt.schedule import Plan
from optckpt.solvers import registry
from optckpt.solvers.registry import SolveOptions, Strategy

logger = logging.getLogger(__name__)

Checkpoints = Literal["memory", "speed", "collection"] | Sequence[Any]

# Taken at import, so that `patch` cannot make the call run into itself.
_tf_gradients = _gradients_impl.gradients

_last_plan: Plan | None = None


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    budget: Budget | int | float | str | None = None,
    *,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    stop_gradients: Any = None,
    unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    config: Config | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    name: str = "gradients",
    colocate_gradients_with_ops: bool = False,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
) -> Any:
    """Gradients of sum of `ys` with respect to `xs`, computed within `budget` bytes.

    Drop-in for `tf.gradients`, inside a `tf.function` or a v1 graph: the same gradients, bit for
    bit, from a graph in which tensors that do not fit are computed again.

    Args:
        ys, xs, grad_ys, stop_gradients, unconnected_gradients, name,
        colocate_gradients_with_ops, gate_gradients, aggregation_method: as for `tf.gradients`.
            `xs` may also be a nested structure (a dict, say); the result then has its structure.
        budget: peak bytes on the device during the step, resident bytes (variables, inputs)
            included: an int, "6GiB", or a share of the plain step's peak ("60%", 0.6). None:
            the configuration's budget, else, for strategy "optimal", the device's limit.
        max_overhead: instead of a budget: the fewest bytes for at most this share of extra time
            (0.1: a step that is predicted to take at most 10 % longer).
        strategy: a name from `optckpt.solvers.registry.names()` or a strategy itself. None: the
            configuration's, "optimal" by default.
        checkpoints: what to keep, as OpenAI's gradient-checkpointing has it: "memory" (sqrt(n)
            over articulation points), "speed" (outputs of convolutions and matrix products),
            "collection" (the tensors in the graph collection "checkpoints") or a list of
            tensors. Overrides `strategy`.
        config: a `Config` or the path of a YAML file. None: the environment variable
            OPTCKPT_CONFIG, else ./optckpt.yaml, else the defaults.
        plan: a `Plan` (or the path of one) to apply instead of making one.
        on_plan: called with the plan once the graph follows it.

    Returns:
        What `tf.gradients` returns: a list with a tensor, IndexedSlices or None per x.

    Raises:
        CaptureError: in eager mode, under XLA, on unknown tensor sizes.
        InfeasibleBudgetError: if it is proven that no schedule fits; names the floor.
        OverBudgetError: if a heuristic's best schedule does not fit; names its peak.
        PlanError: if `plan` was made for another graph.
        BudgetError: if both `budget` and `max_overhead` are given, or one is no such amount.
    """
    settings = find_config(config)
    if tf.executing_eagerly():
        raise CaptureError(
            "optckpt.gradients rewrites a graph and there is none in eager mode: call it inside a "
            "function decorated with @tf.function, or in a v1 graph"
        )
    _refuse_xla()
    if checkpoints is None and strategy is None:
        checkpoints = settings.checkpoints
    # What is wrong with the arguments is said before the graph grows and costs are measured.
    chosen = _checkpoint_strategy(checkpoints) or _known(strategy or settings.strategy)
    check_price(budget, max_overhead)
    if budget is None and max_overhead is None:
        budget = settings.budget
    if budget is not None:
        budget = Budget.parse(budget)
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    elif plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan= takes a Plan or the path of one, got {type(plan).__name__}")
    flat_xs, pack = _flatten_xs(xs)
    with as_traced(tf.compat.v1.get_default_graph()):
        result = _tf_gradients(
            ys,
            flat_xs,
            grad_ys=grad_ys,
            name=name,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            stop_gradients=stop_gradients,
            unconnected_gradients=unconnected_gradients,
        )
    if _tensors(result):
        found = capture_gradients(ys, result, settings)
        if budget is None and max_overhead is None and chosen == "optimal":
            budget = Budget(bytes=device.memory_limit(found.device))
        made = _plan_and_rewrite(found, budget, max_overhead, chosen, checkpoints, settings, plan)
        _remember(made)
        if on_plan is not None:
            on_plan(made)
    return pack(result)


def last_plan() -> Plan:
    """The latest plan that `gradients` applied in this process.

    Raises:
        OptckptError: if there has been none.
    """
    if _last_plan is None:
        raise OptckptError("there is no plan yet: optckpt.gradients has not been called")
    return _last_plan


def _remember(plan: Plan) -> None:
    global _last_plan
    _last_plan = plan


def gradients_memory(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> Any:
    """`gradients` with checkpoints="memory": sqrt(n) over articulation points."""
    return gradients(ys, xs, grad_ys, checkpoints="memory", **kwargs)


def gradients_speed(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> Any:
    """`gradients` with checkpoints="speed": keep what convolutions and matrix products write."""
    return gradients(ys, xs, grad_ys, checkpoints="speed", **kwargs)


def gradients_collection(ys: Any, xs: Any, grad_ys: Any = None, **kwargs: Any) -> Any:
    """`gradients` with checkpoints="collection": keep the tensors in collection "checkpoints"."""
    return gradients(ys, xs, grad_ys, checkpoints="collection", **kwargs)


@contextmanager
def patch(budget: Budget | int | float | str | None = None, **kwargs: Any) -> Iterator[None]:
    """Within the context, tf.gradients (also tf.compat.v1.gradients and what v1 optimizers call)
    is `gradients` with this budget and these keyword arguments; afterwards it is as before.
    """

    def replacement(original: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def budgeted(*args: Any, **given: Any) -> Any:
            arguments = signature.bind(*args, **given).arguments
            return gradients(budget=budget, **arguments, **fixed, **kwargs)

        return budgeted

    # tf.gradients has no such argument; it always does what v1's does when told so.
    places: list[tuple[Any, dict[str, Any]]] = [
        (tf, {"colocate_gradients_with_ops": True}),
        (tf.compat.v1, {}),
        (_gradients_module, {}),
    ]
    before = [place.gradients for place, _ in places]
    try:
        for place, fixed in places:
            place.gradients = replacement(place.gradients, **fixed)
        yield
    finally:
        for (place, _), original in zip(places, before, strict=True):
            place.gradients = original


def capture_gradients(ys: Any, result: Any, settings: Config) -> Capture:
    """Capture the step that computes `result`, what tf.gradients returned for `ys`."""
    targets = _tensors(result)
    found: Capture = capture(
        targets[0].graph,
        [tf.convert_to_tensor(y) for y in tf.nest.flatten(ys)],
        targets,
        count_from=settings.memory.count_from,
        chain_from=settings.memory.chain_from,
    )
    return found


def measure(
    found: Capture, settings: Config, progress: bool | costs.ProgressCallback = True
) -> TrainingGraph:
    """The captured graph with its costs, and with all that the device holds now as resident."""
    options: dict[str, Any] = {"repeats": settings.costs.repeats, "progress": progress}
    if settings.costs.cache is not True:
        options["cache"] = settings.costs.cache or None
    graph = costs.cost(found, settings.costs.model, **options)
    in_use = device.bytes_in_use(found.device) + sum(found.folded)
    return replace(graph, resident=max(graph.resident, in_use))


def allocator_of(found: Capture) -> Allocator | None:
    """A model of the allocator that will serve the captured step, if it has one to report."""
    return device.allocator(found.device, found.count_from, found.resident_blocks)


def _allocator_now(found: Capture) -> Allocator | None:
    """As `allocator_of`, for a step in this process: with the chunks that are free now."""
    allocator = allocator_of(found)
    if allocator is None or allocator.region:
        return allocator
    free = device.free_chunks(found.device, allocator.smallest)
    return replace(allocator, free=free, coming=found.folded)


def _plan_and_rewrite(
    found: Capture,
    budget: Budget | None,
    max_overhead: float | None,
    strategy: str | Strategy,
    checkpoints: Checkpoints | None,
    settings: Config,
    plan: Plan | None,
) -> Plan:
    begin = time.perf_counter()
    if plan is None:
        graph = measure(found, settings)
        measured = time.perf_counter()
        plan = check_fits(
            make_plan(
                graph,
                budget,
                strategy,
                _solve_options(settings, found, checkpoints),
                margin=settings.memory.margin,
                allocator=_allocator_now(found),
                plain_graph=found.plain(graph),
                max_overhead=max_overhead,
                reorder=settings.solver.order == "auto",
                repeat=settings.solver.repeat,
            )
        )
    else:
        measured = begin
        plan.check_graph(found.graph)
    solved = time.perf_counter()
    report = rewrite(found, plan.schedule)
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
    return plan


def _refuse_xla() -> None:
    """Raise CaptureError if the function being traced will be compiled by XLA.

    XLA merges re-executed operations with the originals, control edges or not, so the budget
    would silently not be kept. Tracing does not hand jit_compile down to the graph, hence the
    look at the callers.
    """
    advice = (
        "under XLA (jit_compile=True) the compiler undoes recomputation and no budget can be "
        "kept: set jit_compile=False on the tf.function that contains optckpt.gradients"
    )
    if tf.config.optimizer.get_jit():
        raise CaptureError(f"tf.config.optimizer.set_jit is on; {advice}")
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if getattr(owner, "_jit_compile", None) is True and hasattr(owner, "python_function"):
            raise CaptureError(f"function {getattr(owner, '_name', '?')!r}: {advice}")
        frame = frame.f_back  # type: ignore[assignment]


def _checkpoint_strategy(checkpoints: Checkpoints | None) -> str | None:
    if checkpoints is None:
        return None
    if isinstance(checkpoints, str):
        known = {"memory": "sqrt_n", "speed": "speed", "collection": "explicit"}
        if checkpoints not in known:
            raise OptckptError(
                f"unknown checkpoints={checkpoints!r}: give 'memory', 'speed', 'collection' or a "
                "list of tensors"
            )
        return known[checkpoints]
    if isinstance(checkpoints, tf.Tensor | tf.Variable) or not isinstance(checkpoints, Iterable):
        raise OptckptError(
            "checkpoints= takes 'memory', 'speed', 'collection' or a list of tensors, got "
            f"{type(checkpoints).__name__}"
        )
    return "explicit"


def _known(strategy: str | Strategy) -> str | Strategy:
    """The strategy, if there is one of this name or it can be called."""
    if isinstance(strategy, str):
        registry.get(strategy)
    elif not callable(strategy):
        raise OptckptError(
            f"strategy= takes a name ({', '.join(registry.names())}) or a function, got "
            f"{type(strategy).__name__}"
        )
    return strategy


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


def _flatten_xs(xs: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """`xs` as tf.gradients takes it, and how to give the result the structure of `xs`."""
    if not isinstance(xs, list | tuple | dict):
        return xs, lambda result: result
    if isinstance(xs, list | tuple) and not any(isinstance(x, list | tuple | dict) for x in xs):
        return list(xs), lambda result: result
    return tf.nest.flatten(xs), lambda result: tf.nest.pack_sequence_as(xs, result)


def _tensors(result: Sequence[Any]) -> list[tf.Tensor]:
    """The component tensors of gradients, without the Nones."""
    return [t for t in tf.nest.flatten(list(result), expand_composites=True) if t is not None]
