"""Memory that the units of a capture share or use behind their inputs and outputs.

A loop hands on what it got; a list keeps the elements of another in memory; a call needs memory
for what happens inside it. It may free an input on the way, if that is never read later, whatever
the schedule is: if nothing that reads it may be executed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_bodies import Bodies
from optckpt.frontends.tf_interpret import Workspace
from optckpt.frontends.tf_nodes import Node
from optckpt.graph import Operation

Views = Mapping[int, tuple[int, object]]
"""id(tensor) -> (buffer, ...)."""


class Holders:
    """Which buffers a tensor keeps in memory beside the one that it is in."""

    def __init__(self, bodies: Bodies, views: Views) -> None:
        self._bodies = bodies
        self._views = views
        self._holds: dict[int, tuple[int, ...]] = {}

    def of(self, tensor: tf.Tensor) -> tuple[int, ...]:
        """The buffers that `tensor` keeps besides."""
        return self._holds.get(id(tensor), ())

    def add_view(self, source: tf.Tensor, view: tf.Tensor) -> None:
        """Note that `view` is `source` under another name."""
        if id(source) in self._holds:
            self._holds[id(view)] = self._holds[id(source)]

    def is_read(self, node: Node, i: int) -> bool:
        """Whether the operation needs its input number `i`."""
        return node.kind not in tf_ops.CALLS or i in self._bodies.reads(node.op)

    def passed(self, node: Node) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """(tensor, output) of what a call, branch or loop hands on unchanged or once more."""
        found = self._bodies.outputs(node.op) if node.kind in tf_ops.CALLS else None
        if found is None:
            return []
        pairs = []
        for t, i, o in zip(node.outputs, found.passed, found.repeated, strict=True):
            if i is not None:
                pairs.append((node.inputs[i], t))
            elif o is not None:
                pairs.append((node.outputs[o], t))
        return pairs

    def without_memory(self, node: Node) -> set[int]:
        """id() of the outputs of a call, branch or loop that are in no memory of their own."""
        found = self._bodies.outputs(node.op) if node.kind in tf_ops.CALLS else None
        if found is None:
            return set()
        return {
            id(t)
            for t, (count, _), passed in zip(node.outputs, found.own, found.passed, strict=True)
            if not count or passed is not None
        }

    def kept_inputs(self, node: Node) -> dict[int, tuple[int, ...]]:
        """id() of outputs of a call, branch or loop -> buffers of its inputs that they keep."""
        found = self._bodies.outputs(node.op) if node.kind in tf_ops.CALLS else None
        if found is None:
            return {}
        return {
            id(t): tuple(dict.fromkeys(b for i in held for b in self._all(node.inputs[i])))
            for t, held in zip(node.outputs, found.held_inputs, strict=True)
            if held
        }

    def add(self, node: Node, counted: Mapping[int, Collection[int]]) -> set[int]:
        """Look at the outputs of an operation whose own buffers are known.

        Returns the buffers of others that they keep: it would be of no use to make these again.

        Args:
            counted: id() of outputs -> buffers that are counted as parts of theirs.
        """
        kept: set[int] = set()
        found = self._bodies.outputs(node.op) if node.kind in tf_ops.CALLS else None
        for o, t in enumerate(node.outputs):
            if found is not None:
                if found.passed[o] is not None or found.repeated[o] is not None:
                    continue
                others = [node.inputs[i] for i in found.held_inputs[o]]
                others += [node.outputs[i] for i in found.held_outputs[o]]
            elif t.dtype == tf.variant and not tf_ops.views(node.op):
                inside = set(self._bodies.value(t).blocks)
                others = [i for i in node.inputs if inside & set(self._bodies.value(i).blocks)]
            else:
                continue
            mine = counted.get(id(t), ())
            buffers = dict.fromkeys(
                b for other in others for b in self._all(other) if b not in mine
            )
            if buffers:
                self._holds[id(t)] = tuple(buffers)
                kept.update(buffers)
        return kept

    def _all(self, tensor: tf.Tensor) -> tuple[int, ...]:
        view = self._views.get(id(tensor))
        return self.of(tensor) if view is None else (view[0], *self.of(tensor))


@dataclass(frozen=True, eq=False)
class Inside:
    """What a unit that calls functions needs in memory beside its inputs and outputs."""

    op: tf.Operation
    bodies: Bodies
    dying: frozenset[int]
    """Indices of the inputs whose memory is free for use inside, as nobody can read it later."""
    counted: Callable[[int], int]
    """What the allocator counts of a block of so many bytes."""
    spared: int = 0
    """Bytes that are not needed, if an input in `Operation.inplace` dies."""

    def workspace(self, of: Workspace | None = None) -> int:
        """`Operation.workspace`, in bytes; `of`: that of each operation inside."""
        return max(0, self.spared + self._need(of))

    def _need(self, of: Workspace | None = None) -> int:
        return self.bodies.workspace(self.op, self.dying, self.counted, of)


def look_inside(
    units: Sequence[tuple[tf.Operation, Operation]],
    bodies: Bodies,
    buffer_of: Callable[[tf.Tensor], Sequence[int]],
    sizes: Sequence[int],
    held: Sequence[int],
    counted: Callable[[int], int],
) -> tuple[list[Operation], dict[int, Inside]]:
    """The operations with the workspace and the in-place inputs of those that call functions.

    Args:
        units: the TensorFlow operation (the first of several) and what it is in the graph.
        buffer_of: the buffers that a tensor keeps in memory.
        sizes: bytes of each buffer, as counted.
        held: buffers that are in memory to the end.
    """
    last: dict[int, int] = {}
    unsure: set[int] = set(held)
    for u, (_, operation) in enumerate(units):
        last.update(dict.fromkeys(operation.reads, u))
        if operation.repeatable:
            unsure.update(operation.reads)
    last.update(dict.fromkeys(held, len(units)))
    operations = []
    found: dict[int, Inside] = {}
    for u, (op, operation) in enumerate(units):
        if not tf_ops.is_call(op) or bodies.outputs(op) is None:
            operations.append(operation)
            continue
        buffers = [buffer_of(t) for t in op.inputs]
        dying = frozenset(
            i
            for i, bs in enumerate(buffers)
            if bs and all(last.get(b) == u and b not in unsure for b in bs)
        )
        inside = Inside(op, bodies, dying, counted)
        need = inside._need()
        out = sizes[operation.writes[0]] if operation.writes else 0
        same = [b for b in operation.reads if out and sizes[b] == out]
        # An input is freed inside before the outputs are there.
        sure = [b for b in same if last.get(b) == u and b not in unsure]
        taken = sure if need < 0 else []
        if taken:
            inside = replace(inside, spared=out)
        else:
            taken = [b for b in same if b not in sure and _is_spared(inside, buffers, b, out)]
        found[u] = inside
        operations.append(replace(operation, workspace=inside.workspace(), inplace=tuple(taken)))
    return operations, found


def _is_spared(inside: Inside, buffers: Sequence[Sequence[int]], b: int, out: int) -> bool:
    """Whether `out` bytes less are needed where nobody reads buffer `b` later."""
    more = {i for i, bs in enumerate(buffers) if tuple(bs) == (b,)}
    less = replace(inside, dying=inside.dying | more)
    return bool(more) and less._need() + out <= inside.workspace()
