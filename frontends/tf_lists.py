"""What operations on lists (TensorArrays, accumulators of loops) and optionals keep in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_heap import NOTHING, Block, Value, list_of


def item(value: Value) -> int | bool | None:
    """The number that a tensor of one element holds, if it is known."""
    found: int | bool | None = None
    if value.number is not None and value.number.size == 1:
        found = value.number.item()
    return found


def bytes_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor, as far as they are known: what is said of a body is a lower bound."""
    if tf_ops.is_opaque(tensor.dtype):
        return 0
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


def new(tensor: tf.Tensor) -> Value:
    """A tensor in memory of its own."""
    size = bytes_of(tensor)
    return Value((Block(size),)) if size else NOTHING


def like(value: Value) -> Value:
    """As much memory as `value` has, anew."""
    if value.items is not None:
        return list_of(None if i is None else like(i) for i in value.items)
    return Value((Block(value.size),)) if value.size else NOTHING


def added(a: Value, b: Value) -> Value:
    """The sum of two lists: an element that only one of them has is not copied."""
    if a.items is None or b.items is None:
        return like(a if a.blocks else b)
    pairs = [
        (a.items[i] if i < len(a.items) else None, b.items[i] if i < len(b.items) else None)
        for i in range(max(len(a.items), len(b.items)))
    ]
    return list_of(
        (x if y is None else y) if x is None or y is None else added(x, y) for x, y in pairs
    )


def _reserve(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    count = item(inputs[1])
    return [list_of([None] * max(0, int(count)) if count is not None else ())]


def _empty(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    return [list_of(())]


def _from_tensor(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    count = (op.inputs[0].shape.as_list() or [None])[0] if op.inputs[0].shape.rank else None
    size = bytes_of(op.inputs[0]) // max(1, count or 1)
    return [list_of(Value((Block(size),)) for _ in range(max(1, count or 1)))]


def _push(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    return [list_of([*(inputs[0].items or ()), inputs[1]])]


def _pop(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    items = inputs[0].items or ()
    last = items[-1] if items and items[-1] is not None else new(op.outputs[1])
    return [list_of(items[:-1]), last]


def _get(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    items, index = inputs[0].items or (), item(inputs[1])
    found = None
    if index is not None and 0 <= index < len(items):
        found = items[index]
    elif items:
        found = items[0]
    # An element that was never set is made of zeros.
    return [new(op.outputs[0]) if found is None else found]


def _set(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    items, index = list(inputs[0].items or ()), item(inputs[1])
    if index is None or not 0 <= index < len(items):
        # The next free place is as good as the right one.
        index = next((i for i, item in enumerate(items) if item is None), None)
    if index is None:
        items.append(inputs[2])
    else:
        items[index] = inputs[2]
    return [list_of(items)]


def _length(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    items = inputs[0].items
    return [Value(number=None if not items else np.asarray(len(items)))]


def _element_shape(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    return [NOTHING]


def _optional(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    return [list_of(inputs)]


def _optional_value(op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
    items = inputs[0].items or ()
    found = [items[i] if i < len(items) else None for i in range(len(op.outputs))]
    # What another branch would have left is not there: then this branch is not taken.
    return [NOTHING if v is None else v for v in found]


SPECIAL: dict[str, Callable[[tf.Operation, Sequence[Value]], list[Value]]] = {
    "EmptyTensorList": _empty,
    "TensorListReserve": _reserve,
    "TensorListFromTensor": _from_tensor,
    "TensorListPushBack": _push,
    "TensorListPopBack": _pop,
    "TensorListGetItem": _get,
    "TensorListSetItem": _set,
    "TensorListLength": _length,
    "TensorListElementShape": _element_shape,
    "OptionalFromValue": _optional,
    "OptionalNone": _empty,
    "OptionalGetValue": _optional_value,
}
"""By operation type: what the outputs hold, given what the inputs hold."""
