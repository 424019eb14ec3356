"""Values of small constant tensors: axes, shapes, paddings, loop bounds.

`tf.get_static_value` is not used: it marks the tensors it looks at as not feedable, which
would change the user's graph, and it stops at arithmetic on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensorflow.python.framework import tensor_shape, tensor_util
from tensorflow.python.ops import handle_data_util

LARGEST = 1 << 16
"""Elements of the largest tensor whose value is looked for."""
_DEPTH = 40

Evaluate = Callable[[Any, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Runs a `tf.Operation` on concrete inputs."""
Shapes = Sequence[tuple[int, ...]]


def static_shape(tensor: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, or None if a dimension is unknown."""
    shape = tensor.shape
    if shape.rank is None:
        return None
    dims = tuple(shape.as_list())
    return None if None in dims else dims


def variable_shape(handle: Any) -> tuple[int, ...] | None:
    """Shape of the variable behind a resource tensor, if its graph knows it."""
    try:
        data = handle_data_util.get_resource_handle_data(handle)
    except Exception:  # What a graph without the data raises differs between versions.
        return None
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = tensor_shape.TensorShape(data.shape_and_type[0].shape)
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


class Folder:
    """Folds constants of TensorFlow graphs, remembering what it found.

    Without `evaluate` only constants, and shapes that are known statically, have a value.
    `probe` tells the shapes of an operation's outputs by running it on synthetic inputs (None:
    it cannot); without it only static shapes are known.
    """

    def __init__(
        self,
        evaluate: Evaluate | None = None,
        probe: Callable[[Any], Shapes | None] | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._probe = probe
        self._known: dict[Any, np.ndarray | None] = {}
        self._probed: dict[Any, Shapes | None] = {}

    def shape(self, tensor: Any) -> tuple[int, ...] | None:
        """The shape of `tensor`: static, or as seen when its operation is run alone."""
        shape = static_shape(tensor)
        if shape is not None or self._probe is None:
            return shape
        op = tensor.op
        if op not in self._probed:
            # Also guards against cycles (v1 loops).
            self._probed[op] = None
            self._probed[op] = self._probe(op)
        shapes = self._probed[op]
        return None if shapes is None else shapes[tensor.value_index]

    def value(self, tensor: Any) -> np.ndarray | None:
        """The value of `tensor` as an array if it is the same in every step, else None."""
        return self._value(tensor, _DEPTH)

    def _value(self, tensor: Any, depth: int) -> np.ndarray | None:
        key = tensor.ref()
        if key not in self._known:
            # Also guards against cycles (v1 loops).
            self._known[key] = None
            self._known[key] = self._fold(tensor, depth)
        return self._known[key]

    def _fold(self, tensor: Any, depth: int) -> np.ndarray | None:
        op = tensor.op
        shape = static_shape(tensor)
        if shape is None or math.prod(shape) > LARGEST or depth == 0:
            return None
        dtype = tensor.dtype.base_dtype
        if dtype.name in ("resource", "variant", "string"):
            return None
        if op.type == "Const":
            return np.asarray(tensor_util.MakeNdarray(op.get_attr("value")))
        if op.type in ("Shape", "ShapeN", "Size", "Rank"):
            return _of_shape(tensor, op)
        if op.type == "VariableShape":
            dims = variable_shape(op.inputs[0])
            return None if dims is None else np.array(dims, dtype.as_numpy_dtype)
        if self._evaluate is None or not op.inputs or op.op_def.is_stateful:
            return None
        values = []
        for source in op.inputs:
            value = self._value(source, depth - 1)
            if value is None:
                return None
            values.append(value)
        try:
            results = self._evaluate(op, values)
        except Exception:
            return None
        for output, result in zip(op.outputs, results, strict=False):
            self._known[output.ref()] = result
        return np.asarray(results[tensor.value_index])


def _of_shape(tensor: Any, op: Any) -> np.ndarray | None:
    which = tensor.value_index if op.type == "ShapeN" else 0
    source = op.inputs[which]
    dtype = tensor.dtype.as_numpy_dtype
    if op.type == "Rank":
        return None if source.shape.rank is None else np.array(source.shape.rank, dtype)
    shape = static_shape(source)
    if shape is None:
        return None
    return np.array(math.prod(shape) if op.type == "Size" else shape, dtype)
