"""Sizes that depend on the data: as the arguments at hand make them, or else bounded.

Where a size follows from the arguments of the call that is being traced (a range up to the longest
row of a ragged tensor), it is computed from these: like unknown dimensions of the arguments, it
holds for what was seen. Elsewhere there may be a bound: `tf.where` returns at most as many rows as
there are elements, `tf.unique` at most as many values. A step planned at these bounds keeps within
its budget whatever the data are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from optckpt.frontends import tf_ops

log = logging.getLogger("optckpt.frontends.tf_data_sizes")

Values = Mapping[int, tf.Tensor]
"""id(placeholder) -> the tensor that was given for it."""
Fed = Mapping[tf.Operation, tf.Tensor]
"""Placeholder -> the tensor that was given for it."""

BOUNDED = tf_ops.words("""
    DynamicPartition ListDiff NonMaxSuppressionV3 NonMaxSuppressionV4 Unique UniqueV2
    UniqueWithCounts UniqueWithCountsV2 Where
    """)
"""Types of operations whose outputs have as many rows as the data make, up to a known number."""

_MOST_OPERATIONS = 5000
_MOST_ELEMENTS = 1 << 24


def bounds(op: tf.Operation) -> list[tf.TensorShape]:
    """The largest shapes of the outputs of an operation of a type in `BOUNDED`.

    Shapes stay as they are where those of the inputs do not tell.
    """
    first = op.inputs[0].shape
    count = tf_ops.element_count(op.inputs[0])
    if op.type == "Where" and count is not None:
        return [tf.TensorShape([count, first.rank])]
    if op.type == "DynamicPartition":
        n, partitions = tf_ops.element_count(op.inputs[1]), op.inputs[1].shape
        if n is not None and first.rank is not None:
            return [tf.TensorShape([n, *first[partitions.rank :]])] * len(op.outputs)
    if op.type.startswith("NonMaxSuppression"):
        most = tf_ops.constant(op.inputs[2])
        rows = first[0] if first.rank else None
        if most and rows is not None:
            n = min(most[0], rows)
            return [_filled(t.shape, n) for t in op.outputs]
    if (op.type.startswith("Unique") or op.type == "ListDiff") and first.rank == 1:
        return [_filled(t.shape, count) for t in op.outputs]
    return [t.shape for t in op.outputs]


def _filled(shape: tf.TensorShape, rows: int | None) -> tf.TensorShape:
    """`shape` with `rows` in the place of its first dimension, if that is unknown."""
    if shape.rank is None or shape.rank == 0 or shape[0] is not None:
        return shape
    return tf.TensorShape([rows, *shape[1:]])


def seen(copies: Mapping[tf.Operation, tf.Operation], fed: Fed) -> dict[int, tf.TensorShape]:
    """Shapes of tensors that follow from arguments, where no shape of an input is unknown any more.

    Args:
        copies: operation of a graph -> its copy with sizes filled in.
        fed: what is known of the copies of placeholders.

    Returns:
        {id(tensor of the graph): shape}; of what depends on these shapes, nothing is said yet.
    """
    found: dict[int, tf.TensorShape] = {}
    if not fed:
        return found
    for op, copy in copies.items():
        if all(tf_ops.element_count(t) is not None for t in copy.outputs) or tf_ops.is_call(op):
            continue
        if any(tf_ops.element_count(t) is None for t in copy.inputs) or not copy.inputs:
            continue
        for t, mine, shape in zip(op.outputs, copy.outputs, of(copy, fed), strict=False):
            if shape.is_fully_defined() and tf_ops.element_count(mine) is None:
                found[id(t)] = shape
    if found:
        log.info("%d sizes are as the data of this call make them", len(found))
    return found


def of(op: tf.Operation, fed: Fed) -> list[tf.TensorShape]:
    """The shapes of what `op` computes from what is fed; empty if that does not tell."""
    if not fed:
        return []
    needed = [t for t in op.inputs if t.dtype.is_integer or t.dtype == tf.bool]
    nodes = _makers(needed, fed)
    if nodes is None:
        return []
    numbers = _computed(op.graph, nodes, needed, fed)
    # What it reads beside numbers need not be known: shape inference looks at numbers only.
    with tf.Graph().as_default() as scratch:
        known = {id(t): tf.constant(n) for t, n in zip(needed, numbers, strict=True)}
        inputs = [
            known[id(t)] if id(t) in known else tf.compat.v1.placeholder(t.dtype, t.shape)
            for t in op.inputs
        ]
        node = _definition(op)
        del node.input[:]
        made = tf.Operation.from_node_def(node, scratch, inputs)
        shapes = [t.shape for t in made.outputs]
    if all(shape.is_fully_defined() for shape in shapes) or len(needed) < len(op.inputs):
        return shapes
    # All that it reads is known, and so is what it computes.
    nodes = _makers(op.outputs, fed)
    if nodes is None:
        return shapes
    return [tf.TensorShape(n.shape) for n in _computed(op.graph, nodes, op.outputs, fed)]


def _makers(tensors: Sequence[tf.Tensor], fed: Fed) -> list[tf.Operation] | None:
    """The operations that compute `tensors` from what is fed, none after one that reads it.

    None if they depend on anything else, or have effects, or are many or large.
    """
    done: dict[tf.Operation, None] = {}
    for op in _inputs_first([t.op for t in tensors], fed):
        if op in fed:
            done[op] = None
            continue
        if op.type in ("Placeholder", "PlaceholderWithDefault") or tf_ops.is_call(op):
            return None
        if op._is_stateful or tf_ops.is_control_flow_v1(op):
            return None
        if any((tf_ops.element_count(t) or 0) > _MOST_ELEMENTS for t in op.outputs):
            return None
        done[op] = None
        if len(done) > _MOST_OPERATIONS:
            return None
    return list(done)


def _inputs_first(ends: Sequence[tf.Operation], fed: Fed) -> Iterator[tf.Operation]:
    begun: set[tf.Operation] = set()
    stack = [(op, False) for op in ends]
    while stack:
        op, ready = stack.pop()
        if ready:
            yield op
        elif op not in begun:
            begun.add(op)
            stack.append((op, True))
            # Of the shape of a tensor, nothing but the shape is needed.
            if op not in fed and not _is_known_shape(op):
                stack += [(t.op, False) for t in op.inputs]


def _is_known_shape(op: tf.Operation) -> bool:
    return op.type in ("Shape", "ShapeN", "Size", "Rank") and all(
        tf_ops.element_count(t) is not None for t in op.inputs
    )


def _computed(
    graph: tf.Graph,
    nodes: Sequence[tf.Operation],
    wanted: Sequence[tf.Tensor],
    fed: Fed,
) -> list[Any]:
    """The values of `wanted`, as arrays."""
    definition = graph_pb2.GraphDef()
    definition.versions.CopyFrom(graph.graph_def_versions)
    arguments, shapes = [], []
    for op in nodes:
        if op in fed:
            arguments.append(op)
        elif _is_known_shape(op):
            shapes += op.outputs
        else:
            node = _definition(op)
            read = [text for text in node.input if not text.startswith("^")]
            del node.input[:]
            node.input.extend(read)
            node.device = ""
            definition.node.append(node)
    names = {text if ":" in text else f"{text}:0" for n in definition.node for text in n.input}

    def run(*given: tf.Tensor) -> list[tf.Tensor]:
        known = {op.outputs[0].name: t for op, t in zip(arguments, given, strict=True)}
        known.update((t.name, _known_shape(t)) for t in shapes)
        rest = [t.name for t in wanted if t.name not in known]
        with tf.device("CPU:0"):
            inputs = {name: t for name, t in known.items() if name in names}
            computed = tf.graph_util.import_graph_def(definition, inputs, rest, name="")
        results = dict(zip(rest, computed or (), strict=True)) | known
        return [results[t.name] for t in wanted]

    with tf.init_scope():
        specs = [tf.TensorSpec(fed[op].shape, fed[op].dtype) for op in arguments]
        function = tf.compat.v1.wrap_function(run, specs)
        return [t.numpy() for t in function(*(fed[op] for op in arguments))]


def _definition(op: tf.Operation) -> node_def_pb2.NodeDef:
    """That of `op`, without what only means something in its graph."""
    node = op.node_def
    node.attr.pop("_class", None)
    node.attr.pop("_output_shapes", None)
    return node


def _known_shape(tensor: tf.Tensor) -> tf.Tensor:
    """The value of an output of an operation that returns (parts of) the shape of its input."""
    op = tensor.op
    dims = op.inputs[tensor.value_index].shape.as_list()
    values = {"Size": math.prod(dims), "Rank": len(dims)}
    return tf.constant(values.get(op.type, dims), tensor.dtype)
