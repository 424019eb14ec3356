"""Operations that TensorFlow computes once because they are the same.

Before it runs a graph, TensorFlow merges operations of one type with the same attributes, inputs
and control inputs, unless they are stateful (common subexpression elimination). Of commutative
operations the inputs may be in any order. The readers of all of them then read one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from optckpt.frontends.tf_traced import Reading

_Key = tuple[object, ...]


class Twins:
    """The operations of a graph that are merged with each other. O(operations + edges).

    Args:
        nodes: the operations that run, in an order in which they may.
        reading: what they read.
    """

    def __init__(self, nodes: Sequence[tf.Operation], reading: Reading) -> None:
        self._reading = reading
        self._leader: dict[tf.Operation, tf.Operation] = {}
        """The first of the operations that look the same, but for attributes, as another one."""
        self._alike: dict[tf.Operation, list[tf.Operation]] = {}
        self._of: dict[tf.Operation, list[tf.Operation]] = {}
        self._same: dict[int, int] = {}
        """id(output) -> the same for the outputs of operations that look the same."""
        self._more: dict[tuple[tf.Operation, int], int] = {}
        """(leader, output index) -> what stands for outputs that only others have."""
        first: dict[_Key, tf.Operation] = {}
        for op in nodes:
            leader = first.setdefault(self._key(op), op)
            # Of one type all are stateful or none.
            if leader is not op and not op._is_stateful:
                self._leader[op] = leader
                self._alike.setdefault(leader, [leader]).append(op)
                self._note_same(op.outputs, leader)

    def of(self, op: tf.Operation) -> list[tf.Operation]:
        """The other operations that are merged with `op`."""
        found = self._of.get(op)
        if found is None:
            alike = self._alike.get(self._leader.get(op, op), ())
            found = [other for other in alike if other is not op and self._are_same(op, other)]
            self._of[op] = found
        return found

    def _key(self, op: tf.Operation) -> _Key:
        kind = op.type
        same = self._same
        # A loop's back edge comes from an operation that has no leader yet.
        made: list[object] = [same.get(id(t), id(t)) for t in self._reading.inputs(op)]
        if not made:
            made = [None, *(t.dtype.as_datatype_enum for t in op.outputs[:1])]
        elif len(made) > 1 and is_commutative(kind):
            made.sort()
        controls = self._reading.controls(op)
        return (kind, frozenset(controls), *made) if controls else (kind, *made)

    def _note_same(self, outputs: Sequence[tf.Tensor], leader: tf.Operation) -> None:
        others = leader.outputs
        for o, t in enumerate(outputs):
            if o < len(others):
                self._same[id(t)] = id(others[o])
            else:
                self._same[id(t)] = self._more.setdefault((leader, o), -1 - len(self._more))

    def _are_same(self, a: tf.Operation, b: tf.Operation) -> bool:
        """Whether two operations that look the same are the same, up to where they meet."""
        seen = {(a, b)}
        stack = [(a, b)]
        while stack:
            x, y = stack.pop()
            if x.device != y.device or x.node_def.attr != y.node_def.attr:
                return False
            left, right = self._reading.inputs(x), self._reading.inputs(y)
            for t, j in zip(left, self.matched(x, y), strict=True):
                pair = t.op, right[j].op
                if pair[0] is not pair[1] and pair not in seen:
                    seen.add(pair)
                    stack.append(pair)
        return True

    def matched(self, x: tf.Operation, y: tf.Operation) -> list[int]:
        """For each input of `x` the index of that input of `y`, which looks the same, with which
        it is merged if the two operations are."""
        left, right = self._reading.inputs(x), self._reading.inputs(y)
        if len(left) < 2 or not is_commutative(x.type):
            return list(range(len(left)))
        others = list(range(len(right)))
        found: dict[int, int] = {}
        for i, t in enumerate(left):
            j = next((j for j in others if right[j] is t), None)
            if j is not None:
                found[i] = j
                others.remove(j)
        mine = sorted(
            (i for i in range(len(left)) if i not in found), key=lambda i: self._rank(left[i])
        )
        others.sort(key=lambda j: self._rank(right[j]))
        found.update(zip(mine, others, strict=True))
        return [found[i] for i in range(len(left))]

    def _rank(self, tensor: tf.Tensor) -> tuple[int, int, bytes]:
        """The same for tensors that are the same, and for few others."""
        op = tensor.op
        leader = self._leader.get(op, op)
        several = len(self._alike.get(leader, ())) > 1
        attributes = sorted(op.node_def.attr.items()) if several else ()
        text = b"".join(k.encode() + v.SerializeToString() for k, v in attributes)
        return leader._id, tensor.value_index, text


@functools.cache
def is_commutative(kind: str) -> bool:
    """Whether the inputs of operations of this type may change places."""
    definition = op_def_registry.get(kind)
    return definition is not None and bool(definition.is_commutative)
