"""Which views are views at every size: for graphs in which some dimensions are not known.

An operation that has nothing to do returns its input (a tile once, a sum over an axis of length 1).
Where that is so at the sizes a step was planned at, and not at others, it is no view: its output
is then taken for memory of its own at all sizes, which never predicts too little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from optckpt.frontends import tf_ops


def is_view_by_chance(op: tf.Operation, sized: tf.Operation) -> bool:
    """Whether an operation whose copy `sized` is a view is none at other sizes."""
    if not tf_ops.depends_on_sizes(op.type) or not tf_ops.views(sized) or tf_ops.views(op):
        return False
    if all(t.shape.is_fully_defined() for t in (op.inputs[0], *op.outputs)):
        return False
    return not is_always_view(op)


def is_always_view(op: tf.Operation) -> bool:
    """Whether an operation with unknown sizes shares its input's memory at all of them.

    For operations that depend on sizes; as far as the static shapes tell.
    """
    rule = _RULES.get(op.type)
    return rule is not None and rule(op)


def _is_one(shape: tf.TensorShape, axis: int) -> bool:
    rank = shape.rank
    return rank is not None and -rank <= axis < rank and shape[axis] == 1


def _reduces_nothing(op: tf.Operation) -> bool:
    axes = tf_ops.constant(op.inputs[1])
    if axes is None:
        return _undoes_no_broadcast(op)
    return all(_is_one(op.inputs[0].shape, a) for a in axes)


def _undoes_no_broadcast(op: tf.Operation) -> bool:
    """Whether the axes are those along which a tensor was broadcast with one of the same shape."""
    axes = op.inputs[1].op
    if axes.type != "BroadcastGradientArgs":
        return False
    shapes = [t.op for t in axes.inputs]
    if any(s.type != "Shape" for s in shapes):
        return False
    mine, other = (_as_large(s.inputs[0]) for s in shapes)
    return mine is other


def _as_large(tensor: tf.Tensor) -> tf.Tensor:
    """The first tensor of this shape in a chain of operations on single elements."""
    kept = tf_ops.SAME_SIZE - {"Reshape", "ExpandDims", "Squeeze", "Bitcast"}
    while tensor.op.type in kept:
        tensor = tensor.op.inputs[0]
    return tensor


def _all_are(value: int) -> Callable[[tf.Operation], bool]:
    def rule(op: tf.Operation) -> bool:
        numbers = tf_ops.constant(op.inputs[1])
        return numbers is not None and all(n == value for n in numbers)

    return rule


def _keeps_order(op: tf.Operation) -> bool:
    perm = tf_ops.constant(op.inputs[1])
    shape = op.inputs[0].shape
    if perm is None or shape.rank is None:
        return False
    moved = [p for p in perm if shape[p] != 1]
    return moved == sorted(moved)


def _rows_aligned(tensor: tf.Tensor) -> bool:
    """Whether rows along axis 0 start at aligned addresses, whatever the unknown dimensions are."""
    if not tensor.shape.rank:
        return False
    known = int(tensor.dtype.size)
    for n in tensor.shape.as_list()[1:]:
        known *= 1 if n is None else n
    return known % 64 == 0


def _slices_rows(op: tf.Operation) -> bool:
    source = op.inputs[0]
    begin, size = tf_ops.constant(op.inputs[1]), tf_ops.constant(op.inputs[2])
    if begin is None or size is None or source.shape.rank != len(begin):
        return False
    dims = source.shape.as_list()
    whole = [b == 0 and (s == -1 or s == n) for b, s, n in zip(begin, size, dims, strict=True)]
    return all(whole) or (all(whole[1:]) and _rows_aligned(source))


def _strided_slice(op: tf.Operation) -> bool:
    source = op.inputs[0]
    begin, end, steps = (tf_ops.constant(t) for t in op.inputs[1:4])
    if begin is None or end is None or steps is None or source.shape.rank is None:
        return False
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis")}
    shrink = op.get_attr("shrink_axis_mask")
    if any(s != 1 for s in steps):
        return False
    whole = _whole_axes(source.shape, begin, end, masks, shrink)
    if all(whole):
        return True
    simple = not masks["ellipsis"] and not masks["new_axis"] and not shrink & ~1
    return simple and all(whole[1:]) and _rows_aligned(source)


def _whole_axes(
    shape: tf.TensorShape,
    begin: Sequence[int],
    end: Sequence[int],
    masks: dict[str, int],
    shrink: int,
) -> list[bool]:
    """For each entry of a slice, whether it takes all of its axis at any size."""
    whole = []
    axis = 0
    for k in range(len(begin)):
        if masks["ellipsis"] >> k & 1:
            after = sum(not masks["new_axis"] >> j & 1 for j in range(k + 1, len(begin)))
            axis = (shape.rank or 0) - after
            whole.append(True)
            continue
        if masks["new_axis"] >> k & 1:
            whole.append(True)
            continue
        size = shape[axis] if axis < (shape.rank or 0) else None
        if shrink >> k & 1:
            whole.append(size == 1)
        else:
            from_start = bool(masks["begin"] >> k & 1) or begin[k] == 0
            to_end = bool(masks["end"] >> k & 1) or (size is not None and end[k] >= size)
            whole.append(from_start and to_end)
        axis += 1
    return whole


def _splits_rows(axis_input: int, value_input: int) -> Callable[[tf.Operation], bool]:
    def rule(op: tf.Operation) -> bool:
        axis, source = tf_ops.constant(op.inputs[axis_input]), op.inputs[value_input]
        rank = source.shape.rank
        return axis is not None and bool(rank) and not axis[0] % rank and _rows_aligned(source)

    return rule


def _unpacks_rows(op: tf.Operation) -> bool:
    source = op.inputs[0]
    rank = source.shape.rank
    return bool(rank) and not op.get_attr("axis") % rank and _rows_aligned(source)


_REDUCTIONS = tf_ops.words("Sum Mean Prod Max Min All Any EuclideanNorm")
_RULES: dict[str, Callable[[tf.Operation], bool]] = {
    **dict.fromkeys(_REDUCTIONS, _reduces_nothing),
    "Tile": _all_are(1),
    "Pad": _all_are(0),
    "PadV2": _all_are(0),
    "Transpose": _keeps_order,
    "Slice": _slices_rows,
    "StridedSlice": _strided_slice,
    "Split": _splits_rows(0, 1),
    "SplitV": _splits_rows(2, 0),
    "Unpack": _unpacks_rows,
}
"""By type of operation: whether it is a view at any size, as far as the static shapes tell."""
