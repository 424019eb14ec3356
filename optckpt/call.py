"""The call: tf.gradients under a memory budget.

What is taken of TensorFlow's own gradients is planned and rewritten in `optckpt.step`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients as _gradients_module
from tensorflow.python.ops import gradients_impl as _gradients_impl

from optckpt.arguments import check_tensors
from optckpt.budget import AnyBudget
from optckpt.config import Config
from optckpt.errors import CaptureError
from optckpt.frontends.tf_traced import as_traced
from optckpt.request import Checkpoints, Request
from optckpt.schedule import Plan
from optckpt.solvers.registry import Strategy
from optckpt.step import plan_gradients
from optckpt.xla import refuse_xla

# Taken at import, so that `patch` cannot make the call run into itself.
_tf_gradients = _gradients_impl.gradients


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    budget: AnyBudget | None = None,
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
    colocate_gradients_with_ops: bool = True,
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
            the configuration's budget, else, for strategy "optimal", the device's limit. For a
            step on several devices the budget of each, or {"GPU:0": "6GiB", "GPU:1": "80%"}.
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
        plan: a `Plan` (or the path of one) to apply instead of making one; of the arguments above
            only `config` may be given with it.
        on_plan: called with the plan once the graph follows it.

    Returns:
        What `tf.gradients` returns: a list with a tensor, IndexedSlices or None per x.

    Raises:
        CaptureError: in eager mode, on unknown tensor sizes, and where XLA compiles in a way that
            cannot be planned.
        InfeasibleBudgetError: if it is proven that no schedule fits; names the floor.
        OverBudgetError: if a heuristic's best schedule does not fit; names its peak.
        PlanError: if `plan` was made for another graph, or is given with a budget or a strategy.
        BudgetError: if both `budget` and `max_overhead` are given, or one is no such amount.
    """
    if tf.executing_eagerly():
        raise CaptureError(
            "optckpt.gradients rewrites a graph and there is none in eager mode: call it inside a "
            "function decorated with @tf.function, or in a v1 graph, or use "
            "optckpt.value_and_gradients"
        )
    refuse_xla()
    # What is wrong with the arguments is said before the graph grows and costs are measured.
    request = Request.of(
        budget,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        plan=plan,
        on_plan=on_plan,
    )
    check_tensors(ys, "ys")
    check_tensors(xs, "xs")
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
    plan_gradients(ys, result, request)
    return pack(result)


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
def patch(budget: AnyBudget | None = None, **kwargs: Any) -> Iterator[None]:
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


def _flatten_xs(xs: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """`xs` as tf.gradients takes it, and how to give the result the structure of `xs`."""
    if not isinstance(xs, list | tuple | dict):
        return xs, lambda result: result
    if isinstance(xs, list | tuple) and not any(isinstance(x, list | tuple | dict) for x in xs):
        return list(xs), lambda result: result
    return tf.nest.flatten(xs), lambda result: tf.nest.pack_sequence_as(xs, result)
