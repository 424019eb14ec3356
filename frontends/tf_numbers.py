"""Arithmetic on small integers and truth values: how often loops run, which branch is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from optckpt.frontends.tf_heap import Value

_LARGEST_NUMBER = 64


def is_number(tensor: tf.Tensor) -> bool:
    """Whether the values of `tensor` are worth knowing: few, and integers or truth values."""
    count = tensor.shape.num_elements()
    return (
        count is not None
        and count <= _LARGEST_NUMBER
        and (tensor.dtype.is_integer or tensor.dtype.is_bool)
    )


def constant_number(op: tf.Operation) -> np.ndarray | None:
    """The value of a constant that is a number, else None."""
    if not is_number(op.outputs[0]):
        return None
    return np.asarray(tensor_util.MakeNdarray(op.get_attr("value")))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Neg": np.negative,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "LogicalNot": np.logical_not,
}


def evaluate(op: tf.Operation, inputs: Sequence[Value]) -> np.ndarray | None:
    """The result of arithmetic on small integers, or None."""
    numbers = [v.number for v in inputs]
    if op.type in ("LogicalAnd", "LogicalOr"):
        # One side may decide alone.
        decisive = op.type == "LogicalOr"
        if any(n is not None and n.size == 1 and n.item() is decisive for n in numbers):
            return np.asarray(decisive)
        return None if any(n is None for n in numbers) else np.asarray(not decisive)
    if op.type == "Shape" and op.inputs[0].shape.is_fully_defined():
        return np.asarray(op.inputs[0].shape.as_list())
    if not numbers or any(n is None for n in numbers) or not is_number(op.outputs[0]):
        return None
    if op.type == "Cast":
        return numbers[0] if op.outputs[0].dtype.is_integer else None
    if op.type in ("Max", "Min", "Prod", "Sum") and _is_one(op.outputs[0]):
        return np.asarray(getattr(np, op.type.lower())(numbers[0]))
    function = _ARITHMETIC.get(op.type)
    if function is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(*numbers))


def _is_one(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.num_elements() == 1)
