"""The operations of a TensorFlow graph, each read once.

What an operation or a tensor is asked for (type, inputs, maker, control inputs) goes through C++
every time and costs up to a microsecond. A capture asks for the same things many times; it works on
nodes, which have the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import tensorflow as tf


class Node:
    """A TensorFlow operation and what was read from it. Nodes are equal if they are the same."""

    __slots__ = ("control_inputs", "effects", "inputs", "kind", "makers", "number", "op", "outputs")

    def __init__(self, op: tf.Operation) -> None:
        self.op = op
        self.kind: str = op.type
        self.number: int = op._id
        """Place in the order of creation."""
        self.inputs: tuple[tf.Tensor, ...] = op.inputs
        self.outputs: list[tf.Tensor] = op.outputs
        self.makers: Sequence[Node] = ()
        """The node that makes each input; known once the node's ancestors have been looked up."""
        self.control_inputs: Sequence[Node] = ()
        """Known as `makers` are."""
        self.effects: list[Node] = []
        """Stateful operations that tf.function puts before it; known once they are in order."""


by_creation = attrgetter("number")
"""Sort key."""


GIVEN = "Placeholder"
"""Kind of a node whose operation has been done before: its outputs are like arguments."""


class Nodes(dict[tf.Operation, Node]):
    """The node of each operation of a graph, made when first asked for."""

    def __missing__(self, op: tf.Operation) -> Node:
        node = self[op] = Node(op)
        return node

    def give(self, op: tf.Operation) -> None:
        """Take what `op` computes as given, and do not look at what it is computed from."""
        node = self[op]
        node.kind, node.inputs, node.makers, node.control_inputs = GIVEN, (), (), ()

    def ancestors(self, roots: Iterable[tf.Operation], seen: Iterable[Node] = ()) -> set[Node]:
        """`seen`, and `roots` with all they depend on by data and control edges.

        What is in `seen` has been looked up before and is not looked into again.
        """
        found = set(seen)
        stack = [node for node in map(self.__getitem__, roots) if node not in found]
        found.update(stack)
        while stack:
            node = stack.pop()
            if node.kind == GIVEN:
                continue
            node.makers = [self[t.op] for t in node.inputs]
            node.control_inputs = [self[p] for p in node.op.control_inputs]
            for before in (node.makers, node.control_inputs):
                for p in before:
                    if p not in found:
                        found.add(p)
                        stack.append(p)
        return found


def ancestors(roots: Iterable[tf.Operation]) -> set[tf.Operation]:
    """`roots` and all operations that they depend on by data and control edges."""
    return {node.op for node in Nodes().ancestors(roots)}
