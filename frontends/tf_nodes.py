"""The operations of a TensorFlow graph, each read once.

What an operation or a tensor is asked for (type, inputs, maker, control inputs) goes through C++
every time and costs up to a microsecond. A capture asks for the same things many times; it works on
nodes, which have the answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import tensorflow as tf


class Node:
    """A TensorFlow operation and what was read from it. Nodes are equal if they are the same."""

    __slots__ = ("control_inputs", "inputs", "kind", "makers", "number", "op", "outputs")

    def __init__(self, op: tf.Operation) -> None:
        self.op = op
        self.kind: str = op.type
        self.number: int = op._id
        """Place in the order of creation."""
        self.inputs: tuple[tf.Tensor, ...] = op.inputs
        self.outputs: list[tf.Tensor] = op.outputs
        self.makers: list[Node] = []
        """The node that makes each input; known once the node's ancestors have been looked up."""
        self.control_inputs: list[Node] = []
        """Known as `makers` are."""


by_creation = attrgetter("number")
"""Sort key."""


class Nodes:
    """The nodes of one graph, made when first asked for."""

    def __init__(self) -> None:
        self._of: dict[tf.Operation, Node] = {}
        self._looked_up: set[Node] = set()

    def of(self, op: tf.Operation) -> Node:
        """The node of an operation, always the same."""
        node = self._of.get(op)
        if node is None:
            node = self._of[op] = Node(op)
        return node

    def ancestors(self, roots: Iterable[Node], seen: Iterable[Node] = ()) -> set[Node]:
        """`seen`, and `roots` with all they depend on by data and control edges.

        What is in `seen` has been looked up and is not looked into again.
        """
        found = set(seen)
        stack = [node for node in roots if node not in found]
        found.update(stack)
        while stack:
            node = stack.pop()
            if node not in self._looked_up:
                self._looked_up.add(node)
                node.makers = [self.of(t.op) for t in node.inputs]
                node.control_inputs = [self.of(p) for p in node.op.control_inputs]
            for p in (*node.makers, *node.control_inputs):
                if p not in found:
                    found.add(p)
                    stack.append(p)
        return found


def ancestors(roots: Iterable[tf.Operation]) -> set[tf.Operation]:
    """`roots` and all operations that they depend on by data and control edges."""
    nodes = Nodes()
    return {node.op for node in nodes.ancestors([nodes.of(op) for op in roots])}
