"""Values of variables that outlive their being overwritten.

Reading a variable copies nothing. Whoever still holds what was read when the variable is assigned
keeps the old memory: the assignment puts the new value elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_nodes import Node

VARIABLE_READS = tf_ops.words("""
    ReadVariableOp _ReadVariablesOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp
    """)
"""Operations that take a variable's handle and leave the variable as it is."""


def earlier_writers(needed: Collection[Node], among: Collection[Node]) -> list[tf.Operation]:
    """Operations beside `among` that assign, before they are read, variables that `needed` reads.

    A tf.function runs them, and the reads after them: nothing that they wait for can be put after
    what is computed from such a read. "Before" is meant in order of creation.
    """
    last_read: dict[int, int] = {}
    handles: dict[int, tf.Tensor] = {}
    for node in needed:
        for handle in _handles(node):
            handles[id(handle)] = handle
            last_read[id(handle)] = max(last_read.get(id(handle), 0), node.number)
    if not handles:
        return []
    known = {node.op for node in among}
    found: dict[tf.Operation, None] = {}
    for key, handle in handles.items():
        stack = [handle]
        while stack:
            t = stack.pop()
            for op in t.consumers():
                if op.type == "Identity":
                    stack += op.outputs
                elif (
                    op._id < last_read[key]
                    and op.type not in VARIABLE_READS
                    and op not in known
                    and op._is_stateful
                    and not _only_reads(op, t)
                ):
                    found[op] = None
    return list(found)


def _only_reads(op: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether a call is known to leave the variable as it is."""
    try:
        read: Iterable[int] = op.get_attr("_read_only_resource_inputs")
    except ValueError:
        return False
    return all(i in set(read) for i, t in enumerate(op.inputs) if t is handle)


class Versions:
    """What was read of each variable since it was last assigned, along a topological order."""

    def __init__(self, order: Sequence[tuple[Node, ...]]) -> None:
        self._place = {node.op: i for i, group in enumerate(order) for node in group}
        self._assigned = {
            id(handle)
            for group in order
            for node in group
            if node.kind not in VARIABLE_READS
            and node.kind not in tf_ops.CALLS
            and node.op._is_stateful
            for handle in _handles(node)
        }
        self._read: dict[int, list[tf.Tensor]] = {}
        self._same: dict[int, list[tf.Tensor]] = {}

    def add_read(self, node: Node) -> None:
        """Note a ReadVariableOp of a variable that is assigned somewhere."""
        if not self._assigned or node.kind != "ReadVariableOp":
            return
        (handle,) = _handles(node)
        if id(handle) in self._assigned:
            (value,) = node.outputs
            self._read.setdefault(id(handle), []).append(value)
            self._same[id(value)] = [value]

    def add_view(self, source: tf.Tensor, view: tf.Tensor) -> None:
        """Note that `view` is in the memory of `source`."""
        family = self._same.get(id(source))
        if family is not None:
            family.append(view)
            self._same[id(view)] = family

    def overwritten(
        self, group: tuple[Node, ...], is_large: Callable[[tf.Tensor], bool]
    ) -> list[list[tf.Tensor]]:
        """Tensors in the memory that `group` overwrites, for each variable it assigns.

        All tensors of one list hold the same value, in one piece of memory.
        """
        found = []
        for node in group if self._assigned else ():
            if node.kind in VARIABLE_READS or node.kind in tf_ops.CALLS:
                continue
            for handle in _handles(node):
                values = self._read.pop(id(handle), [])
                family = [t for v in values for t in self._same[id(v)]]
                if family and is_large(family[0]):
                    found.append(family)
        return found

    def is_read_after(self, tensor: tf.Tensor, group: tuple[Node, ...]) -> bool:
        """Whether an operation that comes after `group` reads the tensor."""
        here = self._place[group[0].op]
        return any(
            self._place.get(c, -1) > here and c.type not in tf_ops.METADATA
            for c in tensor.consumers()
        )


def _handles(node: Node) -> list[tf.Tensor]:
    handles = []
    for t in node.inputs:
        if t.dtype == tf.resource:
            while t.op.type == "Identity":
                t = t.op.inputs[0]
            handles.append(t)
    return handles
