"""Operations that TensorFlow merges with no other, as far as their neighbourhood tells.

To know which operations are the same (`optckpt.frontends.tf_twins`) takes a walk over all of a
graph. Of most it is plain that they are not: they depend on a variable in a way in which no other
operation does.
"""

from __future__ import annotations

import tensorflow as tf

from optckpt.frontends.tf_traced import Changes
from optckpt.frontends.tf_twins import is_commutative

_DEPTH = 8

_Kind = tuple[str, int]


class Unique:
    """What is plainly unique in a graph; remembers what it has found.

    Args:
        changed: if the graph as it was traced is asked for: what rewrites have changed in it. An
            operation that is near a change is not plainly unique.
    """

    def __init__(self, changed: Changes | None = None) -> None:
        self._found: dict[tf.Operation, int] = {}
        """Operation -> how deep it was looked into in vain; -1: it is unique."""
        self._near: set[tf.Operation] = set()
        if changed is not None:
            self._near.update(changed.added)
            for (op, i), t in changed.inputs.items():
                self._near.update((op, t.op, op.inputs[i].op))
            for edge in changed.controls:
                self._near.update(edge)

    def is_near_change(self, op: tf.Operation) -> bool:
        """Whether what `op` reads or waits for, or what reads its outputs, was changed."""
        return op in self._near

    def holds(self, op: tf.Operation, depth: int = _DEPTH) -> bool:
        """Whether it is plain that no other operation computes the same as `op`."""
        if op in self._near:
            return False
        known = self._found.get(op, 0)
        if known < 0 or known >= depth:
            return known < 0
        # Also ends the walk around a TensorFlow 1 loop.
        self._found[op] = depth
        found = any(self._is_source(t.op, depth) and _reads_alone(op, t) for t in op.inputs)
        if found:
            self._found[op] = -1
        return found

    def _is_source(self, op: tf.Operation, depth: int) -> bool:
        """Whether what reads `op` in another way than all others do is unique."""
        if op in self._near:
            return False
        # Two reads of a variable are never merged.
        return op.type == "ReadVariableOp" or self.holds(op, depth - 1)


def _reads_alone(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether no other operation that reads `tensor` can compute the same as `op`."""
    kind = op.type
    inputs = None
    for other in tensor.consumers():
        if other is op or other.type != kind:
            continue
        if inputs is None:
            inputs = _kinds(op)
        if _kinds(other) == inputs and set(other.control_inputs) == set(op.control_inputs):
            return False
    return True


def _kinds(op: tf.Operation) -> list[_Kind]:
    """Of inputs: the same for tensors that are the same."""
    found = [(t.op.type, t.value_index) for t in op.inputs]
    return sorted(found) if is_commutative(op.type) else found
