"""In which order the sums of a graph add, so that a rewrite can keep it.

TensorFlow's AddN takes over the memory of the first of its inputs that nothing else holds when it
runs, and that input changes places with the first one. Numbers are added from left to right, so
with three inputs or more the last bits tell which input it was. (Two may change places: addition
commutes.) Which inputs die at a sum is what a rewrite changes: who reads what, and when.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_capture import Capture, Orders
from optckpt.frontends.tf_nodes import Nodes
from optckpt.frontends.tf_sharing import AtSizes, Sharing
from optckpt.frontends.tf_traced import Reading, changes
from optckpt.frontends.tf_twins import Twins
from optckpt.frontends.tf_unique import Unique

log = logging.getLogger("optckpt.frontends.tf_sums")


def is_sum(op: tf.Operation) -> bool:
    """Whether the bits of the operation's result depend on the order of its inputs."""
    if op.type != "AddN" or len(op.inputs) < 3:
        return False
    dtype = op.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


class Fate(Enum):
    """What becomes of an input's memory when a sum runs."""

    DIES = "dies"
    """Only the sum holds it."""
    LIVES = "lives"
    """Something else holds it, too."""
    MAY_DIE = "may die"
    """Depends on what the executor happens to run first; likely only the sum holds it."""
    MAY_LIVE = "may live"
    """Depends on what the executor happens to run first; likely something else holds it."""


def orders(
    tf_graph: tf.Graph,
    members: Sequence[tf.Operation],
    ys: Iterable[tf.Tensor],
    gradients: Iterable[tf.Tensor],
    outputs: Iterable[tf.Tensor],
    nodes: Nodes | None = None,
    copies: Mapping[tf.Operation, tf.Operation] | None = None,
) -> Orders:
    """The order in which each sum among `members` adds in the graph as it was traced.

    Where that depends on what the executor happens to run first, the likeliest. Of a sum that a
    rewrite has added it is the order of the sum that it executes again.

    Args:
        members: the operations of the step, in an order in which they may run.
        outputs: tensors that are in memory at the end.
        nodes: what has been read of the operations already.
        copies: of a graph that was traced with unknown sizes: the operations in a copy of it that
            has the sizes for which the order is asked.
    """
    found = [op for op in members if is_sum(op)]
    if not found:
        return {}
    known = changes(tf_graph)
    rewritten = bool(known.added or known.inputs or known.controls)
    sharing = AtSizes(copies)
    held = {id(t) for t in outputs}
    unique = Unique(known)
    natural: Orders = {
        op: tuple(range(len(op.inputs))) for op in found if takes_first(op, held, sharing, unique)
    }
    found = [op for op in found if op not in natural]
    if not found:
        return natural
    origins = {op: known.added.get(op) or op for op in found}
    reading = Reading(tf_graph, traced=True, nodes=nodes)
    sums = Sums(
        dict.fromkeys(origins.values()),
        reading.closure((*origins.values(), *members)) if rewritten else members,
        reading,
        outputs,
        unused_from=_first_backward(reading, ys, gradients),
        sharing=sharing,
    )
    result: Orders = {}
    for op, origin in origins.items():
        first, matched = sums.merged_with(origin)
        order = list(range(len(op.inputs)))
        fates = sums.fates[first]
        taken = next((i for i, f in enumerate(fates) if f in (Fate.DIES, Fate.MAY_DIE)), 0)
        if taken > 1:
            order[0], order[taken] = taken, 0
        if len({max(i, 1) for i in may_take(fates)}) > 1:
            log.debug("the order in which %r adds depends on timing", origin.name)
        order = [matched[i] for i in order]
        now = known.orders.get(op, tuple(range(len(order))))
        result[op] = tuple(now.index(i) for i in order)
    return natural | result


def takes_first(op: tf.Operation, held: Container[int], sharing: Sharing, unique: Unique) -> bool:
    """Whether it is plain that a sum takes over the memory of its first input.

    That is so if nobody else reads it and TensorFlow neither merges its maker with another
    operation nor computes it in advance. Others need a walk over the whole graph. `held`: ids of
    the tensors in memory at the end.
    """
    first = op.inputs[0]
    maker = first.op
    return (
        id(first) not in held
        and not unique.is_near_change(op)
        and first.consumers() == [op]
        and sum(t is first for t in op.inputs) == 1
        and not sharing.pairs(maker)
        and unique.holds(maker)
    )


def with_orders(
    found: Capture,
    ys: Iterable[tf.Tensor],
    gradients: Iterable[tf.Tensor],
    nodes: Nodes | None = None,
    copies: Mapping[tf.Operation, tf.Operation] | None = None,
) -> Capture:
    """`found` with the orders of its sums, which take over the memory that these allow.

    Arguments as those of `orders`.
    """
    sums = orders(found.tf_graph, found.members, ys, gradients, found.outputs, nodes, copies)
    if not sums:
        return found
    operations = list(found.graph.operations)
    for u, (op, *_) in enumerate(found.units):
        if op in sums:
            first = (op.inputs[i] for i in inplace_inputs(op, sums[op]))
            buffers = found.buffers_of(first)
            inplace = tuple(b for b in operations[u].inplace if b in buffers)
            operations[u] = replace(operations[u], inplace=inplace)
    graph = replace(found.graph, operations=tuple(operations))
    sized = found.sized and replace(found.sized, graph=graph)
    return replace(found, graph=graph, sums=sums, sized=sized)


def may_take(fates: Sequence[Fate]) -> set[int]:
    """Indices of the inputs that the kernel may put first."""
    found = set()
    for i, fate in enumerate(fates):
        if fate is not Fate.LIVES:
            found.add(i)
        if fate is Fate.DIES:
            return found
    return found | {0}


def at_any_size(least: Fate, most: Fate) -> Fate:
    """What may become of an input of which this becomes when as little or as much memory is shared
    as the sizes allow."""
    if least is most:
        return least
    return Fate.MAY_LIVE if most is Fate.LIVES else Fate.MAY_DIE


def inplace_inputs(op: tf.Operation, order: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of the inputs whose memory a sum that adds in this order may take over."""
    if op in changes(op.graph).copies:
        return (0, *(i for i in order[1:2] if i))
    return order[:2]


def _first_backward(
    reading: Reading, ys: Iterable[tf.Tensor], gradients: Iterable[tf.Tensor]
) -> int:
    forward = reading.reached([t.op for t in ys])
    backward = reading.reached([t.op for t in gradients])
    return min((op._id for op in backward - forward), default=0)


class Sums:
    """What becomes of the inputs of sums. O(operations + edges) words of one bit per reader.

    Args:
        nodes: the operations that run, in an order in which they may.
        held: tensors that are in memory at the end.
        unused_from: readers beside `nodes` do not run if they were made with or after this number.
        sharing: which tensors are in the same memory.
        twins: of the same operations, if these are known already.
        timed: whether it matters what is likely where it depends on timing; else no time is
            estimated.
    """

    def __init__(
        self,
        sums: Iterable[tf.Operation],
        nodes: Sequence[tf.Operation],
        reading: Reading,
        held: Iterable[tf.Tensor],
        *,
        unused_from: int,
        sharing: Sharing,
        twins: Twins | None = None,
        timed: bool = True,
    ) -> None:
        self._reading = reading
        self._sharing = sharing
        self._held = {id(t) for t in held}
        self._order = nodes
        self._nodes = set(nodes)
        self._timed = timed
        self._unused_from = unused_from
        self._readers: dict[int, list[tf.Operation]] = {}
        self._constants: set[tf.Operation] = set()
        """What the executor computes in advance and keeps."""
        for op in nodes:
            for t in reading.inputs(op):
                self._readers.setdefault(id(t), []).append(op)
            makers = reading.makers(op)
            if not makers:
                constant = op.type == "Const"
            else:
                # The order of the two conditions is that of their cost.
                constant = self._constants.issuperset(makers) and tf_ops.is_foldable(op)
            if constant:
                self._constants.add(op)
        self.twins = twins or Twins(nodes, reading)
        self._times: dict[tf.Operation, float] = {}
        self._found: dict[int, list[tf.Operation] | None] = {}
        holders = {op: [self._holders(t) for t in reading.inputs(op)] for op in sums}
        self._bit: dict[tf.Operation, int] = {}
        for op, found in holders.items():
            for other in (op, *reading.makers(op), *(h for others in found for h in others or ())):
                for same in (other, *self.twins.of(other)):
                    self._bit.setdefault(same, 1 << len(self._bit))
        self._above: dict[tf.Operation, int] = {}
        for op in nodes:
            bits = self._bit.get(op, 0)
            for p in reading.before(op):
                bits |= self._above[p]
            self._above[op] = bits
        self.fates = {op: [self._fate(op, others) for others in holders[op]] for op in holders}
        """Of each input of each sum."""

    @functools.cached_property
    def _start(self) -> dict[tf.Operation, float]:
        """When an operation would run if each ran as soon as it can, in elements touched."""
        found: dict[tf.Operation, float] = {}
        for op in self._order:
            before = self._reading.before(op)
            found[op] = max((found[p] + self._time(p) for p in before), default=0.0)
        return found

    def _time(self, op: tf.Operation) -> float:
        found = self._times.get(op)
        if found is None:
            found = self._times[op] = self._estimate(op)
        return found

    def _estimate(self, op: tf.Operation) -> float:
        """How long an operation takes: a model in which all that counts is what it touches."""
        if op.type in tf_ops.METADATA or op.type in tf_ops.RESIDENT or op in self._constants:
            return 0.0
        if self._sharing.pairs(op):
            return 0.0
        sizes = [float(self._sharing.count(t) or 0) for t in (*op.inputs, *op.outputs)]
        time = sum(sizes) + 1.0
        if op.type.startswith(_CONTRACTIONS) and len(sizes) > 2:
            # Of matrices of m x k, k x n and m x n elements: m k n.
            time += math.sqrt(sizes[0] * sizes[1] * sizes[2]) / _PER_ELEMENT
        return time

    def merged_with(self, op: tf.Operation) -> tuple[tf.Operation, list[int]]:
        """The first of the sums that TensorFlow merges with one, and for each input of that sum the
        index of the one's own."""
        first = min((op, *self.twins.of(op)), key=lambda other: other._id)
        if first not in self.fates:
            return op, list(range(len(op.inputs)))
        return first, self.twins.matched(first, op)

    def late_makers(self, op: tf.Operation) -> list[tf.Operation]:
        """The makers of inputs of a sum that may run after all its control inputs have."""
        done = 0
        for p in self._reading.controls(op):
            done |= self._above[p]
        makers = dict.fromkeys(self._reading.makers(op))
        return [m for m in makers if m.type not in tf_ops.RESIDENT and not done & self._bit[m]]

    def _fate(self, op: tf.Operation, holders: list[tf.Operation] | None) -> Fate:
        if holders is None or holders.count(op) > 1:
            return Fate.LIVES
        sums = (op, *self.twins.of(op))
        sure = likely = True
        for h in holders:
            if h in sums:
                continue
            # What is merged runs when all that any of them waits for has run.
            merged = (h, *self.twins.of(h))
            if any(self._above[s] & self._bit[m] for s in sums for m in merged):
                continue
            if any(self._above.get(m, 0) & self._bit[s] for s in sums for m in merged):
                return Fate.LIVES
            sure = False
            # What gets ready at the same time runs at the same time, but for what takes no time:
            # the executor does that first.
            if likely and self._timed:
                start = self._start
                likely = start.get(h, 0.0) + self._time(h) <= start[op]
        return Fate.DIES if sure else Fate.MAY_DIE if likely else Fate.MAY_LIVE

    def _holders(self, tensor: tf.Tensor) -> list[tf.Operation] | None:
        """The operations that read `tensor` or another one in the same memory, each as often as
        it does; None if no kernel ever gets that memory."""
        root = self._root(tensor)
        if root is None:
            return None
        if id(root) not in self._found:
            self._found[id(root)] = self._search(root)
        return self._found[id(root)]

    def _root(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """The tensor that was made in this memory; None if `tensor` is only a part of it."""
        seen: set[int] = set()
        while id(tensor) not in seen:
            seen.add(id(tensor))
            op = tensor.op
            for i, o in self._sharing.pairs(op):
                if op.outputs[o] is tensor:
                    if not self._sharing.is_all(op, i, o):
                        return None
                    tensor = self._reading.inputs(op)[i]
                    break
        return tensor

    def _search(self, root: tf.Tensor) -> list[tf.Operation] | None:
        if root.op.type in tf_ops.RESIDENT or root.op in self._constants:
            return None
        found: list[tf.Operation] = []
        stack = [root, *(op.outputs[root.value_index] for op in self.twins.of(root.op))]
        seen = {id(t) for t in stack}
        while stack:
            t = stack.pop()
            if id(t) in self._held:
                return None
            for op in dict.fromkeys((*self._readers.get(id(t), ()), *self._beside(t))):
                if op.type.startswith(_KEEPERS):
                    return None
                aliases = self._sharing.pairs(op)
                for i, x in enumerate(self._reading.inputs(op)):
                    if x is t:
                        found.append(op)
                        for out in (op.outputs[o] for j, o in aliases if j == i):
                            if id(out) not in seen:
                                seen.add(id(out))
                                stack.append(out)
        return found

    def _beside(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Readers that no gradient needs, but that may run all the same."""
        return [
            op
            for op in tensor.consumers()
            if op not in self._nodes
            and op._id < self._unused_from
            and op.type not in tf_ops.METADATA
            and self._reading.is_there(op)
        ]


_CONTRACTIONS = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "Einsum")
_PER_ELEMENT = 8
"""Multiplications in the time in which an element is read or written."""

_KEEPERS = ("Assign", "TensorList", "TensorArray", "Stack")
"""What keeps the memory of a tensor that it is given: variables and lists."""
