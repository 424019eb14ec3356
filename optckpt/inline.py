"""Functions that a step calls are traced into the step itself.

A call of a tf.function is one operation to a plan: all or nothing of it can be executed again,
while everything in it is handed on to its gradient. TensorFlow puts the bodies of such functions in
the place of the calls when it runs a graph; here that is done when the graph is traced, so that
what they contain can be planned.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api
from tensorflow.python.eager.polymorphic_function import polymorphic_function

_call = polymorphic_function.Function.__call__
_lock = threading.RLock()
_open: list[Callable[[tf.Graph], bool]] = []


@contextmanager
def inlined(graphs: Callable[[tf.Graph], bool]) -> Iterator[None]:
    """Within the context, tf.functions called while one of `graphs` is traced become part of it.

    `graphs`: whether a graph, in this thread, is one of them. Left as calls are functions that XLA
    compiles, those with an `input_signature` (which converts their arguments), and those marked as
    never to be inlined (`_noinline`) or as implementations of an interface.
    """
    with _lock:
        _open.append(graphs)
        polymorphic_function.Function.__call__ = _inlined_call
    try:
        yield
    finally:
        with _lock:
            _open.remove(graphs)
            if not _open:
                polymorphic_function.Function.__call__ = _call


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _inlined_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if tf.executing_eagerly() or not _is_plain(function):
        return _call(function, *args, **kwargs)
    graph = tf.compat.v1.get_default_graph()
    if not any(is_one(graph) for is_one in tuple(_open)):
        return _call(function, *args, **kwargs)
    scope = re.sub(r"[^A-Za-z0-9_.-]", "_", function._name).lstrip("_.-") or "function"
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


def _is_plain(function: Any) -> bool:
    return (
        not function._jit_compile and function.input_signature is None and not function._attributes
    )
