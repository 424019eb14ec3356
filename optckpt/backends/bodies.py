"""The bodies of functions, put in the place of their calls."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import handle_data_util

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_functions import called_names
from optckpt.frontends.tf_traced import Reading
from optckpt.frontends.tf_versions import VARIABLE_READS

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_NEVER = ("_noinline", "_XlaMustCompile", "api_implements", "_implements")
"""Attributes of functions that stay calls."""


def may_be_inlined(function: Any) -> bool:
    """Whether TensorFlow itself would put the body of the function in the place of a call."""
    attrs = function.cached_definition.attr
    return not any(name in attrs and (attrs[name].b or attrs[name].s) for name in _NEVER)


def can_be_copied(body: Any) -> bool:
    """Whether a function's graph has all that it needs in itself: see `copied`."""
    arguments = {t.op for t in getattr(body, "inputs", ())}
    return all(
        not tf_ops.is_control_flow_v1(op) and (op in arguments or op.type != "Placeholder")
        for op in body.get_operations()
    )


def copied(body: Any, arguments: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
    """Add the operations of a function to the default graph, with those of functions it calls.

    Operations that neither results nor effects need are left out, as TensorFlow leaves them out
    when it runs a graph. It does not leave out loops and branches: these run, needed or not, and
    hold what they read, on which the order of sums depends (see `optckpt.frontends.tf_sums`).
    Nothing is recorded by tapes. O(operations) calls of TensorFlow.

    Args:
        body: the function's graph.
        arguments: of this graph or of outer ones, one for each of `body.inputs`.

    Returns:
        id(tensor of `body`) -> tensor of the default graph, arguments included.
    """
    return _Copy(body, arguments).made


class _Copy:
    def __init__(self, body: Any, arguments: Sequence[tf.Tensor]) -> None:
        self._graph: Any = tf.compat.v1.get_default_graph()
        self.made = {id(t): a for t, a in zip(body.inputs, arguments, strict=True)}
        self._done: dict[tf.Operation, list[tf.Operation]] = {t.op: [] for t in body.inputs}
        """Operation -> what has to be waited for in its place."""
        reading = Reading(body)
        ends = list(getattr(body, "control_outputs", ()))
        anyhow = filter(_runs_anyhow, body.get_operations())
        needed = set(reading.closure([*(t.op for t in body.outputs), *ends, *anyhow]))
        for op in reading.closure(body.get_operations()):
            if op in needed and op not in self._done:
                self._add(op)
        self.ends = [made for op in ends for made in self._done[op]]

    def _add(self, op: tf.Operation) -> None:
        inputs = [self.made[id(t)] for t in op.inputs]
        before = list(dict.fromkeys(p for c in op.control_inputs for p in self._done[c]))
        with self._graph.control_dependencies(before), _device(self._graph, op.device):
            function = _called(op)
            if function is not None:
                with tf.name_scope(op.name):
                    inner = _Copy(function.graph, inputs)
                found = [inner.made[id(t)] for t in function.graph.outputs[: len(op.outputs)]]
                # As where TensorFlow inlines: results that nobody needs must not be waited for.
                self._done[op] = inner.ends or before
            else:
                made = self._create(op, inputs)
                found = made.outputs
                self._done[op] = [made]
        for t, mine in zip(op.outputs, found, strict=True):
            self.made[id(t)] = mine

    def _create(self, op: tf.Operation, inputs: list[tf.Tensor]) -> tf.Operation:
        for name in called_names(op):
            self._graph._add_function_recursive(tf_ops.find_function(op.graph, name))
        attrs = {key: value for key, value in op.node_def.attr.items() if key != "_class"}
        made = self._graph._create_op_internal(
            op.type,
            inputs,
            [t.dtype for t in op.outputs],
            name=op.name,
            attrs=attrs,
            op_def=op.op_def,
        )
        for t, mine in zip(op.outputs, made.outputs, strict=True):
            mine.set_shape(t.shape)
            if t.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(t, mine)
        return made


def _runs_anyhow(op: tf.Operation) -> bool:
    """Whether TensorFlow runs the operation, or some in what it calls, if nobody needs it."""
    return tf_ops.is_call(op) or (op._is_stateful and op.type not in VARIABLE_READS)


def _device(graph: Any, device: str) -> Any:
    """The device that an operation asks for goes before that of the caller."""
    return graph.device(device) if device else contextlib.nullcontext()


def _called(op: tf.Operation) -> Any:
    """The function whose body can take the place of a call, or None."""
    if op.type not in _CALLS:
        return None
    (name,) = called_names(op)
    function = tf_ops.find_function(op.graph, name)
    graph = getattr(function, "graph", None)
    if graph is None or not may_be_inlined(function) or not can_be_copied(graph):
        return None
    fits = len(graph.inputs) == len(op.inputs) and len(graph.outputs) >= len(op.outputs)
    return function if fits else None
