"""Operations that TensorFlow computes once because they are the same.

Before it runs a graph, TensorFlow merges operations of one type with the same attributes, inputs
and control inputs, unless they are stateful (common subexpression elimination). The readers of all
of them then read one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

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
        """The first of the operations that look the same: but for attributes."""
        self._alike: dict[tf.Operation, list[tf.Operation]] = {}
        first: dict[_Key, tf.Operation] = {}
        for op in nodes:
            leader = first.setdefault(self._key(op), op)
            self._leader[op] = leader
            self._alike.setdefault(leader, []).append(op)

    def of(self, op: tf.Operation) -> list[tf.Operation]:
        """The other operations that are merged with `op`."""
        alike = self._alike.get(self._leader.get(op, op), ())
        return [other for other in alike if other is not op and self._are_same(op, other)]

    def _key(self, op: tf.Operation) -> _Key:
        if op._is_stateful:
            return (op,)
        inputs = self._reading.inputs(op)
        # A loop's back edge comes from an operation that has no leader yet.
        made = ((self._leader.get(t.op, t.op), t.value_index) for t in inputs)
        dtype = None if inputs else [t.dtype for t in op.outputs][:1]
        return (op.type, str(dtype), frozenset(self._reading.controls(op)), *made)

    def _are_same(self, a: tf.Operation, b: tf.Operation) -> bool:
        """Whether two operations that look the same are the same, up to where they meet."""
        seen = {(a, b)}
        stack = [(a, b)]
        while stack:
            x, y = stack.pop()
            if x.device != y.device or x.node_def.attr != y.node_def.attr:
                return False
            for t, u in zip(self._reading.inputs(x), self._reading.inputs(y), strict=True):
                pair = t.op, u.op
                if t.op is not u.op and pair not in seen:
                    seen.add(pair)
                    stack.append(pair)
        return True
