"""Which tensors are in the same memory: at the sizes that are known, at some size, at all sizes.

An operation that has nothing to do returns its input: a sum over no axis, as there is one for every
broadcast in a backward pass. Where the sizes of a graph are not known this is seen on a copy in
which they are (`optckpt.frontends.tf_shadow`), or else it may be so or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_chance import is_always_view

Pairs = list[tuple[int, int]]


class Sharing(Protocol):
    """What is known of how operations use the memory of their inputs."""

    def pairs(self, op: tf.Operation) -> Pairs:
        """(input, output) index pairs where the output may be in the input's memory."""

    def is_all(self, op: tf.Operation, i: int, o: int) -> bool:
        """Whether output `o`, in the memory of input `i`, has as many elements as that."""

    def count(self, tensor: tf.Tensor) -> int | None:
        """Number of elements, or None if that is not known."""


class AtSizes:
    """As it is at the static sizes, or at those of the copies of operations."""

    def __init__(self, copies: Mapping[tf.Operation, tf.Operation] | None = None) -> None:
        self._copies = copies or {}

    def pairs(self, op: tf.Operation) -> Pairs:
        """See `Sharing`."""
        return _v1_pairs(op) or tf_ops.views_at_these_sizes(self._copies.get(op, op))

    def is_all(self, op: tf.Operation, i: int, o: int) -> bool:
        """See `Sharing`."""
        return _is_all(self._copies.get(op, op), i, o) is not False

    def count(self, tensor: tf.Tensor) -> int | None:
        """See `Sharing`."""
        op = tensor.op
        return tf_ops.element_count(self._copies.get(op, op).outputs[tensor.value_index])


class AtEverySize:
    """The least memory that is shared, whatever the sizes turn out to be."""

    def pairs(self, op: tf.Operation) -> Pairs:
        """See `Sharing`."""
        found = _v1_pairs(op) or tf_ops.views_at_these_sizes(op)
        if found or not tf_ops.depends_on_sizes(op.type):
            return found
        return tf_ops.possible_views(op) if is_always_view(op) else []

    def is_all(self, op: tf.Operation, i: int, o: int) -> bool:
        """See `Sharing`."""
        return _is_all(op, i, o) is not False

    def count(self, tensor: tf.Tensor) -> int | None:
        """See `Sharing`."""
        return tf_ops.element_count(tensor)


class AtSomeSize:
    """The most memory that is shared at any sizes."""

    def pairs(self, op: tf.Operation) -> Pairs:
        """See `Sharing`."""
        found = _v1_pairs(op) or tf_ops.views_at_these_sizes(op)
        return tf_ops.possible_views(op) if not found and _is_open(op) else found

    def is_all(self, op: tf.Operation, i: int, o: int) -> bool:
        """See `Sharing`."""
        return _is_all(op, i, o) is True

    def count(self, tensor: tf.Tensor) -> int | None:
        """See `Sharing`."""
        return tf_ops.element_count(tensor)


class Noted:
    """Hands on what is known at some sizes, and remembers of which operations."""

    def __init__(self, known: Sharing) -> None:
        self._known = known
        self._pairs: dict[tf.Operation, Pairs] = {}

    def pairs(self, op: tf.Operation) -> Pairs:
        """See `Sharing`."""
        found = self._pairs.get(op)
        if found is None:
            found = self._pairs[op] = self._known.pairs(op)
        return found

    def is_all(self, op: tf.Operation, i: int, o: int) -> bool:
        """See `Sharing`."""
        return self._known.is_all(op, i, o)

    def count(self, tensor: tf.Tensor) -> int | None:
        """See `Sharing`."""
        return self._known.count(tensor)

    def is_as(self, other: Sharing) -> bool:
        """Whether `other` says the same of how the memory of these operations is shared."""
        return all(
            found == other.pairs(op)
            and all(self.is_all(op, i, o) == other.is_all(op, i, o) for i, o in found)
            for op, found in self._pairs.items()
        )


def tells(op: tf.Operation) -> bool:
    """Whether the static sizes tell where the outputs of an operation are, as far as numbers go."""
    if not tf_ops.depends_on_sizes(op.type) or not _holds_numbers(op):
        return True
    if not tf_ops.views_at_these_sizes(op):
        return not _is_open(op)
    return all(_is_all(op, i, o) is not None for i, o in tf_ops.views_at_these_sizes(op))


def _holds_numbers(op: tf.Operation) -> bool:
    dtype = op.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


def _is_open(op: tf.Operation) -> bool:
    """Whether an operation that is no view at the static sizes may turn out to be one."""
    kind = op.type
    if not tf_ops.depends_on_sizes(kind):
        return False
    source, out = op.inputs[0], op.outputs[0]
    if kind == "Slice":
        return not _is_part_of_rows(source.shape, out.shape)
    if kind in tf_ops.PARTS:
        return True
    if kind == "Transpose":
        perm = tf_ops.constant(op.inputs[1])
        return perm is None or not source.shape.is_fully_defined()
    return tf_ops.element_count(source) is None or tf_ops.element_count(out) is None


def _is_part_of_rows(whole: tf.TensorShape, part: tf.TensorShape) -> bool:
    """Whether a part is narrower than the whole in another than its first dimension.

    Of such parts the kernel of Slice makes copies.
    """
    if whole.rank is None or part.rank is None:
        return False
    pairs = zip(whole.as_list()[1:], part.as_list()[1:], strict=True)
    return any(w is not None and p is not None and p < w for w, p in pairs)


def _is_all(op: tf.Operation, i: int, o: int) -> bool | None:
    """None: the static sizes do not tell."""
    if op.type not in tf_ops.PARTS:
        return True
    if op.type not in ("Slice", "StridedSlice"):
        return len(op.outputs) == 1
    whole, part = tf_ops.element_count(op.inputs[i]), tf_ops.element_count(op.outputs[o])
    return None if whole is None or part is None else whole == part


def _v1_pairs(op: tf.Operation) -> Pairs:
    if not tf_ops.is_control_flow_v1(op):
        return []
    return [
        (i, o)
        for i, t in enumerate(op.inputs)
        for o, out in enumerate(op.outputs)
        if t.dtype == out.dtype
    ]
