"""What is known of TensorFlow's operations: views, in-place reuse, repeatability, fused pairs.

The view and in-place tables were established with the CPU allocator (peak bytes of a function
that makes a tensor and feeds it to the operation); a test repeats the measurement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import tensor_util


def words(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


MARK = "_optckpt"
"""Attribute of the operations that the rewrite has added; its value is unique in a process."""

RESIDENT = words("""
    Const HostConst ImmutableConst Placeholder PlaceholderV2 _Arg VarHandleOp _VarHandlesOp
    ReadVariableOp _ReadVariablesOp Variable VariableV2 PlaceholderWithDefault
    """)
"""Operations whose outputs are in memory throughout the step, whatever is recomputed."""

PLACEHOLDERS = words("Placeholder PlaceholderV2 PlaceholderWithDefault")

METADATA = words("Shape ShapeN Size Rank TensorListLength TensorListElementShape")
"""Operations that look at the shape of their inputs only."""

SIMPLE_VIEWS = words("""
    Reshape ExpandDims Squeeze Identity StopGradient PreventGradient Bitcast EnsureShape
    GuaranteeConst DebugGradientIdentity
    """)

"""Operations whose output is their first input in another shape or role."""

# These return their input where they turn out to have nothing to do.
_VIEWS_IF_SAME_COUNT = words(
    "BroadcastTo Tile Pad PadV2 Sum Mean Prod Max Min All Any EuclideanNorm"
)

_UNARY = """
    Abs Neg Reciprocal Inv Square Sqrt Rsqrt Round Exp Expm1 Log Log1p Sinh Cosh Tanh Asinh Acosh
    Atanh Erf Erfc Sigmoid Sin Cos Tan Asin Acos Atan Lgamma Digamma Ndtri Erfinv Sign Floor Ceil
    Rint BesselI0e BesselI1e Relu Relu6 Elu Selu Softplus Softsign LeakyRelu Softmax LogSoftmax
    ZerosLike OnesLike Snapshot BiasAdd ClipByValue LogicalNot MatrixSetDiag MatrixSetDiagV2
    MatrixSetDiagV3 MatrixBandPart SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits CheckNumerics CheckNumericsV2
"""
_BINARY = """
    Add AddV2 Sub Mul MulNoNan Div DivNoNan RealDiv FloorDiv FloorMod TruncateDiv Maximum Minimum
    Pow SquaredDifference Atan2 Xdivy Xlogy Xlog1py Zeta NextAfter LogicalAnd LogicalOr
    ReluGrad Relu6Grad EluGrad SeluGrad SoftplusGrad SoftsignGrad LeakyReluGrad
    SigmoidGrad TanhGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad
"""
_INPLACE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_UNARY.split(), (0,)),
    **dict.fromkeys(_BINARY.split(), (0, 1)),
    "Select": (1, 2),
    "SelectV2": (1, 2),
}

SAME_SIZE = SIMPLE_VIEWS | (
    words(_UNARY)
    - words("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits BiasAdd")
)
"""Operations whose output has as many bytes as their first input."""

CALLS = words("""
    While StatelessWhile If StatelessIf Case StatelessCase PartitionedCall StatefulPartitionedCall
    """)
"""Operations that run functions: calls, conditionals, loops."""

_CONTROL_FLOW_V1 = words("""
    Enter RefEnter Exit RefExit Switch RefSwitch Merge RefMerge NextIteration RefNextIteration
    LoopCond ControlTrigger
    """)

# Not stateful by their definition, but with an effect outside, or changing their input, or adding
# whatever input is there first, so that the last bits may differ from one execution to the next.
_ONCE = words("""
    AccumulateNV2 PyFuncStateless NcclAllReduce NcclReduce NcclBroadcast InplaceUpdate InplaceAdd
    InplaceSub Assign AssignAdd AssignSub
    """)
_ONCE_PREFIXES = ("Collective", "_Send", "_Recv", "_HostSend", "_HostRecv", "Xla", "TPU")

MERGED_BY_OPTIMIZER = words("""
    Conv2D Conv3D DepthwiseConv2dNative MatMul BiasAdd Pad FusedBatchNorm FusedBatchNormV2
    FusedBatchNormV3 FusedBatchNormGradV3 Relu Relu6 LeakyRelu Elu ReluGrad Relu6Grad
    """)
"""Members of the patterns for which TensorFlow's graph optimiser has kernels of its own."""

_REPLACED_IF_EQUAL_INPUTS = words("Mul MulNoNan Add AddV2 AddN")

FUSED = {
    "Conv2D": ("BiasAdd", 0),
    "Pad": ("Conv2D", 0),
    "FusedBatchNormV3": ("Relu", 0),
    "BiasAddGrad": ("Conv2DBackpropFilter", 2),
}
"""Operation -> the one that may be merged with it, and which input of that they have in common."""

_OPAQUE = frozenset((tf.resource, tf.variant, tf.string))


NO_VIEWS = "_optckpt_no_views"
"""Attribute of a tf.Graph with sizes that were filled in: the operations that share their input's
memory at these sizes, but not at all others."""


def views(op: tf.Operation) -> list[tuple[int, int]]:
    """(input, output) index pairs where the output shares the input's memory; empty: none."""
    found = views_at_these_sizes(op)
    if found and depends_on_sizes(op.type) and op in getattr(op.graph, NO_VIEWS, ()):
        return []
    return found


def views_at_these_sizes(op: tf.Operation) -> list[tuple[int, int]]:
    """As `views`, whether it is so at other sizes than those filled in or not."""
    kind = op.type
    if kind in SIMPLE_VIEWS:
        return [(0, 0)]
    if kind == "IdentityN":
        return [(i, i) for i in range(len(op.outputs))]
    if kind in _VIEWS_IF_SAME_COUNT:
        count = element_count(op.inputs[0])
        return [(0, 0)] if count is not None and count == element_count(op.outputs[0]) else []
    if kind == "Cast":
        return [(0, 0)] if op.inputs[0].dtype == op.outputs[0].dtype else []
    if kind in ("AddN", "Pack"):
        return [(0, 0)] if len(op.inputs) == 1 else []
    special = _SPECIAL_VIEWS.get(kind)
    return special(op) if special else []


def depends_on_sizes(kind: str) -> bool:
    """Whether operations of this type share their input's memory at some sizes only."""
    return kind in _VIEWS_IF_SAME_COUNT or kind in _SPECIAL_VIEWS


def possible_views(op: tf.Operation) -> list[tuple[int, int]]:
    """As `views`, for an operation whose type depends on sizes, if these allow it."""
    source = {"Split": 1}.get(op.type, 0)
    return [(source, o) for o in range(len(op.outputs))]


def may_view(kind: str) -> bool:
    """Whether `views` may find something for operations of this type."""
    return kind in _MAY_VIEW


def inplace_inputs(op: tf.Operation) -> tuple[int, ...]:
    """Indices of the inputs whose memory the kernel takes over when nobody else holds it."""
    if op.type == "AddN":
        return tuple(range(len(op.inputs)))
    return _INPLACE.get(op.type, ())


def is_call(op: tf.Operation) -> bool:
    """Whether the operation runs functions: a call, a conditional, a loop."""
    return op.type in CALLS


def is_control_flow_v1(op: tf.Operation) -> bool:
    """Whether the operation is a primitive of TensorFlow 1 control flow (Switch, Merge, ...)."""
    return op.type in _CONTROL_FLOW_V1


LARGEST_FOLDED = 10 * 1024 * 1024
"""Bytes up to which TensorFlow replaces what is computed from constants by a constant."""


def is_foldable(op: tf.Operation) -> bool:
    """Whether the executor computes the operation in advance if all its inputs are constants."""
    kind = op.type
    if not op.inputs or kind in RESIDENT or op.control_inputs or op._is_stateful:
        return False
    if kind in CALLS or kind in _CONTROL_FLOW_V1 or runs_once(kind):
        return False
    return not any(is_opaque(t.dtype) for t in (*op.inputs, *op.outputs))


@functools.cache
def is_opaque(dtype: tf.DType) -> bool:
    """Whether tensors of this type hold handles, strings or references rather than numbers."""
    return dtype in _OPAQUE or is_reference(dtype)


@functools.cache
def is_reference(dtype: tf.DType) -> bool:
    """Whether tensors of this type are references to TensorFlow 1 variables."""
    return bool(dtype._is_ref_dtype)


@functools.cache
def element_bytes(dtype: tf.DType) -> int:
    """Bytes of an element; 0 for handles, variants, strings: what they refer to is not theirs."""
    return 0 if dtype.base_dtype in _OPAQUE else int(dtype.size)


def element_count(tensor: tf.Tensor) -> int | None:
    """Number of elements, or None where the static shape does not tell."""
    # What `tensor.shape` is made from; the TensorShape takes longer than all else together.
    dims, unknown = tensor._shape
    return None if unknown or None in dims else math.prod(dims)


def can_wait(op: tf.Operation) -> bool:
    """Whether control edges may be put on the operation.

    Not on what has no input or handles state: an initialiser that uses it would then wait for
    the forward pass. Not on the primitives of TensorFlow 1 control flow.
    """
    if not op.inputs or is_control_flow_v1(op):
        return False
    if is_call(op) or not op._is_stateful:
        return not any(is_reference(t.dtype) for t in (*op.inputs, *op.outputs))
    return not any(is_opaque(t.dtype) for t in (*op.inputs, *op.outputs))


def is_update(op: tf.Operation) -> bool:
    """Whether the operation changes what a resource (a variable) holds."""
    return op._is_stateful and any(t.dtype == tf.resource for t in op.inputs)


@functools.cache
def runs_once(kind: str) -> bool:
    """Whether operations of this type must not be repeated, although they are not stateful."""
    return kind in _ONCE or kind.startswith(_ONCE_PREFIXES)


def find_function(graph: Any, name: str) -> Any:
    """The function of this name of `graph` or the nearest graph around it, or None."""
    while graph is not None:
        found = graph._get_function(name)
        if found is not None:
            return found
        graph = getattr(graph, "outer_graph", None)
    return None


def function_def(graph: tf.Graph, name: str) -> Any:
    """The FunctionDef of this name that operations of `graph` can call, or None."""
    found = find_function(graph, name)
    if found is not None:
        return found.cached_definition
    eager = context.context()
    return eager.getfunction_def(name) if eager.has_function(name) else None


def fused_partner(op: tf.Operation) -> list[tf.Operation]:
    """Operations that oneDNN's layout pass could merge with `op`, `op` being the first of the two.

    Conv2D + BiasAdd, BiasAddGrad + Conv2DBackpropFilter of the same incoming gradient, and
    Pad + Conv2D; in float types. Also FusedBatchNormV3 + Relu in training, which the graph
    optimiser merges. Candidates in creation order; each is of another type.
    """
    kind = op.type
    if kind not in FUSED or op.outputs[0].dtype not in (tf.float32, tf.bfloat16, tf.half):
        return []
    target, slot = FUSED[kind]
    source = op.inputs[0] if kind == "BiasAddGrad" else op.outputs[0]
    found = {c for c in source.consumers() if c.type == target and c.inputs[slot] is source}
    if not found or (kind == "FusedBatchNormV3" and not op._get_attr_bool("is_training")):
        return []
    device = op.device
    return sorted((c for c in found if c.device == device), key=lambda c: c._id)


def is_replaced_by_optimizer(op: tf.Operation) -> bool:
    """Whether TensorFlow's graph optimiser puts another operation in the place of this one.

    A tensor times itself becomes its square, and a sum of equal tensors becomes a product.
    """
    if op.type not in _REPLACED_IF_EQUAL_INPUTS or len(op.inputs) < 2:
        return False
    found = set()
    for t in op.inputs:
        while t.op.type == "Identity":
            t = t.op.inputs[0]
        found.add(id(t))
    return len(found) == 1


def batch_norm_reserve(op: tf.Operation) -> int:
    """Bytes of the third reserve space (output 5) of a FusedBatchNormV3.

    Merged with a Relu, the oneDNN kernel keeps there which elements were positive: half a byte
    per element (a bit each, in a tensor of floats that has as many elements as bytes are needed;
    seen in the allocator's list of chunks). Otherwise it is empty on a CPU and small on a GPU.
    """
    if len(op.outputs[0].consumers()) != 1 or not fused_partner(op):
        return 0
    if default_device_type(op.device) != "CPU":
        return 0
    return (element_count(op.outputs[0]) or 0) // 2


def is_ignored(op: tf.Operation, i: int) -> bool:
    """Whether the operation's kernel does not look at its input `i`, though that holds memory.

    The gradient of batch normalisation on a CPU ignores the third reserve space: with an empty
    tensor in its place the gradients are the same in every bit (a test repeats the comparison).
    """
    if i != 5 or op.type != "FusedBatchNormGradV3":
        return False
    source = op.inputs[5].op
    return source.type == "FusedBatchNormV3" and batch_norm_reserve(source) > 0


@functools.cache
def _device_spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device)


@functools.cache
def _has_gpu() -> bool:
    # Logical devices do not change once they have been made.
    return bool(tf.config.list_logical_devices("GPU"))


def default_device_type(device: str) -> str:
    """The device type ("CPU", "GPU") of a device string, or TensorFlow's default if it has none."""
    kind = _device_spec(device).device_type
    return kind or ("GPU" if _has_gpu() else "CPU")


def _rows_aligned(tensor: tf.Tensor) -> bool:
    """Whether every row along axis 0 starts at an address that Eigen accepts (64 bytes)."""
    inner = tensor.shape[1:].num_elements()
    return inner is not None and inner * tensor.dtype.size % 64 == 0


def constant(tensor: tf.Tensor) -> list[int] | None:
    """The numbers of a short constant tensor of integers, flat; None if it is not one.

    `tf.get_static_value` would do, but it forbids feeding the tensors it has looked at.
    """
    op = tensor.op
    count = element_count(tensor)
    if not tensor.dtype.is_integer or count is None or count > 64:
        return None
    if op.type == "Const":
        return [int(v) for v in tensor_util.MakeNdarray(op.get_attr("value")).reshape(-1)]
    if op.type == "Shape":
        shape = op.inputs[0].shape
        return [int(d) for d in shape] if shape.is_fully_defined() else None
    if op.type in ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze"):
        return constant(op.inputs[0])
    if op.type in ("Max", "Min") and count == 1:
        numbers = constant(op.inputs[0])
        return [(max if op.type == "Max" else min)(numbers)] if numbers else None
    if op.type in ("Pack", "ConcatV2"):
        parts = op.inputs if op.type == "Pack" else op.inputs[:-1]
        if any((t.shape.rank or 0) > 1 for t in parts):
            return None
        values = [constant(t) for t in parts]
        return None if None in values else [n for v in values if v for n in v]
    return None


def _slice_views(op: tf.Operation) -> list[tuple[int, int]]:
    source, out = op.inputs[0], op.outputs[0]
    if source.shape.rank in (None, 0) or out.shape.rank != source.shape.rank:
        return []
    if not source.shape[1:].is_fully_defined() or source.shape[1:] != out.shape[1:]:
        return []
    same = source.shape.is_fully_defined() and source.shape == out.shape
    return [(0, 0)] if same or _rows_aligned(source) else []


def _strided_slice_views(op: tf.Operation) -> list[tuple[int, int]]:
    source, out = op.inputs[0], op.outputs[0]
    if source.shape.rank in (None, 0) or not source.shape.is_fully_defined():
        return []
    if element_count(source) == element_count(out):
        steps = constant(op.inputs[3])
        # A full reversal keeps the count, too.
        return [(0, 0)] if steps is not None and all(s == 1 for s in steps) else []
    begin, end, steps = (constant(t) for t in op.inputs[1:4])
    if begin is None or end is None or steps is None or not begin:
        return []
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask") or steps[0] != 1:
        return []
    begin_mask, end_mask = op.get_attr("begin_mask"), op.get_attr("end_mask")
    shrink = op.get_attr("shrink_axis_mask")
    if shrink & ~1 or any(s != 1 for s in steps):
        return []
    for axis in range(1, len(begin)):
        size = source.shape[axis]
        whole_begin = begin_mask >> axis & 1 or begin[axis] in (0, -size)
        whole_end = end_mask >> axis & 1 or end[axis] >= size
        if not (whole_begin and whole_end):
            return []
    return [(0, 0)] if _rows_aligned(source) else []


def _split_views(
    axis_input: int, value_input: int
) -> Callable[[tf.Operation], list[tuple[int, int]]]:
    def find(op: tf.Operation) -> list[tuple[int, int]]:
        outs = range(len(op.outputs))
        if len(op.outputs) == 1:
            return [(value_input, 0)]
        axis = constant(op.inputs[axis_input])
        source = op.inputs[value_input]
        rank = source.shape.rank
        if axis is None or rank is None or axis[0] % rank or not _rows_aligned(source):
            return []
        return [(value_input, i) for i in outs]

    return find


def _unpack_views(op: tf.Operation) -> list[tuple[int, int]]:
    source = op.inputs[0]
    rank = source.shape.rank
    if rank is None or op.get_attr("axis") % rank or not _rows_aligned(source):
        return []
    return [(0, i) for i in range(len(op.outputs))]


def _transpose_views(op: tf.Operation) -> list[tuple[int, int]]:
    shape = op.inputs[0].shape
    perm = constant(op.inputs[1])
    if perm is None or not shape.is_fully_defined():
        return []
    moved = [p for p in perm if shape[p] != 1]
    return [(0, 0)] if moved == sorted(moved) else []


_SPECIAL_VIEWS: dict[str, Callable[[tf.Operation], list[tuple[int, int]]]] = {
    "Slice": _slice_views,
    "StridedSlice": _strided_slice_views,
    "Split": _split_views(0, 1),
    "SplitV": _split_views(2, 0),
    "Unpack": _unpack_views,
    "Transpose": _transpose_views,
}

PARTS = words("Slice StridedSlice Split SplitV Unpack")
"""Operations whose output may be in a part of their input's memory."""

_MAY_VIEW = (
    SIMPLE_VIEWS | _VIEWS_IF_SAME_COUNT | words("IdentityN Cast AddN Pack") | set(_SPECIAL_VIEWS)
)
