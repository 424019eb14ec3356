"""What is collected while a graph is read: units of operations, and the buffers that they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import tensorflow as tf

from optckpt.frontends.tf_capture import ViewChain
from optckpt.frontends.tf_inner import Holders
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_purity import Variables
from optckpt.frontends.tf_resident import Residents
from optckpt.frontends.tf_shapes import Sizes


@dataclass(slots=True)
class Unit:
    """What becomes an `Operation`; see there and in `Capture` for what is not explained here."""

    group: tuple[Node, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inplace: tuple[int, ...]
    after: tuple[int, ...]
    forward: bool
    repeatable: bool
    chained: bool
    movable: bool
    internal: int
    """Bytes, of blocks of all sizes."""
    away: bool
    """Whether it runs on another device than the one that is planned for."""


@dataclass(slots=True)
class TensorBuffer:
    """What becomes a `Buffer`."""

    tensor: tf.Tensor
    size: int
    """Bytes, of blocks of all sizes."""
    pieces: int
    """In how many blocks of equal size it is."""
    producer: int


@dataclass(frozen=True)
class Built:
    """All that is known of a step when each of its operations has been read."""

    order: Sequence[tuple[Node, ...]]
    units: Sequence[Unit]
    buffers: Sequence[TensorBuffer]
    views: Mapping[int, tuple[int, ViewChain]]
    """id(tensor) -> the buffer that it is in, and the way there; see `Capture.views`."""
    holders: Holders
    residents: Residents
    variables: Variables
    sizes: Sizes
    small: Sequence[int]
    """Bytes of tensors that are too small to be planned."""
    pinned: Set[int]
    """Units whose outputs others hold on to."""
    unit_of: Mapping[tf.Operation, int]
    overwrites: Mapping[tf.Operation, Set[int]]
    """Operation -> units that overwrite a variable which it reads."""
    ignored: Sequence[tuple[tf.Operation, int]]
    plain_reads: Sequence[tuple[int, int]]
    device: str
    """The one to plan for."""
    alone: bool
    """Whether all operations run there."""
