"""Steps: the gradients that are taken in a graph, planned one by one or all together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import backprop, forwardprop_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    UnliftedInitializerVariable,
)
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.ops import gradients_util

from optckpt.backends.bypass import bypass_joins
from optckpt.budget import AnyBudget
from optckpt.config import Config
from optckpt.devices import apply_on_devices, in_replica
from optckpt.errors import CaptureError
from optckpt.frontends.tensorflow import Capture, capture
from optckpt.frontends.tf_devices import Devices
from optckpt.frontends.tf_versions import VARIABLE_READS
from optckpt.inline import inlined
from optckpt.request import Checkpoints, Request
from optckpt.schedule import Plan
from optckpt.sizes import of_inputs, values_of_inputs
from optckpt.solvers.registry import Strategy
from optckpt.xla import refuse_xla

logger = logging.getLogger(__name__)


def plan_gradients(ys: Any, gradients: Any, request: Request) -> None:
    """Let the graph compute `gradients`, which are there already, as `request` says.

    Inside of `whole_step`, which notices all gradients and whose request holds instead, nothing is
    done here. `ys`: what was
    differentiated. `gradients`: a nested structure of tensors, IndexedSlices and Nones. Raises as
    `optckpt.gradients`.
    """
    tensors = _tensors(gradients)
    if not tensors:
        return
    scope = _scope_of(tensors[0].graph)
    if scope is None:
        if is_pushed_forward(tensors):
            raise CaptureError(
                "gradients are taken within a tf.autodiff.ForwardAccumulator, whose products are "
                "computed beside them and would keep in memory what the plan gives up: put "
                "optckpt.whole_step around the accumulator and take the gradients with "
                "tf.GradientTape"
            )
        own = Devices().of(_losses(ys)[0].op) if in_replica() else None
        apply_on_devices(
            lambda device: capture_gradients(ys, gradients, request.settings, device), request, own
        )


def capture_gradients(
    ys: Any, gradients: Any, settings: Config, device: str | None = None
) -> Capture:
    """Capture the step that computes `gradients`, what tf.gradients returned for `ys`.

    `device`: the one to plan for; None: the one with the most bytes.
    """
    targets = _tensors(gradients)
    found: Capture = capture(
        targets[0].graph,
        _losses(ys),
        targets,
        count_from=settings.memory.count_from,
        chain_from=settings.memory.chain_from,
        device=device,
        shapes=of_inputs(targets[0].graph, settings),
        values=values_of_inputs(targets[0].graph),
    )
    return found


@dataclass(eq=False)
class WholeStep:
    """What is planned together: see `whole_step`."""

    request: Request
    graph: tf.Graph
    thread: int | None
    """The thread whose operations these are; None: those of all replicas."""
    begin: int
    """Number of operations that the graph had at the beginning."""
    ys: list[tf.Tensor] = field(default_factory=list)
    gradients: list[tf.Tensor] = field(default_factory=list)
    kept: list[tf.Tensor] = field(default_factory=list)
    is_pushed_forward: bool = False
    """Whether gradients were taken within a tf.autodiff.ForwardAccumulator."""
    elsewhere: list[str] = field(default_factory=list)
    """Functions beside `graph`, called from it, in which gradients were taken."""
    look: Callable[[Capture], None] | None = None
    """Told what was captured; nothing is planned then."""
    creates: bool = False
    """Whether variables were created: tf.function throws such a trace away and traces again."""

    def add(self, ys: Any, gradients: Any) -> None:
        """Note that `gradients` of `ys` are part of the step."""
        self.ys += _losses(ys)
        self.gradients += _tensors(gradients)
        self.is_pushed_forward |= is_pushed_forward(_tensors(gradients))

    def keep(self, tensors: Any) -> None:
        """Note that `tensors` (a nested structure) will be used after the step: returned, say."""
        self.kept += _tensors(tensors)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@contextmanager
def whole_step(
    budget: AnyBudget | None = None,
    *,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    config: Config | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Iterator[WholeStep]:
    """Plan all that is done within the context as one step, when the context ends.

    For use while a tf.function is traced. All gradients that are taken in the context count, by
    `tf.GradientTape`, `tf.gradients` or optckpt's own; so does what the optimizer does with them,
    which with plain `optckpt.gradients` comes on top of the budget. Arguments as those of
    `optckpt.gradients`, and they hold instead of those of calls within.

    Tensors that are used after the context has ended, returned for instance, are to be named by
    `WholeStep.keep`, unless nothing in the context reads them.

    Of several contexts around the same code the outermost holds. A trace in which variables are
    created is not planned: tf.function throws it away and traces the function again.

    Raises:
        CaptureError: if there is no graph of a tf.function, or no gradients were taken in it while
            some were in another one, called from here, whose operations cannot be planned.
        OptckptError: as `optckpt.gradients`, at the beginning or at the end of the context.
    """
    if tf.executing_eagerly():
        raise CaptureError(
            "optckpt.whole_step plans a graph and there is none in eager mode: use it inside a "
            "function decorated with @tf.function"
        )
    refuse_xla()
    request = Request.of(
        budget,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        plan=plan,
        on_plan=on_plan,
    )
    with _open_step(request) as step:
        yield step


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@contextmanager
def seen_step(settings: Config, look: Callable[[Capture], None]) -> Iterator[WholeStep]:
    """As `whole_step`, but nothing is planned: `look` is called with what was captured."""
    with _open_step(Request.of(config=settings), look) as step:
        yield step


@contextmanager
def _open_step(
    request: Request, look: Callable[[Capture], None] | None = None
) -> Iterator[WholeStep]:
    thread = threading.get_ident() if in_replica() else None
    graph = tf.compat.v1.get_default_graph()
    if not getattr(graph, "building_function", False):
        raise CaptureError(
            "optckpt.whole_step plans what a tf.function does; in a v1 graph each session decides "
            "what runs: use optckpt.gradients or optckpt.patch there"
        )
    outer = _scope_of(graph)
    if outer is not None:
        yield outer
        return
    step = WholeStep(request, graph, thread, len(graph.get_operations()), look=look)

    def noted(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        variable = next_creator(**kwargs)
        if isinstance(variable, UnliftedInitializerVariable):
            # What a function that is called here creates has that function traced again, not this.
            step.creates |= tf.compat.v1.get_default_graph() is graph
        return variable

    own_calls = inlined(lambda graph: _scope_of(graph) is step, lambda: len(step.elsewhere))
    with _noticing(step), own_calls, tf.variable_creator_scope(noted):
        yield step
    if step.creates:
        return
    if step.is_pushed_forward:
        logger.warning(
            "gradients are taken within a tf.autodiff.ForwardAccumulator, of whose products less "
            "is known than they need: the step will take more memory than predicted; measure it, "
            "and lower the budget or raise memory.margin by as much"
        )
    if step.gradients:
        _finish(step)
    elif step.elsewhere:
        raise CaptureError(
            "optckpt.whole_step has nothing to plan: the gradients were taken in "
            f"{step.elsewhere[0]!r}, a graph of its own; use optckpt.whole_step in there"
        )
    else:
        logger.warning("nothing was planned: no gradients were taken in optckpt.whole_step")


def _finish(step: WholeStep) -> None:
    memory = step.request.settings.memory
    joined = memory.updates == "early" and bypass_joins(
        step.graph.get_operations()[step.begin :], step.gradients, step.kept
    )
    devices = Devices(step.graph)
    # Replicas share a graph; what the others do is planned with them.
    own = None if step.thread is None else devices.of(step.ys[0].op)
    ends = [op for op in _effects(step) if own is None or devices.of(op) == own]

    def captured(device: str | None) -> Capture:
        found: Capture = capture(
            step.graph,
            step.ys,
            step.gradients,
            keep=step.kept,
            ends=ends,
            early_updates=memory.updates == "early",
            plain_updates_last=bool(joined),
            count_from=memory.count_from,
            chain_from=memory.chain_from,
            device=device,
            shapes=of_inputs(step.graph, step.request.settings),
            values=values_of_inputs(step.graph),
        )
        return found

    if step.look is not None:
        step.look(captured(own))
    else:
        apply_on_devices(captured, step.request, own)


def _effects(step: WholeStep) -> list[tf.Operation]:
    """The operations of the step that a tf.function runs for their effects."""
    return [
        op
        for op in step.graph.get_operations()[step.begin :]
        if op_is_stateful(op) and (op.type not in VARIABLE_READS or _is_awaited(op))
    ]


def _is_awaited(op: tf.Operation) -> bool:
    """Whether what the variable is read with is computed, and the read comes before updates."""
    return len(op.inputs) > 1 and any(t.consumers() for t in op.outputs)


# --- Which gradients are taken in a step -------------------------------------------------------

_open: tuple[WholeStep, ...] = ()
"""Replaced, never changed: other threads may be walking along it."""
_lock = threading.RLock()
_tape_gradient = backprop.GradientTape.gradient
_graph_gradients = gradients_util._GradientsHelper


def _scope_of(graph: tf.Graph) -> WholeStep | None:
    """The open step to which operations belong that this thread adds to `graph`."""
    here = threading.get_ident()
    for step in reversed(_open):
        if step.graph is graph and step.thread in (None, here):
            return step
    return None


@contextmanager
def _noticing(step: WholeStep) -> Iterator[None]:
    """Within the context, gradients that anybody takes in the graph of `step` are added to it."""
    global _open
    with _lock:
        _open += (step,)
        backprop.GradientTape.gradient = _noticed_tape_gradient
        gradients_util._GradientsHelper = _noticed_graph_gradients
    try:
        yield
    finally:
        with _lock:
            _open = tuple(other for other in _open if other is not step)
            if not _open:
                backprop.GradientTape.gradient = _tape_gradient
                gradients_util._GradientsHelper = _graph_gradients


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _noticed_tape_gradient(tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    result = _tape_gradient(tape, target, *args, **kwargs)
    _notice(target, result)
    return result


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _noticed_graph_gradients(ys: Any, *args: Any, **kwargs: Any) -> Any:
    result = _graph_gradients(ys, *args, **kwargs)
    _notice(ys, result)
    return result


def _notice(ys: Any, result: Any) -> None:
    tensors = [t for t in _tensors(result) if hasattr(t, "graph")]
    if not tensors:
        return
    graph = tensors[0].graph
    scope = _scope_of(graph)
    if scope is not None:
        scope.add(ys, tensors)
        return
    outer = graph
    while scope is None and outer is not None:
        outer = getattr(outer, "outer_graph", None)
        scope = None if outer is None else _scope_of(outer)
    if scope is not None:
        scope.elsewhere.append(graph.name)


def is_pushed_forward(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tf.autodiff.ForwardAccumulator is differentiating any of the tensors."""
    return any(forwardprop_util.pack_tangents(list(tensors)).indices)


def _losses(ys: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(y) for y in tf.nest.flatten(ys)]


def _tensors(result: Any) -> list[tf.Tensor]:
    """The component tensors of gradients, without the Nones."""
    return [t for t in tf.nest.flatten(result, expand_composites=True) if t is not None]
