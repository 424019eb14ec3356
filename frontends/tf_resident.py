"""What is in memory throughout the step: variables, arguments, constants, and what is folded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_shapes import Sizes


class Residents:
    """Resident tensors and their bytes, gathered along a topological order."""

    def __init__(self, sizes: Sizes, is_here: Callable[[tf.Operation], bool] | None) -> None:
        """`is_here`: whether an operation runs on the device in question; None: all do."""
        self._sizes = sizes
        self._is_here = is_here
        self._holders: dict[int, int] = {}
        """id(tensor) -> key of the block that it is in."""
        self._readers: dict[int, bool] = {}
        """Key of a block that is read -> whether an operation here reads it."""
        self._references: set[int] = set()
        self._constants: set[int] = set()
        self._blocks: dict[int, int] = {}
        """id(what holds the memory) -> bytes."""
        self._arguments: list[tf.Tensor] = []
        self._folds: set[tf.Operation] = set()
        self._folded: list[tf.Tensor] = []
        self._keys: dict[tf.Operation, bytes] = {}

    def add(self, node: Node) -> None:
        """Count a variable, an argument or a constant."""
        for t in node.outputs:
            key = id(t)
            if node.kind == "Const":
                self._constants.add(key)
                size = self._sizes.of(t)
            else:
                if tf_ops.is_reference(t.dtype):
                    self._references.add(key)
                if node.kind in tf_ops.PLACEHOLDERS and t.dtype != tf.resource:
                    self._arguments.append(t)
                handle = node.inputs[0] if node.kind == "ReadVariableOp" else t
                while handle.op.type == "Identity":
                    handle = handle.op.inputs[0]
                key = id(handle)
                size = handle_bytes(t) if t.dtype == tf.resource else self._sizes.of(t)
            if self._is_here is not None:
                self._holders[id(t)] = key
                if node.kind == "ReadVariableOp":
                    self._note(key, node.op)
            # Where an argument's unknown size matters, what is computed from it raises.
            self._blocks[key] = max(self._blocks.get(key, 0), size or 0)

    def add_view(self, source: tf.Tensor, view: tf.Tensor) -> None:
        """Note that `view` shares the memory of `source`, which may be resident."""
        for tensors in (self._references, self._constants):
            if id(source) in tensors:
                tensors.add(id(view))
        if id(source) in self._holders:
            self._holders[id(view)] = self._holders[id(source)]

    def note_reads(self, node: Node) -> None:
        """Note where what the operation reads is needed."""
        for t in node.inputs:
            key = self._holders.get(id(t))
            if key is not None:
                self._note(key, node.op)

    def _note(self, key: int, reader: tf.Operation) -> None:
        assert self._is_here is not None
        self._readers[key] = self._readers.get(key, False) or self._is_here(reader)

    def add_folded(self, node: Node) -> bool:
        """Count what the executor computes once, before the first step, and keeps.

        Returns whether it does so with this operation.
        """
        if any(id(t) not in self._constants for t in node.inputs):
            return False
        if not tf_ops.is_foldable(node.op):
            return False
        if any(self._sizes.exact(t) > tf_ops.LARGEST_FOLDED for t in node.outputs):
            return False
        for t in node.outputs:
            self._constants.add(id(t))
            if self._sizes.large(t):
                self._folded.append(t)
        self._folds.add(node.op)
        return True

    def is_reference(self, tensor: tf.Tensor) -> bool:
        """Whether the tensor is the memory of a variable that is changed in place."""
        return id(tensor) in self._references

    def blocks(self, members: Collection[tf.Operation]) -> tuple[int, ...]:
        """Bytes of each block, in a step of the operations `members`."""
        here = (size for key, size in self._blocks.items() if self._readers.get(key, True))
        return (*here, *self.folded(members))

    def arguments(self) -> tuple[tuple[tf.Tensor, int], ...]:
        """(placeholder, bytes of its block) of each that is needed here."""
        here = (t for t in self._arguments if self._readers.get(id(t), True))
        return tuple((t, self._blocks[id(t)]) for t in here)

    def folded(self, members: Collection[tf.Operation]) -> tuple[int, ...]:
        """Bytes of each constant that is not there before the first step."""
        blocks: dict[object, int] = {}
        for t in self._folded:
            # Of a chain of constants only the last is kept; equal ones are one.
            readers = [c for c in t.consumers() if c in members and c not in self._folds]
            if any(self._is_here is None or self._is_here(c) for c in readers):
                blocks[self._key(t)] = self._sizes.exact(t)
        return tuple(blocks.values())

    def _key(self, tensor: tf.Tensor) -> bytes:
        """Equal for tensors that are computed alike from equal constants."""
        op = tensor.op
        if op not in self._keys:
            digest = hashlib.sha256(op.type.encode())
            for name, value in sorted(op.node_def.attr.items()):
                if not name.startswith("_"):
                    digest.update(name.encode() + value.SerializeToString(deterministic=True))
            for t in op.inputs:
                digest.update(self._key(t))
            self._keys[op] = digest.digest()
        return self._keys[op] + bytes((int(tensor.value_index),))


def handle_bytes(handle: tf.Tensor) -> int:
    """Bytes of the variable behind a resource handle (0 if it is none or has no fixed shape)."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return 0
    entry = data.shape_and_type[0]
    dims = [d.size for d in entry.shape.dim]
    if entry.shape.unknown_rank or min(dims, default=0) < 0:
        return 0
    return int(math.prod(dims) * tf.as_dtype(entry.dtype).size)
