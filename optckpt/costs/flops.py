"""The analytic model: floating-point operations and bytes from shapes, through a roofline.

seconds = max(flops / FLOPS_PER_SECOND, bytes / BYTES_PER_SECOND), after Williams, Waterman and
Patterson, "Roofline" (CACM 2009). The rates are nominal and fixed, so that plans made with this
model are the same on every machine; only their ratio matters to a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from optckpt.costs.cache import Cost
from optckpt.costs.constants import Folder
from optckpt.costs.functions import called
from optckpt.costs.registry import Captured, CostOptions

FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10

# Operations that pass on what they get, or that only name a piece of memory.
FREE = frozenset(
    {
        "Arg",
        "Const",
        "CheckNumerics",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "NoOp",
        "Placeholder",
        "PlaceholderWithDefault",
        "PreventGradient",
        "Rank",
        "ReadVariableOp",
        "Reshape",
        "Shape",
        "ShapeN",
        "Size",
        "Snapshot",
        "Squeeze",
        "StopGradient",
        "VarHandleOp",
        "Variable",
        "VariableShape",
        "VariableV2",
    }
)
_NESTING = 8


def flops(capture: Captured, options: CostOptions) -> Sequence[Cost]:
    """Roofline seconds of each operation; the workspace stays what the capture found."""
    folder = Folder()
    return [
        Cost(
            sum(roofline(op, FLOPS_PER_SECOND, BYTES_PER_SECOND, folder) for op in unit),
            operation.workspace,
        )
        for unit, operation in zip(capture.units, capture.graph.operations, strict=True)
    ]


def roofline(
    op: Any,
    flops_per_second: float,
    bytes_per_second: float,
    folder: Folder,
    nesting: int = _NESTING,
) -> float:
    """Seconds of one execution of `op` at these rates, called functions included."""
    if op.type in FREE:
        return 0.0
    calls = called(op, folder) if nesting else None
    if calls is not None:
        bodies = [
            sum(roofline(o, flops_per_second, bytes_per_second, folder, nesting - 1) for o in body)
            for body in calls.bodies
        ]
        if not bodies:
            return operation_bytes(op) / bytes_per_second
        return calls.times * (max(bodies) if calls.exclusive else sum(bodies))
    return max(operation_flops(op) / flops_per_second, operation_bytes(op) / bytes_per_second)


def operation_bytes(op: Any) -> int:
    """Bytes of all inputs and outputs; an unknown dimension counts as 1."""
    return sum(_bytes(t) for t in (*op.inputs, *op.outputs))


def operation_flops(op: Any) -> float:
    """Floating-point operations of one execution (a multiply-add is two).

    Exact for convolutions, matrix products and einsum; one per element of the larger of inputs
    and outputs for all else.
    """
    count = _COUNTS.get(op.type)
    if count is not None:
        return float(count(op))
    return float(max((_elements(t) for t in (*op.inputs, *op.outputs)), default=0))


def _dims(tensor: Any) -> list[int]:
    if tensor.shape.rank is None:
        return []
    return [1 if d is None else d for d in tensor.shape.as_list()]


def _elements(tensor: Any) -> int:
    if tensor.dtype.base_dtype.name in ("resource", "variant", "string"):
        return 0
    return math.prod(_dims(tensor))


def _bytes(tensor: Any) -> int:
    return _elements(tensor) * int(tensor.dtype.base_dtype.size)


def _conv(result: Any, kernel: Any) -> int:
    # The last dimension of a kernel is the output channels, whatever the layout of the images.
    return 2 * _elements(result) * math.prod(_dims(kernel)[:-1])


def _depthwise(result: Any, kernel: Any) -> int:
    return 2 * _elements(result) * math.prod(_dims(kernel)[:2])


def _matmul(op: Any) -> int:
    rows = _dims(op.inputs[0])
    inner = rows[0] if op.get_attr("transpose_a") else rows[1]
    return 2 * _elements(op.outputs[0]) * inner


def _batch_matmul(op: Any) -> int:
    inner = _dims(op.inputs[0])[-2 if op.get_attr("adj_x") else -1]
    return 2 * _elements(op.outputs[0]) * inner


def _einsum(op: Any) -> int:
    equation = op.get_attr("equation").decode()
    terms = equation.partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        dims = _dims(tensor)
        before, dots, after = term.partition("...")
        labels = list(before) + [
            # Broadcast dimensions are aligned from the right.
            f".{i}"
            for i in range(len(dims) - len(before) - len(after), 0, -1)
        ]
        labels += list(after) if dots else []
        for label, dim in zip(labels, dims, strict=False):
            sizes[label] = max(sizes.get(label, 1), dim)
    factor = 2 if len(terms) > 1 else 1
    return factor * math.prod(sizes.values())


def _window(op: Any) -> int:
    return math.prod(int(k) for k in op.get_attr("ksize"))


def _pool(op: Any) -> int:
    result = min(op.inputs[0], op.outputs[0], key=_elements)
    return _elements(result) * _window(op)


def _pool_gradient(op: Any) -> int:
    return _elements(op.inputs[-1]) * _window(op)


_COUNTS: dict[str, Callable[[Any], int]] = {
    "AvgPool": _pool,
    "AvgPoolGrad": _pool_gradient,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Conv2D": lambda op: _conv(op.outputs[0], op.inputs[1]),
    "Conv2DBackpropFilter": lambda op: _conv(op.inputs[2], op.outputs[0]),
    "Conv2DBackpropFilterV2": lambda op: _conv(op.inputs[2], op.outputs[0]),
    "Conv2DBackpropInput": lambda op: _conv(op.inputs[2], op.inputs[1]),
    "Conv2DBackpropInputV2": lambda op: _conv(op.inputs[2], op.inputs[1]),
    "Conv3D": lambda op: _conv(op.outputs[0], op.inputs[1]),
    "Conv3DBackpropFilterV2": lambda op: _conv(op.inputs[2], op.outputs[0]),
    "Conv3DBackpropInputV2": lambda op: _conv(op.inputs[2], op.inputs[1]),
    "DepthwiseConv2dNative": lambda op: _depthwise(op.outputs[0], op.inputs[1]),
    "DepthwiseConv2dNativeBackpropFilter": lambda op: _depthwise(op.inputs[2], op.outputs[0]),
    "DepthwiseConv2dNativeBackpropInput": lambda op: _depthwise(op.inputs[2], op.inputs[1]),
    "Einsum": _einsum,
    "FusedBatchNormV3": lambda op: 5 * _elements(op.inputs[0]),
    "FusedBatchNormGradV3": lambda op: 10 * _elements(op.inputs[0]),
    "MatMul": _matmul,
    "MaxPool": _pool,
    "MaxPoolGrad": _pool_gradient,
    "Softmax": lambda op: 5 * _elements(op.inputs[0]),
    "LogSoftmax": lambda op: 5 * _elements(op.inputs[0]),
}
