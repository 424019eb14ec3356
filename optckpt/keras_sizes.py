"""The sizes of what `fit` trains on under a distribution strategy.

Where the last batch may be smaller, the batches of a distributed iterator have no size that it
would know, and it cannot be asked for one batch without losing it. Keras knows how large its
batches are at most.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from optckpt import sizes
from optckpt.config import Config

_Shape = tf.TensorShape

_FAR = 20
"""Frames between `fit` and the training function at most."""


def of_replicas(iterator: Any, replicas: int, settings: Config) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors that each of so many replicas gets at most.

    () if the iterator knows them, or nobody does, or the user has declared sizes.
    """
    if settings.sizes.batch or settings.sizes.inputs or sizes.are_given():
        return ()
    parts = tf.nest.flatten(tf.nest.map_structure(_of_one_replica, iterator.element_spec))
    shapes = [part.shape for part in parts if isinstance(getattr(part, "shape", None), _Shape)]
    if len(shapes) < len(parts) or not all(shape.rank for shape in shapes):
        return ()
    known = [shape.is_fully_defined() for shape in shapes]
    if all(known) or not all(shape[1:].is_fully_defined() for shape in shapes):
        return ()
    batch = _batch_of_fit()
    if batch is None:
        return ()
    each = -(-batch // replicas)
    return tuple((each, *shape[1:].as_list()) for shape in shapes)


def _of_one_replica(spec: Any) -> Any:
    """The spec of the first replica's value."""
    return getattr(spec, "_value_specs", (spec,))[0]


def _batch_of_fit() -> int | None:
    """The largest number of samples in a batch of the `fit` that trains now, of all replicas.

    Keras hands it to nobody; it is in the frame of `fit`.
    """
    frame = sys._getframe()
    for _ in range(_FAR):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == "fit" and "epoch_iterator" in frame.f_locals:
            adapter = getattr(frame.f_locals["epoch_iterator"], "data_adapter", None)
            batch = getattr(adapter, "batch_size", None)
            return batch if isinstance(batch, int) else None
    return None
