"""What TensorFlow merges finds the same partner in every execution.

The oneDNN pass merges a BiasAddGrad with a Conv2DBackpropFilter that reads the same tensor. If the
two are executed again from that very tensor there are several to choose from; it takes whichever
it meets first, in an order that differs from one time to the next, and merges nothing if that is
not the right one. The last bits of the bias' gradient tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import ops

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_traced import changes, next_mark


def separate_partners(units: Iterable[Sequence[tf.Operation]], scope: str) -> int:
    """Let each execution of a BiasAddGrad with its partner read the gradient by a name of its own.

    `units`: the operations that stay together, each execution. Returns how many were separated
    from others; their input is now an Identity, which takes no memory.
    """
    seen: set[int] = set()
    count = 0
    for unit in units:
        first = unit[0]
        if first.type != "BiasAddGrad":
            continue
        shared = first.inputs[0]
        if id(shared) in seen:
            alias = _identity(shared, first, scope)
            for op in unit:
                for i, t in enumerate(op.inputs):
                    if t is shared:
                        changes(op.graph).redirect(op, i, alias)
            count += 1
        seen.add(id(shared))
    return count


def _identity(tensor: tf.Tensor, reader: tf.Operation, scope: str) -> tf.Tensor:
    graph = reader.graph
    definition = node_def_pb2.NodeDef(
        name=graph.unique_name(f"{scope}/{reader.name.removeprefix(scope + '/')}_input"),
        op="Identity",
        device=reader.device,
    )
    definition.attr["T"].type = tensor.dtype.as_datatype_enum
    definition.attr[tf_ops.MARK].s = next_mark()
    made = ops.Operation.from_node_def(
        definition, graph, inputs=[tensor], output_types=[tensor.dtype], control_inputs=[]
    )
    context = reader._get_control_flow_context()
    if context is not made._get_control_flow_context():
        made._set_control_flow_context(context)
    changes(graph).added[made] = None
    return made.outputs[0]
