"""A budget for a part: a function whose own forward and backward pass stay within it.

The function is traced together with its gradients and planned as a step of its own. The rewritten
graph is then cut in two: what gives the results, and what gives the gradients. Tensors of the first
that the second reads are what the part keeps in between; the plan has chosen them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from optckpt import part_border, part_keras, part_key, pipeline
from optckpt.arguments import shown
from optckpt.backends.tensorflow import rewrite
from optckpt.budget import Budget
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, OptckptError
from optckpt.frontends.tensorflow import Capture, capture
from optckpt.frontends.tf_ops import is_call
from optckpt.graph import TrainingGraph
from optckpt.halves import Halves, Trace, call_halves, components, cut, is_differentiable
from optckpt.part_plan import PartProblem
from optckpt.request import Checkpoints, Request
from optckpt.schedule import Plan
from optckpt.sizes import of_inputs
from optckpt.solvers.registry import Strategy
from optckpt.xla import is_compiled, refuse_xla

Decorated = Callable[..., Any]

_PARTS = "_optckpt_parts"
"""Attribute of a tf.Graph in which parts are called: {part: {key of its arguments: traces}}."""


def budgeted(
    budget: Budget | int | float | str | None = None,
    *,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    config: Config | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Callable[[Decorated], Decorated]:
    """A decorator that gives a function, a block of a network say, a budget of its own.

    ```python
    @optckpt.budgeted("200MiB")
    def block(x):
        ...
    ```

    Called under a `tf.GradientTape`, in eager code or inside a tf.function (there also with
    `tf.gradients`), the function returns what it did, and its gradients are those it had, bit for
    bit. Between its forward and its backward pass it keeps no more than the plan has it keep: like
    `tf.recompute_grad`, but what is kept is chosen, and what is random or changes a variable is
    executed once: dropout is computed again from the same mask.

    The budget is for the part alone: its arguments, variables and results, what it keeps, computes
    and computes again, and its gradients. What else is on the device does not count. A step with
    several parts needs what each keeps, and the peak of the one that runs. For a budget of the
    whole step use `optckpt.gradients` or `optckpt.whole_step` instead.

    The function is traced and planned once per signature of its arguments (in a tf.function: per
    trace of that), in its given order. Where Keras only asks for shapes (the `call` of a layer, as
    a model is built) nothing is planned yet. Its arguments and results are tensors, or structures
    of them, with the masks that Keras hangs on them; anything else among the arguments is a
    constant, and results may be None. Constants are compared by value (sets and the like also after
    they were changed in place), objects without one, as layers are, by identity; for one that can
    be neither hashed nor copied and compared, the function is traced and planned in each call.

    Gradients flow to its arguments and to the trainable variables it uses, those among its
    arguments included; not to tensors it takes from the code around it, nor to variables that are
    not trainable, though a tape watches them (None). Where the loss depends on some of the results,
    and these not on an argument or variable, its gradient is zeros, and not None. Second
    derivatives are refused when they are taken (where TensorFlow finds that out only as a step
    runs, by a tf.errors.InvalidArgumentError that says the same), and so is a
    `tf.autodiff.ForwardAccumulator`: the ways in for a whole step have both.

    Args:
        budget: bytes, a size, or a share of what the part needs when it is not rewritten.
        max_overhead, strategy, checkpoints, config, on_plan: as for `optckpt.gradients`.

    Raises:
        OptckptError: if an argument is not what it should be. The function raises what
            `optckpt.gradients` raises, when it is traced, and CaptureError if it takes or returns
            something that holds tensors and is none (a tf.TensorArray, a tensor of dtype variant),
            adds a loss of Keras (`add_loss`, an `activity_regularizer`),
            takes a tensor from a tf.function around it, or is used within a
            ForwardAccumulator or a function that XLA compiles. Second derivatives raise it, too.
    """
    if callable(budget):
        raise BudgetError(
            "optckpt.budgeted takes a budget and gives a decorator: write "
            '@optckpt.budgeted("200MiB") above the function'
        )
    request = Request.of(
        budget,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        on_plan=on_plan,
    )

    def decorate(fn: Decorated) -> Decorated:
        if not callable(fn):
            raise OptckptError(f"optckpt.budgeted decorates a function, got {shown(fn)}")
        part = _Part(fn, request)

        @wraps(fn)
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def call(*args: Any, **kwargs: Any) -> Any:
            return part(args, kwargs)

        return call

    return decorate


@dataclass(frozen=True, eq=False)
class _Traced:
    """A part that can be called as long as its layers are what they were."""

    halves: Halves
    trainable: list[tuple[Any, bool]]
    """Each layer that it calls, and whether that was trainable: batch normalization asks."""
    left: dict[str, Any]
    """What its layers left for those that are called next."""

    def holds(self) -> bool:
        return all(layer.trainable == trainable for layer, trainable in self.trainable)


class _Part:
    """A decorated function."""

    def __init__(self, fn: Decorated, request: Request) -> None:
        status = tf.__internal__.autograph.control_status_ctx()
        convert = tf.__internal__.autograph.tf_convert
        self._fn = convert(fn, status, convert_by_default=True)
        self._plain = fn
        self._name = getattr(fn, "__name__", "part")
        self._request = request
        self._eager: dict[Any, list[_Traced]] = {}

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if part_keras.is_symbolic():
            return self._fn(*args, **kwargs)
        part_keras.refuse_stateless(self._name)
        refuse_xla()
        self._refuse_compiled()
        part_border.refuse_arguments(self._name, self._plain, (args, kwargs))
        leaves = [
            tf.convert_to_tensor(leaf) if part_key.is_array(leaf) else leaf
            for leaf in tf.nest.flatten((args, kwargs))
        ]
        places = [
            i
            for i, leaf in enumerate(leaves)
            if tf.is_tensor(leaf) and not part_key.is_variable(leaf)
        ]
        tensors = [leaves[i] for i in places]
        # Masks are further arguments, and further results.
        masks = {
            i: tf.convert_to_tensor(mask)
            for i in places
            if (mask := part_keras.mask_of(leaves[i])) is not None
        }
        tensors += masks.values()
        key = part_key.key_of((args, kwargs), leaves, places, masks)
        known = [] if key is None else self._known().setdefault(key, [])
        traced = next((t for t in known if t.holds()), None)
        if traced is None:

            def with_tensors(*given: tf.Tensor) -> Any:
                filled = list(leaves)
                for i, t in zip(places, given[: len(places)], strict=True):
                    filled[i] = t
                for i, mask in zip(masks, given[len(places) :], strict=True):
                    part_keras.hang_mask(filled[i], mask)
                again, more = tf.nest.pack_sequence_as((args, kwargs), filled)
                return self._fn(*again, **more)

            traced = self._traced(with_tensors, tensors)
            known.append(traced)
        else:
            part_keras.hand_down(traced.left)
        structure = traced.halves.trace.structure
        results = iter(call_halves(traced.halves, tensors))
        returned = [None if t is None else next(results) for t in tf.nest.flatten(structure)]
        value, hung = tf.nest.pack_sequence_as(structure, returned)
        for t, mask in zip(tf.nest.flatten(value), hung, strict=True):
            part_keras.hang_mask(t, mask)
        return value

    def _refuse_compiled(self) -> None:
        if not tf.executing_eagerly() and is_compiled(tf.compat.v1.get_default_graph()):
            raise CaptureError(
                f"{self._name!r} has a budget of its own and is called in a function that XLA "
                "compiles (jit_compile=True), which merges the part with the rest and keeps no "
                "budget of it: take the gradients of the whole step with optckpt.gradients or "
                "optckpt.GradientTape instead of optckpt.budgeted, or compile without XLA"
            )

    def _known(self) -> dict[Any, list[_Traced]]:
        """What has been planned of this part where it is called."""
        if tf.executing_eagerly():
            return self._eager
        # What is traced inside of a graph may have to do with that graph, and ends with it.
        graph = tf.compat.v1.get_default_graph()
        parts: dict[_Part, dict[Any, list[_Traced]]] = getattr(graph, _PARTS, {})
        setattr(graph, _PARTS, parts)
        return parts.setdefault(self, {})

    def _traced(self, fn: Decorated, tensors: Sequence[tf.Tensor]) -> _Traced:
        traces: list[Trace] = []

        def both(*given: tf.Tensor) -> None:
            traces.append(self._trace(fn, given, layers))

        # Its graph is the source of what the halves are made of; it is never called itself.
        with _recording(), part_keras.noting_layers() as layers:
            tf.function(both, autograph=False).get_concrete_function(*tensors)
        left = part_keras.handed_down()
        trainable = [(layer, layer.trainable) for layer in layers]
        return _Traced(cut(traces[-1], self._name), trainable, left)

    def _trace(self, fn: Decorated, given: Sequence[tf.Tensor], layers: Sequence[Any]) -> Trace:
        """The function with its gradients, planned; `layers` has those of Keras that it called."""
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            tape.watch([t for t in given if is_differentiable(t)])
            value = fn(*given)
        part_keras.refuse_losses(self._name, layers, graph)
        returned = tf.nest.flatten(value)
        part_border.refuse_results(self._name, returned)
        structure = (value, [part_keras.mask_of(t) for t in returned])
        results = [tf.convert_to_tensor(t) for t in tf.nest.flatten(structure) if t is not None]
        results = [t if t.graph is graph else tf.identity(t) for t in results]
        begin = len(graph.get_operations())
        ys = [t for t in results if is_differentiable(t)]
        slopes = [tf.compat.v1.placeholder(t.dtype, t.shape, "slope") for t in ys]
        variables = list(tape.watched_variables())
        sources = [*given, *variables]
        gradients: list[Any] = [None] * len(sources)
        if ys:
            wanted = [i for i, s in enumerate(sources) if is_differentiable(s)]
            found = tape.gradient(ys, [sources[i] for i in wanted], output_gradients=slopes)
            for i, g in zip(wanted, found, strict=True):
                gradients[i] = g
        trace = Trace(graph, list(given), structure, results, slopes, variables, gradients, begin)
        part_border.refuse_captures(self._name, graph)
        self._plan(trace, ys)
        return trace

    def _plan(self, trace: Trace, ys: Sequence[tf.Tensor]) -> None:
        """Rewrite the traced graph within the budget."""
        gradients = components(trace.gradients)
        # An argument or a slope that is passed on is not computed.
        computed = [g for g in gradients if g.op.type != "Placeholder"]
        if not computed:
            return
        request = self._request
        settings = request.settings
        found = capture(
            trace.graph,
            ys,
            computed,
            keep=[t for t in trace.results if not is_differentiable(t)],
            count_from=settings.memory.count_from,
            chain_from=settings.memory.chain_from,
            shapes=of_inputs(trace.graph, settings, list(zip(trace.slopes, ys, strict=True))),
        )
        graph = replace(pipeline.measure(found, settings), resident=found.graph.resident)
        before = set(trace.graph.get_operations()[: trace.begin_backward])
        backward = frozenset(u for u, unit in enumerate(found.units) if not before.issuperset(unit))
        graph = _reading_what_is_given(found, _reading_once(found, graph), backward)
        plan = self._planned(found, graph, backward)
        rewrite(found, plan.schedule)
        if request.on_plan is not None:
            request.on_plan(plan)

    def _planned(self, found: Capture, graph: TrainingGraph, backward: frozenset[int]) -> Plan:
        request, settings = self._request, self._request.settings
        # Another order might have results wait for slopes.
        options = replace(
            pipeline._solve_options(settings, found, request.checkpoints), order="fixed"
        )
        problem = PartProblem(
            name=self._name,
            graph=graph,
            backward=backward,
            plain_graph=found.plain(graph),
            budget=request.budget_on(found.device),
            strategy=request.strategy,
            options=options,
            margin=settings.memory.margin,
            allocator=pipeline.allocator_of(found),
            max_overhead=request.max_overhead,
            repeat=settings.solver.repeat,
        )
        return problem.solve()


def _reading_once(found: Capture, graph: TrainingGraph) -> TrainingGraph:
    """`graph` without executions that read variables again: by the backward pass these may have
    been assigned, outside of the part."""
    operations = [
        replace(op, repeatable=False, repeat_before=())
        if any(t.dtype == tf.resource for o in unit for t in o.inputs)
        else op
        for op, unit in zip(graph.operations, found.units, strict=True)
    ]
    return replace(graph, operations=tuple(operations))


def _reading_what_is_given(
    found: Capture, graph: TrainingGraph, backward: frozenset[int]
) -> TrainingGraph:
    """`graph` with reads of what calls of the backward pass are given and do not use: it is kept
    for them."""
    operations = list(graph.operations)
    for u in backward:
        op = operations[u]
        given = found.buffers_of(t for o in found.units[u] if is_call(o) for t in o.inputs)
        if not found.away[u]:
            operations[u] = replace(op, reads=tuple(dict.fromkeys((*op.reads, *given))))
    return replace(graph, operations=tuple(operations))


@contextmanager
def _recording() -> Iterator[None]:
    """Tapes record, also where the caller has stopped that, as tf.recompute_grad does: gradients
    of a part are traced whoever calls it first."""
    if not pywrap_tfe.TFE_Py_TapeSetIsStopped():
        yield
        return
    pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_TapeSetStopOnThread()
