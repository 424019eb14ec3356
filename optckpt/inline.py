"""Functions that a step calls become part of it.

A call of a tf.function is one operation to a plan: all or nothing of it can be executed again,
while everything in it is handed on to its gradient. TensorFlow puts the bodies of such functions in
the place of the calls when it runs a graph; here that is done when the graph is traced, so that
what they contain can be planned.

To a tape, a body stays one operation. Its gradient is the one that TensorFlow derives of the
function, and the body of that takes the place of its call, too: the same terms are added in the
same order. Where such a gradient cannot be foreseen, a call stays a call (see `inlined`).
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager import backprop_util, record
from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function
from tensorflow.python.ops import default_gradient, gradients_util, resource_variable_ops

from optckpt.backends.bodies import can_be_copied, copied, may_be_inlined

logger = logging.getLogger(__name__)

_call = polymorphic_function.Function.__call__
_call_flat = concrete_function.ConcreteFunction._call_flat
_lock = threading.RLock()
_open: list[_Inlined] = []
_takers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""tf.function -> whether it takes gradients, of those that have been looked into."""

Wanted = Callable[[tf.Graph], bool]


class _Inlined:
    def __init__(self, graphs: Wanted, gradients_elsewhere: Callable[[], int]) -> None:
        self.graphs = graphs
        self.gradients_elsewhere = gradients_elsewhere


@contextmanager
def inlined(graphs: Wanted, gradients_elsewhere: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Within the context, tf.functions called while one of `graphs` is traced become part of it.

    That is so for functions that are called while one tf.GradientTape, which is not persistent,
    watches their arguments or variables, and for functions that take gradients themselves while no
    tape is there. Left as calls are the others, functions that XLA compiles, those marked as never
    to be inlined (`_noinline`) or as implementations of an interface, and what cannot be
    differentiated.

    Args:
        graphs: whether a graph, in this thread, is one of them.
        gradients_elsewhere: how often gradients have been taken in functions called from there.
    """
    mine = _Inlined(graphs, gradients_elsewhere)
    with _lock:
        _open.append(mine)
        polymorphic_function.Function.__call__ = _inlined_call
        concrete_function.ConcreteFunction._call_flat = _inlined_call_flat
    try:
        yield
    finally:
        with _lock:
            _open.remove(mine)
            if not _open:
                polymorphic_function.Function.__call__ = _call
                concrete_function.ConcreteFunction._call_flat = _call_flat


def _wanted_by() -> _Inlined | None:
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return next((one for one in tuple(_open) if one.graphs(graph)), None)


# --- Functions that are differentiated ----------------------------------------------------------


def _inlined_call_flat(function: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
    """`ConcreteFunction._call_flat` by way of the function's body, where that is wanted."""
    pair = None
    if _wanted_by() is not None:
        args = [*tensor_inputs, *captured_inputs]
        pair = _forward_and_backward(function, args)
    if pair is None:
        return _call_flat(function, tensor_inputs, captured_inputs)
    body, backward = pair
    for t, mine in zip(tensor_inputs, body.inputs, strict=False):
        if t.dtype not in (tf.resource, tf.variant) and not mine.shape.is_compatible_with(t.shape):
            return _call_flat(function, tensor_inputs, captured_inputs)
    count = function._delayed_rewrite_functions._num_inference_outputs
    scope = _scope_name(body.name)
    with record.stop_recording(), tf.name_scope(scope):
        made = copied(body, args)
        # An argument that is handed on is another tensor to the tape.
        outputs = [tf.identity(made[id(t)]) for t in body.outputs[:count]]

    def gradient(*gradients: Any) -> Any:
        if not backward.outputs:
            return backward.structured_outputs
        given = [
            default_gradient.zeros_like(t) if g is None else tf.convert_to_tensor(g)
            for g, t in zip(gradients, outputs, strict=True)
            if backprop_util.IsTrainable(t)
        ]
        kept = [made.get(id(t), t) for t in backward.captured_inputs]
        graph = backward.graph
        with record.stop_recording(), tf.name_scope(f"gradients/{scope}"):
            found = copied(graph, [*given, *kept])
        return backward.function_type.pack_output([found[id(t)] for t in graph.outputs])

    name = function._inference_function.cached_definition.signature.name
    record.record_operation(name, outputs, args, gradient)
    return function.function_type.pack_output(outputs)


def _forward_and_backward(function: Any, args: list[Any]) -> tuple[Any, Any] | None:
    """A function's graph and the function that TensorFlow derives from it; None: leave the call."""
    inference = function._inference_function
    delayed = function._delayed_rewrite_functions
    if not may_be_inlined(inference) or not delayed._num_inference_outputs:
        return None
    if inference._call_options.control_captures:
        return None
    for v in function.graph.variables:
        resource_variable_ops.variable_accessed(v)
    first = gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER
    if gradients_util.PossibleTapeGradientTypes(args) != first:
        return None
    body = function.graph
    if not can_be_copied(body):
        return None
    try:
        # Before the body is copied: this adds outputs to loops, branches and calls in it.
        _, backward = delayed.forward_backward()
    except Exception as error:  # Whatever the gradients of its operations raise.
        logger.debug("function %r stays a call, without a gradient: %s", body.name, error)
        return None
    return (body, backward) if can_be_copied(body) and can_be_copied(backward.graph) else None


def _scope_name(name: str) -> str:
    text = re.sub(r"_\d+$", "", re.sub(r"^_*(inference_|forward_)?", "", name))
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text).lstrip("_.-") or "function"


# --- Functions that take gradients --------------------------------------------------------------


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _inlined_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.function.__call__`, traced into the graph if it takes gradients.

    No gradient goes through such a function, so that it does not matter in which graph its
    operations are differentiated.
    """
    one = _wanted_by()
    if one is None or record.could_possibly_record() or not _is_plain(function):
        return _call(function, *args, **kwargs)
    if not _takes_gradients(function, one, args, kwargs):
        return _call(function, *args, **kwargs)
    scope = _scope_name(function._name)
    with tf.name_scope(scope):
        if not function._autograph:
            return function.python_function(*args, **kwargs)
        options = converter.ConversionOptions(
            recursive=True,
            optional_features=function._experimental_autograph_options,
            user_requested=True,
        )
        # Whoever calls it may not be converted.
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options):
            return api.converted_call(function.python_function, args, kwargs, options=options)


def _takes_gradients(function: Any, one: _Inlined, args: Any, kwargs: Any) -> bool:
    """Whether gradients are taken in a function: found out once, by tracing it."""
    known = _takers.get(function)
    if known is None:
        before = one.gradients_elsewhere()
        new = function
        if function.experimental_get_tracing_count():
            # What has been traced is not traced again, and nobody may have looked.
            new = tf.function(function.python_function, autograph=function._autograph)
        new.get_concrete_function(*args, **kwargs)
        known = _takers[function] = one.gradients_elsewhere() > before
    return known


def _is_plain(function: Any) -> bool:
    return (
        not function._jit_compile and function.input_signature is None and not function._attributes
    )
