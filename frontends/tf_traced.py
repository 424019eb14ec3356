"""The graph as it was traced: what rewrites have changed in it, and how to see through that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tensorflow as tf

from optckpt.frontends.tf_nodes import Node, Nodes

_CHANGES = "_optckpt_changes"

_marks = itertools.count()


def next_mark() -> bytes:
    """A value for the attribute `tf_ops.MARK` of an operation that a rewrite adds."""
    return str(next(_marks)).encode()


@dataclass(eq=False, slots=True)
class Changes:
    """What all rewrites of one graph have changed."""

    inputs: dict[tuple[tf.Operation, int], tf.Tensor] = field(default_factory=dict)
    """(operation, input index) -> the tensor that was read there before the first change."""
    added: dict[tf.Operation, tf.Operation | None] = field(default_factory=dict)
    """Operation -> the one as traced that it executes again; None: it is of another kind."""
    controls: set[tuple[tf.Operation, tf.Operation]] = field(default_factory=set)
    """Control edges (before, after)."""
    orders: dict[tf.Operation, tuple[int, ...]] = field(default_factory=dict)
    """Sum -> which of the inputs as traced each of its inputs now is, if they were permuted."""
    copies: dict[tf.Operation, tf.Operation] = field(default_factory=dict)
    """Sum -> the copy of an input that it reads first."""

    def redirect(self, op: tf.Operation, i: int, source: tf.Tensor) -> None:
        """Make `op` read `source` as its input `i`."""
        self.inputs.setdefault((op, i), op.inputs[i])
        op._update_input(i, source)


def changes(graph: tf.Graph) -> Changes:
    """What rewrites have changed in `graph`; to be kept up to date by whoever changes more."""
    found: Changes | None = getattr(graph, _CHANGES, None)
    if found is None:
        found = Changes()
        setattr(graph, _CHANGES, found)
    return found


def carry_changes(
    graph: tf.Graph, copy: tf.Graph, copies: Mapping[tf.Operation, tf.Operation]
) -> None:
    """Change a copy of `graph` as it was traced in the way in which rewrites have changed `graph`.

    `copies`: operation -> its copy; operations that were not copied count for nothing.
    """
    known: Changes | None = getattr(graph, _CHANGES, None)
    if known is None:
        return
    mine = changes(copy)

    def there(*found: tf.Operation | None) -> bool:
        return all(op is None or op in copies for op in found)

    def tensor(t: tf.Tensor) -> tf.Tensor:
        return copies[t.op].outputs[t.value_index]

    for (op, i), t in known.inputs.items():
        if there(op, t.op, op.inputs[i].op):
            copies[op]._update_input(i, tensor(op.inputs[i]))
            mine.inputs[copies[op], i] = tensor(t)
    for before, op in known.controls:
        if there(before, op) and before in op.control_inputs:
            copies[op]._add_control_input(copies[before])
            mine.controls.add((copies[before], copies[op]))
    for op, origin in known.added.items():
        if there(op, origin):
            mine.added[copies[op]] = None if origin is None else copies[origin]
    mine.orders.update((copies[op], order) for op, order in known.orders.items() if there(op))
    mine.copies.update((copies[a], copies[b]) for a, b in known.copies.items() if there(a, b))


@contextmanager
def as_traced(graph: tf.Graph) -> Iterator[None]:
    """Within the context, the operations of `graph` read what they read before any rewrite.

    For differentiation: derivatives taken through re-executions would be sums of other terms.
    """
    known: Changes | None = getattr(graph, _CHANGES, None)
    if known is None or not known.inputs:
        yield
        return
    now = [(op, i, op.inputs[i]) for op, i in known.inputs]
    try:
        for (op, i), t in known.inputs.items():
            op._update_input(i, t)
        yield
    finally:
        for op, i, t in now:
            op._update_input(i, t)


class Reading:
    """Who reads what in a graph: as it is, or as it was traced."""

    def __init__(
        self, graph: tf.Graph, *, traced: bool = False, nodes: Nodes | None = None
    ) -> None:
        """`nodes`: what has been read of the graph, as it is, already."""
        self._known: Changes | None = getattr(graph, _CHANGES, None) if traced else None
        self._inputs: dict[tf.Operation, tuple[tf.Tensor, ...]] = {}
        self._makers: dict[tf.Operation, list[tf.Operation]] = {}
        self._before: dict[tf.Operation, list[tf.Operation]] = {}
        self._nodes: dict[tf.Operation, Node] = nodes or {}

    def inputs(self, op: tf.Operation) -> tuple[tf.Tensor, ...]:
        """What `op` reads."""
        found = self._inputs.get(op)
        if found is None:
            node = self._nodes.get(op)
            found = op.inputs if node is None else node.inputs
            known = self._known
            if known is not None and known.inputs:
                found = tuple(known.inputs.get((op, i), t) for i, t in enumerate(found))
            self._inputs[op] = found
        return found

    def makers(self, op: tf.Operation) -> list[tf.Operation]:
        """The operation that makes each of its inputs."""
        found = self._makers.get(op)
        if found is None:
            node = self._nodes.get(op)
            if node is not None and node.makers and not (self._known and self._known.inputs):
                found = [maker.op for maker in node.makers]
            else:
                found = [t.op for t in self.inputs(op)]
            self._makers[op] = found
        return found

    def controls(self, op: tf.Operation) -> list[tf.Operation]:
        """The control inputs of `op`."""
        found: list[tf.Operation] = op.control_inputs
        known = self._known
        if known is not None and known.controls:
            found = [p for p in found if (p, op) not in known.controls and p not in known.added]
        return found

    def is_there(self, op: tf.Operation) -> bool:
        """Whether the graph has the operation."""
        return self._known is None or op not in self._known.added

    def before(self, op: tf.Operation) -> list[tf.Operation]:
        """The operations that `op` waits for; the back edges of TensorFlow 1 loops left out."""
        found = self._before.get(op)
        if found is None:
            found = self.makers(op)
            if op.type in _LOOP_HEADS:
                found = [p for p in found if p.type not in _BACK]
            controls = self.controls(op)
            if controls:
                found = [*found, *controls]
            self._before[op] = found
        return found

    def reached(self, roots: Iterable[tf.Operation]) -> set[tf.Operation]:
        """`roots` that are there and all that they wait for."""
        stack = [op for op in roots if self.is_there(op)]
        found = set(stack)
        while stack:
            new = set(self.before(stack.pop())) - found
            if new:
                found |= new
                stack += new
        return found

    def closure(self, roots: Iterable[tf.Operation]) -> list[tf.Operation]:
        """As `reached`, in an order in which the operations may run."""
        order: list[tf.Operation] = []
        is_done: dict[tf.Operation, bool] = {}
        stack = [op for op in roots if self.is_there(op)]
        stack.reverse()
        while stack:
            op = stack[-1]
            done = is_done.get(op)
            if done is None:
                is_done[op] = False
                stack += [p for p in self.before(op) if p not in is_done]
                continue
            stack.pop()
            if not done:
                is_done[op] = True
                order.append(op)
        return order


_BACK = ("NextIteration", "RefNextIteration")
_LOOP_HEADS = ("Merge", "RefMerge")
