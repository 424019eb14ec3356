"""Tensors by another name: the Identity operations that a rewrite adds."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import ops

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_traced import changes, next_mark


def input_name(reader: tf.Operation, scope: str) -> str:
    """What an Identity for one reader is called."""
    return f"{scope}/{reader.name.removeprefix(scope + '/')}_input"


def identity(
    tensor: tf.Tensor, beside: tf.Operation, name: str, waits: Sequence[tf.Operation] = ()
) -> tf.Tensor:
    """The tensor by another name, not before the operations `waits` have ended.

    It is on the device and in the control flow context of `beside`.
    """
    graph = beside.graph
    definition = node_def_pb2.NodeDef(
        name=graph.unique_name(name), op="Identity", device=beside.device
    )
    definition.attr["T"].type = tensor.dtype.as_datatype_enum
    definition.attr[tf_ops.MARK].s = next_mark()
    made = ops.Operation.from_node_def(
        definition, graph, inputs=[tensor], output_types=[tensor.dtype], control_inputs=list(waits)
    )
    context = beside._get_control_flow_context()
    if context is not made._get_control_flow_context():
        made._set_control_flow_context(context)
    known = changes(graph)
    known.added[made] = None
    known.controls.update((p, made) for p in waits)
    return made.outputs[0]
