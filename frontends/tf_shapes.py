"""Bytes of tensors from their static shapes, and who is to blame where a shape is unknown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import tensorflow as tf

from optckpt.errors import UnknownSizeError
from optckpt.frontends.tf_bodies import Bodies
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_ops import (
    METADATA,
    RESIDENT,
    SAME_SIZE,
    batch_norm_reserve,
    constant,
    element_bytes,
    element_count,
    words,
)

CHAIN_FROM = 64 * 1024
"""Default size in bytes from which a tensor is large, if the largest tensor is 4 MiB or more."""

_TINY = 1024
"""Bytes below which a tensor of unknown size is taken for small whatever the others are."""

# Input that holds the shape of the output.
_SHAPE_INPUT = {"Reshape": 1, "Fill": 0, "BroadcastTo": 1, "ScatterNd": 2, "Empty": 0}
_SHAPE_INPUT_PREFIXES = (
    "RandomUniform",
    "RandomStandardNormal",
    "TruncatedNormal",
    "StatelessRandom",
)

# Their outputs are never larger than their inputs, but for a wider index type.
_NOT_LARGER = words("""
    Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2 Where ListDiff DynamicPartition
    StridedSlice Slice ConcatV2 Concat Pack Reshape Squeeze ExpandDims Cast Identity Unpack
    Split SplitV Shape Size Rank Prod Sum Max Min Neg InvertPermutation BroadcastGradientArgs
    """)


DECLARE = (
    "declare the largest that will be used (section sizes of the configuration: batch, inputs; or "
    "optckpt.sizes.at)"
)
"""Advice where the size of an input is not known."""


def tensor_bytes(tensor: tf.Tensor) -> int | None:
    """Bytes of the tensor's data, or None where the static shape does not tell.

    Handles, variants and strings count as 0: what they refer to is not theirs.
    """
    element = element_bytes(tensor.dtype)
    if not element:
        return 0
    count = element_count(tensor)
    if count is None and (tensor.op.type, tensor.value_index) == ("FusedBatchNormV3", 5):
        return batch_norm_reserve(tensor.op)
    if count is None:
        shape = _shape_from_input(tensor)
        count = None if shape is None else shape.num_elements()
        if count is None:
            return None
    return int(count) * element


class Sizes:
    """Bytes of tensors, and which of them are large (at least `chain_from` bytes)."""

    def __init__(
        self, nodes: Collection[Node], chain_from: int | None, kept: Iterable[tf.Tensor] = ()
    ) -> None:
        self._bytes: dict[int, int | None] = {}
        self.bodies = Bodies([node.op for node in nodes], kept)
        if chain_from is None:
            largest = 0
            for node in nodes:
                if node.kind not in RESIDENT:
                    for t in node.outputs:
                        largest = max(largest, self.of(t) or 0)
            chain_from = max(1, min(CHAIN_FROM, largest // 64))
        self.chain_from = chain_from

    def of(self, tensor: tf.Tensor) -> int | None:
        key = id(tensor)
        if key not in self._bytes:
            self._bytes[key] = self._find(tensor)
        return self._bytes[key]

    def _find(self, tensor: tf.Tensor) -> int | None:
        size = tensor_bytes(tensor)
        if size == 0 and tensor.dtype == tf.variant:
            return self.bodies.own(tensor)[1]
        source = tensor
        while size is None and source.op.type in SAME_SIZE:
            source = source.op.inputs[0]
            size = tensor_bytes(source)
        return size

    def pieces(self, tensor: tf.Tensor) -> int:
        """In how many blocks of memory of equal size the tensor is: the length of a list."""
        return self.bodies.own(tensor)[0] if tensor.dtype == tf.variant else 1

    def exact(self, tensor: tf.Tensor) -> int:
        """Bytes; 0 for a tensor of unknown size that is surely small. Raises CaptureError."""
        size = self.of(tensor)
        if size is None:
            size = self._bytes[id(tensor)] = _known_to_reader(tensor)
        if size is None:
            bound = at_most(tensor, self.of)
            if bound is None or bound >= max(self.chain_from, _TINY):
                raise unknown_size(tensor)
            self._bytes[id(tensor)] = size = 0
        return size

    def large(self, tensor: tf.Tensor) -> bool:
        size = self.of(tensor) or 0
        if size < self.chain_from and tensor.dtype == tf.variant:
            size = self.bodies.held(tensor)[1]
        return size >= self.chain_from


def _known_to_reader(tensor: tf.Tensor) -> int | None:
    """Bytes of a tensor of unknown shape that is reshaped to, or declared to be, a known one."""
    for op in tensor.consumers():
        if op.type in ("Reshape", "EnsureShape", "Identity") and op.inputs[0] is tensor:
            size = tensor_bytes(op.outputs[0])
            if size is not None:
                return size
    return None


def _shape_from_input(tensor: tf.Tensor) -> tf.TensorShape | None:
    op = tensor.op
    index = _SHAPE_INPUT.get(op.type)
    if index is None and op.type.startswith(_SHAPE_INPUT_PREFIXES):
        index = 0
    if index is None or index >= len(op.inputs):
        return None
    dims = constant(op.inputs[index])
    return None if dims is None or min(dims, default=0) < 0 else tf.TensorShape(dims)


def at_most(tensor: tf.Tensor, bytes_of: Callable[[tf.Tensor], int | None]) -> int | None:
    """An upper bound on the bytes of a tensor of unknown shape, or None."""
    op = tensor.op
    if op.type in METADATA:
        return 0
    if op.type not in _NOT_LARGER:
        return None
    total = 0
    for t in op.inputs:
        size = bytes_of(t)
        if size is None:
            return None
        total += size
    if op.type == "Where":
        # One int64 per axis for each element that is not zero, of one byte at least.
        return total * 8 * (op.inputs[0].shape.rank or 1)
    # The type of indices may be twice as wide as that of the values.
    return total * 2


def unknown_size(tensor: tf.Tensor) -> UnknownSizeError:
    """The error for a tensor whose size cannot be known, naming what makes it so."""
    culprits = _culprits(tensor)
    shape = str(tensor.shape)
    head = f"the size of {tensor.name!r} ({tensor.op.type}, shape {shape}) is not known"
    inputs = [t for t in culprits if t.op.type in RESIDENT]
    if inputs:
        named = ", ".join(f"{argument_name(t.op)!r} has shape {t.shape}" for t in inputs[:4])
        return UnknownSizeError(
            f"{head}, because the input {named}; a plan needs sizes: {DECLARE}, give the "
            "tf.function an input_signature without None, call it with tensors of one batch size, "
            "or set batch_size / drop_remainder=True on the data set"
        )
    if culprits:
        t = culprits[0]
        advice = (
            f"{DECLARE}, or set drop_remainder=True on the data set's batch()"
            if "Iterator" in t.op.type
            else "its size depends on the data; give it a fixed size (set_shape, tf.ensure_shape, "
            "or padding to a maximum)"
        )
        return UnknownSizeError(
            f"{head}, because of operation {t.op.name!r} ({t.op.type}): {advice}"
        )
    return UnknownSizeError(f"{head}; set its shape with tf.ensure_shape")


def argument_name(op: tf.Operation) -> str:
    """The name of an input as the user knows it: of the argument, if it is one."""
    try:
        return str(op.get_attr("_user_specified_name").decode())
    except ValueError:
        return str(op.name)


def _culprits(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The nearest tensors, going up, where an unknown size comes in; placeholders first."""
    found: list[tf.Tensor] = []
    seen = {id(tensor)}
    stack = [tensor]
    while stack:
        t = stack.pop()
        if t.op.type in RESIDENT:
            if not t.shape.is_fully_defined():
                found.append(t)
            continue
        unknown = [i for i in t.op.inputs if not i.shape.is_fully_defined()]
        if not unknown:
            # The shape may have been computed from numbers that stem from an unknown shape.
            unknown = [
                i for i in t.op.inputs if i.dtype in (tf.int32, tf.int64) and constant(i) is None
            ]
            if not unknown:
                found.append(t)
        for i in unknown:
            if id(i) not in seen:
                seen.add(id(i))
                stack.append(i)
    found.sort(key=lambda t: (t.op.type not in RESIDENT, t.op._id))
    return found
