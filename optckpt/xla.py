"""Whether XLA will compile what is being traced, and where a plan for it cannot hold."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_ops import XLAControlFlowContext

from optckpt.errors import CaptureError
from optckpt.frontends.tensorflow import Capture


def refuse_xla() -> None:
    """Raise CaptureError if XLA will compile what is being traced in a way that cannot be planned.

    A whole function with jit_compile=True can be. Parts that TensorFlow picks and compiles each by
    itself (auto-clustering) or that are marked (jit_scope, xla.experimental.compile) cannot.
    """
    graph = tf.compat.v1.get_default_graph()
    for around in _contexts(graph):
        if type(around) is not XLAControlFlowContext:
            raise CaptureError(
                f"the step is compiled by {type(around).__name__}, for which optckpt has no plan: "
                "compile it with tf.function(jit_compile=True) instead, or not by XLA"
            )
    if not is_compiled(graph):
        clustering = _auto_clustering()
        if clustering:
            raise CaptureError(
                f"XLA's auto-clustering is on ({clustering}): it compiles parts of the step that "
                "no plan knows of, and no budget would be kept: switch it off with "
                "tf.config.optimizer.set_jit(False), or compile the whole step with "
                "tf.function(jit_compile=True), for which budgets hold"
            )


def refuse_marked(found: Capture) -> None:
    """Raise CaptureError if operations of the step are marked to be compiled by XLA (jit_scope)."""
    if is_compiled(found.tf_graph):
        return
    for unit, chained in zip(found.units, found.chained, strict=True):
        if chained and _is_marked(unit[0]):
            raise CaptureError(
                f"operation {unit[0].name!r} is marked for XLA by tf.xla.experimental.jit_scope; "
                "clusters of such operations are in no plan, and no budget would be kept: leave "
                "the scope out, or compile the whole step with tf.function(jit_compile=True)"
            )


def is_compiled(graph: tf.Graph) -> bool:
    """Whether XLA compiles the function that is being traced into `graph`, as a whole.

    TensorFlow keeps a note of it in the graph around only if the function is traced because it is
    called. Otherwise (get_concrete_function) none but the callers know. Where neither does, the
    guard of the rewritten graph (`optckpt.backends.xla_guards`) makes the compilation fail.
    """
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        return True
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if getattr(owner, "_jit_compile", None) is True and hasattr(owner, "python_function"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _contexts(graph: tf.Graph) -> Iterator[XLAControlFlowContext]:
    """The XLA contexts around what is being added to `graph`."""
    while graph is not None:
        around = graph._get_control_flow_context()
        while around is not None:
            if around.IsXLAContext():
                yield around
            around = around.outer_context
        graph = graph.outer_graph if isinstance(graph, func_graph.FuncGraph) else None


def _auto_clustering() -> str:
    """Where auto-clustering has been switched on; empty if it has not."""
    if tf.config.optimizer.get_jit():
        return "tf.config.optimizer.set_jit"
    flag = re.search(r"--tf_xla_auto_jit=(\S+)", os.environ.get("TF_XLA_FLAGS", ""))
    if flag and flag.group(1) not in ("0", "-1"):
        return f"TF_XLA_FLAGS={flag.group(0)}"
    return ""


def _is_marked(op: tf.Operation) -> bool:
    try:
        return bool(op.get_attr("_XlaCompile"))
    except ValueError:
        return False
