"""What TensorFlow's graph optimiser (grappler) must leave as it is in a graph that was rewritten.

It runs after the rewrite and knows nothing of it: to compute the same from fewer operations it
lets them read other tensors than planned, which then live longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_traced import changes

KEEP = "_grappler_do_not_remove"
"""Attribute that makes the graph optimiser treat an operation as one whose result is returned."""


def hide_permutations(graph: tf.Graph, chain: Sequence[tf.Operation]) -> None:
    """Keep the graph optimiser from taking out pairs of transpositions that cancel.

    Who reads the second would read what the first reads, as soon as that is there, and so hold it
    from then on: layers that swap time and batch, one after the other (recurrent ones), would be
    executed again too early. It does not look at a permutation that might be fed.
    """
    hidden: dict[tuple[int, str], tf.Tensor] = {}
    for op in chain:
        if op.type != "Transpose":
            continue
        source = op.inputs[0].op
        while source.type in tf_ops.SIMPLE_VIEWS:
            source = source.inputs[0].op
        if source.type != "Transpose" or op.inputs[1].op._get_control_flow_context() is not None:
            continue
        key = (id(op.inputs[1]), op.device)
        if key not in hidden:
            with graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                hidden[key] = tf.compat.v1.placeholder_with_default(
                    op.inputs[1], op.inputs[1].shape, name="optckpt/permutation"
                )
        changes(graph).redirect(op, 1, hidden[key])


def protect(chain: Iterable[tf.Operation]) -> None:
    """Keep the graph optimiser from computing something else than the chained operations.

    It moves constants through trees of products and sums, where one consumer then reads an
    earlier tensor than before: tensors live on beyond what was planned (a GPT: +14 %; ten dense
    layers with dropout: +10 %) and the last bits of results change. The constant, made in the
    place of a chained operation, also keeps that one's control edges; merged with an equal one it
    closes a cycle, and the optimiser gives up with an error in the log.

    The function's list of operations that must run (`FuncGraph.control_outputs`) would protect
    them, too, but not where the function is called by another, into which it is inlined before the
    optimiser runs (all that Keras trains); nor is there one in a v1 graph.

    Operations that it merges into faster kernels or replaces by others are left to it: it would
    make the replacement and keep the original beside it, computed for nobody.
    """
    keep = attr_value_pb2.AttrValue(b=True)
    for op in chain:
        if op.type not in tf_ops.MERGED_BY_OPTIMIZER and not tf_ops.is_replaced_by_optimizer(op):
            op._set_attr(KEEP, keep)
