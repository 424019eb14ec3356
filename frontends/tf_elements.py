"""What is known of lists, optionals and handles in a copied graph: shapes and values inside.

TensorFlow infers neither the shape of what is put into a list nor the values that a loop saves for
its gradient, though these are often the shapes of tensors, and decide the shapes of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import cpp_shape_inference_pb2
from tensorflow.python.ops import handle_data_util

from optckpt.frontends import tf_ops

HANDLES = (tf.resource, tf.variant)

_PUTS = {"TensorListSetItem": 2, "TensorListPushBack": 1, "TensorListFromTensor": 0}
"""Operations that make lists -> which of their inputs becomes an element, or several."""
_TAKES = {"TensorListPopBack": 1, "TensorListGetItem": 0}
"""Operations that read lists -> which of their outputs is an element."""

SPECIAL = frozenset((*_PUTS, *_TAKES, "OptionalFromValue", "OptionalGetValue"))
"""Types of operations that are to be made one by one, and noted."""

_Values = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """What is known of a tensor that is given to a function."""

    shape: tf.TensorShape
    handle: Any = None
    """What a handle or a list refers to (a protocol buffer), if that is known."""
    value: _Values | None = None
    """Of a tensor of few integers its numbers, of a list those of each of its elements, of an
    optional those of each of its components: flat, None where they are not known."""
    is_empty: bool = False
    """Whether this is a list without elements."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for arguments for which a function has the same sizes."""
        data = None if self.handle is None else self.handle.SerializeToString(deterministic=True)
        return (str(self.shape), data, self.value, self.is_empty)

    @property
    def without_value(self) -> Argument:
        return replace(self, value=None)

    def common_value(self, other: Argument) -> _Values | None:
        """What is known of both."""
        return self.value if self.value == other.value else None


class Elements:
    """What is known of the tensors of one graph.

    Args:
        replace: whether constants may take the place of tensors whose values are known.
    """

    def __init__(self, graph: tf.Graph, *, replace: bool) -> None:
        self._graph = graph
        self._replace = replace
        self._known: dict[int, Argument] = {}
        self._instead: dict[int, tf.Tensor] = {}

    def argument(self, tensor: tf.Tensor) -> Argument:
        """What is known of `tensor`."""
        source = _source(tensor)
        handle = handle_data(tensor)
        if tensor.dtype == tf.variant:
            known = self._known.get(id(source))
            empty = source.op.type == "EmptyTensorList" or (known is not None and known.is_empty)
            value = None if known is None else known.value
            return Argument(tensor.shape, handle, value, empty)
        numbers = tf_ops.constant(self._instead.get(id(source), source))
        return Argument(tensor.shape, handle, None if numbers is None else (tuple(numbers),))

    def give(self, tensor: tf.Tensor, argument: Argument) -> None:
        """Note what is known of an argument of the graph, or of what a call returns."""
        if tensor.dtype == tf.variant:
            self._known[id(tensor)] = argument
        elif argument.value is not None:
            self._take([tensor], argument)

    def instead(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor to be read in the place of `tensor`."""
        return self._instead.get(id(tensor), tensor)

    def prepare(self, node: node_def_pb2.NodeDef, inputs: Sequence[tf.Tensor]) -> None:
        """Complete the definition of an operation that is about to be made."""
        if node.op == "OptionalGetValue":
            data = handle_data(inputs[0])
            given = [tf.TensorShape(s) for s in node.attr["output_shapes"].list.shape]
            if data is not None and len(data.shape_and_type) == len(given):
                inside = [tf.TensorShape(s.shape) for s in data.shape_and_type]
                both = [merged(a, b) for a, b in zip(given, inside, strict=True)]
                write_shapes(node, "output_shapes", both)

    def note(self, op: tf.Operation) -> None:
        """Note what an operation has put into a list or an optional, or taken out."""
        kind = op.type
        if kind in _PUTS:
            item = op.inputs[_PUTS[kind]]
            shape = item.shape[1:] if kind == "TensorListFromTensor" else item.shape
            _write_element(op.outputs[0], shape, item.dtype)
            self._note_item(op, item)
        elif kind in _TAKES:
            before = self.argument(op.inputs[0])
            if op.outputs[0].dtype == tf.variant:
                self._known[id(op.outputs[0])] = replace(before, is_empty=False)
            self._take([op.outputs[_TAKES[kind]]], before)
        elif kind == "OptionalFromValue":
            values = tuple(self._numbers(t) for t in op.inputs)
            self._known[id(op.outputs[0])] = Argument(op.outputs[0].shape, None, values)
        elif kind == "OptionalGetValue":
            self._take(op.outputs, self.argument(op.inputs[0]))

    def _numbers(self, tensor: tf.Tensor) -> tuple[int, ...] | None:
        value = self.argument(tensor).value
        return value[0] if value is not None and tensor.dtype != tf.variant else None

    def _note_item(self, op: tf.Operation, item: tf.Tensor) -> None:
        if op.type != "TensorListPushBack":
            return
        before = self.argument(op.inputs[0])
        numbers = self._numbers(item)
        if numbers is not None and (before.is_empty or before.value == (numbers,)):
            self._known[id(op.outputs[0])] = Argument(op.outputs[0].shape, None, (numbers,))

    def _take(self, outputs: Sequence[tf.Tensor], holder: Argument) -> None:
        if holder.value is not None and len(holder.value) == len(outputs):
            for t, numbers in zip(outputs, holder.value, strict=True):
                if numbers is not None:
                    self._put_instead(t, numbers)

    def _put_instead(self, tensor: tf.Tensor, numbers: tuple[int, ...]) -> None:
        fits = tensor.shape.num_elements() == len(numbers)
        if self._replace and fits and tensor.dtype in (tf.int32, tf.int64):
            with self._graph.as_default(), tf.control_dependencies(None):
                self._instead[id(tensor)] = tf.constant(
                    numbers, tensor.dtype, tensor.shape, name="optckpt_known"
                )


def handle_data(tensor: tf.Tensor) -> Any:
    """What a handle or a list refers to (a protocol buffer), or None."""
    if tensor.dtype not in HANDLES:
        return None
    data = handle_data_util.get_handle_data(tensor)
    return data if data is not None and data.is_set else None


def says_more(new: Any, old: Any) -> bool:
    """Whether more is known by `new` than by `old` of what a tensor refers to."""
    return new is not None and (old is None or _unknowns(new) < _unknowns(old))


def merged(a: tf.TensorShape, b: tf.TensorShape) -> tf.TensorShape:
    """What two shapes of one tensor say together; where they contradict each other, `b`."""
    return a.merge_with(b) if a.is_compatible_with(b) else b


def common(shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """The dimensions that all shapes have in common."""
    first, *rest = shapes
    for shape in rest:
        if first.rank is None or shape.rank != first.rank:
            return tf.TensorShape(None)
        pairs = zip(first.as_list(), shape.as_list(), strict=True)
        first = tf.TensorShape([x if x == y else None for x, y in pairs])
    return first


def write_shapes(node: node_def_pb2.NodeDef, name: str, shapes: Iterable[tf.TensorShape]) -> None:
    """Set an attribute to a list of shapes."""
    node.attr[name].Clear()
    node.attr[name].list.shape.extend([shape.as_proto() for shape in shapes])


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _unknowns(data: Any) -> int:
    """Number of unknown dimensions of what a handle refers to."""
    return sum(
        1000 if s.shape.unknown_rank else sum(d.size < 0 for d in s.shape.dim)
        for s in data.shape_and_type
    )


def _write_element(made: tf.Tensor, shape: tf.TensorShape, dtype: tf.DType) -> None:
    """Let a list know the shape of its elements."""
    data = handle_data(made)
    if shape.rank is None or (data is not None and not _unknowns(data)):
        return
    new = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData()
    if data is not None and len(data.shape_and_type) == 1:
        new.CopyFrom(data)
        shape = merged(tf.TensorShape(data.shape_and_type[0].shape), shape)
    else:
        new.is_set = True
        new.shape_and_type.add(dtype=dtype.as_datatype_enum)
    new.shape_and_type[0].shape.CopyFrom(shape.as_proto())
    handle_data_util.set_handle_data(made, new)
