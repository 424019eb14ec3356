"""A rewritten graph runs only in the way for which it was planned: with XLA, or without.

A tf.function that was traced once is called again from wherever, also from functions that XLA
compiles (or does not): TensorFlow does not trace it anew. Its plan would silently not hold. So an
operation in it fails then, and its name or message says why.
"""

from __future__ import annotations

import tensorflow as tf

WITHOUT_XLA = "planned_without_XLA__trace_this_function_inside_of_the_one_with_jit_compile"
"""Name of the operation that XLA cannot compile."""

FOR_XLA = (
    "this function was planned by optckpt for XLA, while a function with jit_compile=True was "
    "traced, and now runs without XLA, where its memory budget would not be kept: give every "
    "caller a tf.function of its own around the call of optckpt"
)


def bar_xla(graph: tf.Graph, scope: str) -> None:
    """Make every attempt of XLA to compile the function of `graph` fail.

    In a v1 graph, which no such function can call, nothing is done.
    """
    if not hasattr(graph, "control_outputs"):
        return
    name = f"{scope}/{WITHOUT_XLA}"
    if _has(graph, name):
        return
    # XLA has no kernel for strings; without it the graph optimiser makes a constant of this.
    with (
        graph.as_default(),
        tf.control_dependencies(None),
        tf.name_scope(""),
        tf.device("/device:CPU:0"),
    ):
        number = tf.constant(0, name=f"{scope}/zero")
        guard = tf.strings.as_string(number, name=f"{name}/")
    graph.control_outputs.append(guard.op)


def require_xla(graph: tf.Graph, scope: str) -> None:
    """Make the function of `graph` fail at its first step unless XLA compiles it."""
    name = f"{scope}/planned_for_XLA"
    if _has(graph, name):
        return
    # To XLA an assertion is nothing.
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""):
        tf.raw_ops.Assert(
            condition=tf.constant(False, name=f"{scope}/under_XLA"),
            data=[tf.constant(FOR_XLA, name=f"{scope}/reason")],
            name=f"{name}/",
        )


def _has(graph: tf.Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True
