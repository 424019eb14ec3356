"""Synthetic inputs: what an operation is fed when it is measured alone.

The time of a dense floating-point operation does not depend on its data as long as they are
neither denormal nor NaN. Indices must be in range, and axes, shapes and paddings must be the
real ones.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensorflow.python.framework import dtypes

from optckpt.costs.constants import Folder

_BLOCK = 1 << 16
_SHOWN = 32

# Inputs that must be positive, lest the operation take a slow path through NaNs.
_POSITIVE: dict[str, tuple[int, ...]] = {
    "Div": (1,),
    "DivNoNan": (1,),
    "FusedBatchNorm": (4,),
    "FusedBatchNormV2": (4,),
    "FusedBatchNormV3": (4,),
    "FusedBatchNormGrad": (4,),
    "FusedBatchNormGradV2": (4,),
    "FusedBatchNormGradV3": (4,),
    "Inv": (0,),
    "InvGrad": (0,),
    "Lgamma": (0,),
    "Log": (0,),
    "Log1p": (0,),
    "Pow": (0,),
    "RealDiv": (1,),
    "Reciprocal": (0,),
    "ReciprocalGrad": (0,),
    "Rsqrt": (0,),
    "RsqrtGrad": (0,),
    "SoftmaxCrossEntropyWithLogits": (1,),
    "Sqrt": (0,),
    "SqrtGrad": (0,),
    "Xdivy": (1,),
    "Xlog1py": (1,),
    "Xlogy": (1,),
}
# Floating-point inputs whose value decides the time.
_VALUED = {("Pow", 1)}


class UnmeasurableError(Exception):
    """An operation that cannot be run alone; the message says why."""


@dataclass(frozen=True)
class Argument:
    """How to make one input of an operation."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    """normal, positive, mask, index (integers from 0 below `bound`) or value."""
    bound: int = 0
    value: np.ndarray | None = field(default=None, compare=False, repr=False)
    token: str = ""
    """Text that stands for `value` in the signature."""

    @property
    def size(self) -> int:
        """Bytes."""
        return tensor_size(self.dtype, self.shape)

    def signature(self) -> list[Any]:
        """JSON-able description; equal for inputs that cost the same."""
        tail: list[Any] = []
        if self.kind == "index":
            tail = [self.bound]
        elif self.kind == "value":
            tail = [self.token]
        return [self.dtype, list(self.shape), self.kind, *tail]


def tensor_size(dtype: str, shape: tuple[int, ...] | None) -> int:
    """Bytes of a tensor; 0 if that is not known."""
    if shape is None or dtype in ("resource", "variant", "string"):
        return 0
    return math.prod(shape) * int(dtypes.as_dtype(dtype).size)


def argument(op: Any, index: int, folder: Folder) -> Argument:
    """How to make input number `index` of `op`. Raises UnmeasurableError, saying why."""
    tensor = op.inputs[index]
    dtype = tensor.dtype.base_dtype
    if dtype.name in ("resource", "variant", "string"):
        raise UnmeasurableError(f"input {index} is a {dtype.name}")
    shape = folder.shape(tensor)
    if shape is None:
        raise UnmeasurableError(f"the shape of input {index} is not known")
    if dtype.is_floating or dtype.is_complex:
        if (op.type, index) in _VALUED and math.prod(shape) == 1:
            value = folder.value(tensor)
            if value is not None:
                return _constant(dtype.name, shape, value)
        positive = index in _POSITIVE.get(op.type, ())
        return Argument(dtype.name, shape, "positive" if positive else "normal")
    value = folder.value(tensor)
    if value is not None:
        return _constant(dtype.name, shape, value)
    if dtype.is_bool:
        return Argument(dtype.name, shape, "mask")
    if dtype.is_quantized:
        raise UnmeasurableError(f"input {index} is quantised ({dtype.name})")
    return Argument(dtype.name, shape, "index", max(1, _bound(op, index, folder)))


def _constant(dtype: str, shape: tuple[int, ...], value: np.ndarray) -> Argument:
    if value.size <= _SHOWN:
        token = repr(value.tolist())
    else:
        token = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return Argument(dtype, shape, "value", 0, value, token)


def _bound(op: Any, index: int, folder: Folder) -> int:
    """One more than the largest integer that input `index` may hold."""

    def folded(i: int) -> np.ndarray:
        value = folder.value(op.inputs[i])
        if value is None:
            raise UnmeasurableError(f"input {i} is not the same in every step")
        return value

    kind = op.type
    if kind == "GatherV2" and index == 1:
        return int(op.inputs[0].shape[int(folded(2))])
    if kind == "Gather" and index == 1:
        return int(op.inputs[0].shape[0])
    if kind == "GatherNd" or (kind.startswith("TensorScatter") and index == 1):
        return _smallest(op.inputs[0].shape.as_list(), op.inputs[1])
    if kind == "ScatterNd" and index == 0:
        return _smallest(folded(2).tolist(), op.inputs[0])
    if kind.startswith("UnsortedSegment") and index == 1:
        return int(folded(2))
    if kind == "OneHot" and index == 0:
        return int(folded(1))
    if kind in ("SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2") and index == 1:
        return int(op.inputs[0].shape[1])
    if kind in ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"):
        return int(op.inputs[0].shape.num_elements())
    # Small enough to be a valid index, class or length nearly everywhere.
    return 2


def _smallest(dims: list[int], indices: Any) -> int:
    depth = int(indices.shape[-1])
    return min(dims[:depth], default=1)


def synthesise(arg: Argument) -> np.ndarray:
    """An array for `arg`; the same array each time."""
    if arg.value is not None:
        return arg.value
    rng = np.random.default_rng(0)
    count = math.prod(arg.shape)
    block = min(count, _BLOCK)
    dtype = dtypes.as_dtype(arg.dtype).as_numpy_dtype
    if arg.kind == "mask":
        sample = rng.integers(0, 2, block).astype(bool)
    elif arg.kind == "index":
        # Repeating a block of indices would make a large table look cacheable.
        return rng.integers(0, arg.bound, arg.shape).astype(dtype)
    else:
        sample = rng.standard_normal(block)
        if arg.kind == "positive":
            sample = np.abs(sample) + 0.5
        sample = sample.astype(dtype)
    full = np.empty(count, dtype)
    for start in range(0, count, _BLOCK):
        full[start : start + _BLOCK] = sample[: count - start]
    return full.reshape(arg.shape)
