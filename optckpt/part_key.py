"""What a part is traced for: two calls with equal keys have the same trace."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from optckpt import part_keras


@dataclass(frozen=True)
class _Constant:
    """Something that is no tensor: of its type, because 1 == 1.0 == True."""

    kind: type
    value: Any = field(hash=False)


def key_of(
    structure: Any, leaves: Sequence[Any], places: Sequence[int], masks: Mapping[int, tf.Tensor]
) -> Any:
    """The key of a call, or None if something in it cannot be compared with that of another call.

    `leaves` of the `structure` of arguments at `places` are tensors, which may have `masks`.
    """
    tensors = set(places)
    shape = repr(tf.nest.pack_sequence_as(structure, [0] * len(leaves)))
    described: list[Any] = []
    for i, leaf in enumerate(leaves):
        if i in tensors:
            described.append((_signature(leaf), _signature(masks[i]) if i in masks else None))
        elif is_variable(leaf):
            described.append((leaf if callable(leaf.value) else leaf.value).ref())
        else:
            described.append(_constant(leaf))
    described += map(_constant, part_keras.state())
    return None if any(d is None for d in described) else (shape, tuple(described))


def _constant(value: Any) -> _Constant | None:
    """`value` as it is now, whatever becomes of it; None if it cannot be compared."""
    if isinstance(value, float | complex):
        # 0.0 == -0.0, and nan is not nan.
        return _Constant(type(value), repr(value))
    if isinstance(value, set | frozenset):
        return _Constant(type(value), frozenset((type(v), v) for v in value))
    try:
        hash(value)
        return _Constant(type(value), value)
    except TypeError:
        pass
    try:
        now = copy.deepcopy(value)
        return _Constant(type(value), now) if now == value else None
    except Exception:  # Of whatever the value's own methods do.
        return None


def _signature(tensor: tf.Tensor) -> Any:
    return tensor.dtype, None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def is_array(leaf: Any) -> bool:
    """Whether it is an array that is no tensor."""
    return hasattr(leaf, "__array__") and not tf.is_tensor(leaf) and not hasattr(leaf, "assign")


def is_variable(leaf: Any) -> bool:
    """Whether it is a tf.Variable or a keras.Variable: the function uses it, like one outside."""
    return hasattr(leaf, "handle") and hasattr(leaf, "assign")
