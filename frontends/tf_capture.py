"""What a capture is: a training graph, and what each of its parts is in TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import tensorflow as tf

from optckpt.errors import GraphError
from optckpt.frontends.tf_inner import Inside
from optckpt.graph import TrainingGraph

Orders = dict[tf.Operation, tuple[int, ...]]
"""Sum -> its input indices in the order in which it has to add them."""

ViewChain = tuple[tuple[tf.Operation, int, int], ...]
"""(operation, input index, output index) of each step from a tensor to a view of it."""

SIBLING = -1
"""Input index of a step that leads from one output of an operation to another, which is in the same
memory: a list of elements that are in another list, too."""


@dataclass(frozen=True, eq=False)
class Past:
    """What a rewrite has left in a graph."""

    chain: tuple[tf.Operation, ...]
    """The operations that it has put in order."""
    outputs: tuple[tf.Tensor, ...]
    device: str
    whole: bool


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured step: the framework-free graph, and what each of its parts is in TensorFlow."""

    graph: TrainingGraph
    """Times are 0 until `optckpt.costs` has measured them."""
    tf_graph: tf.Graph
    """The live graph that was captured."""
    members: tuple[tf.Operation, ...]
    """Every TensorFlow operation that takes part, in a topological order."""
    units: tuple[tuple[tf.Operation, ...], ...]
    """The TensorFlow operations of each `graph.operations[i]`, in execution order."""
    tensors: tuple[tf.Tensor, ...]
    """The tensor that owns each `graph.buffers[b]`; others may be views of it."""
    device: str
    """Device the step runs on: "/device:CPU:0", "/device:GPU:1", ..."""
    chained: tuple[bool, ...]
    """Whether the rewritten graph fixes the place of each unit by control edges."""
    movable: tuple[bool, ...]
    """Whether the inputs of each unit may be redirected to re-executed copies."""
    away: tuple[bool, ...]
    """Whether each unit runs on another device; it needs no memory on this one."""
    internal: tuple[int, ...]
    """Bytes of the tensors that are made and used up inside each unit and need memory of their
    own; already part of `graph.operations[i].workspace`."""
    inside: dict[int, Inside]
    """For each unit that calls functions, what it needs inside."""
    views: dict[int, tuple[int, ViewChain]]
    """id(tensor) -> (buffer, chain of (view operation, input index, output index) that leads
    from the buffer's own tensor to this one), for every tensor in a buffer's memory."""
    outputs: tuple[tf.Tensor, ...]
    """The tensors that must be in memory at the end: losses, gradients, what is kept."""
    ignored: tuple[tuple[tf.Operation, int], ...]
    """(operation, input index) of inputs that a kernel ignores; the rewrite empties them."""
    plain_reads: tuple[tuple[int, int], ...]
    """(operation of the graph, buffer) that these inputs read where nothing is rewritten."""
    resident_blocks: tuple[int, ...]
    """Bytes of each variable, input and constant that the step finds in memory."""
    folded: tuple[int, ...]
    """Those of `resident_blocks` that TensorFlow will allocate before the first step: constants
    that it computes in advance. Smaller ones than `count_from` are left out."""
    arguments: tuple[tuple[tf.Tensor, int], ...]
    """(placeholder, bytes) of each of `resident_blocks` that is an argument of the graph. Smaller
    ones than `count_from` are left out."""
    count_from: int
    """Blocks smaller than this many bytes are not counted by the device's allocator."""
    chain_from: int
    """Operations on tensors smaller than this many bytes are left to themselves."""
    written_later: tuple[tuple[tf.Operation, ...], ...] = ()
    """For each unit the operations that change variables which its functions read: executions that
    are added come before them."""
    sums: Orders = field(default_factory=dict)
    """Of the sums of more than two tensors among `members`."""
    whole: bool = False
    """Whether this is a step with all its effects, after which nothing of it is in use but its
    outputs."""
    plain_order: tuple[int, ...] | None = None
    """The operations of the graph in the order in which they run where nothing is rewritten, if
    that is another one."""
    follows: tf.Operation | None = None
    """The last operation of a whole step before this one in the same graph."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Device -> part of the bytes that the operations of the step write, the largest first."""
    sized: Capture | None = None
    """If the graph was traced with unknown sizes: the same step in a copy of the graph in which
    they are known. Its operations are to be measured in the place of these."""

    def plain(self, graph: TrainingGraph) -> TrainingGraph:
        """`graph` (this one, or with costs) as TensorFlow runs it where nothing is rewritten."""
        more: dict[int, list[int]] = {}
        for u, b in self.plain_reads:
            more.setdefault(u, []).append(b)
        operations = list(graph.operations)
        for u, buffers in more.items():
            op = operations[u]
            operations[u] = replace(op, reads=(*op.reads, *buffers))
        plain = replace(graph, operations=tuple(operations))
        if self.plain_order is not None:
            with suppress(GraphError):
                plain = plain.in_order(self.plain_order)
        return plain

    def buffers_of(self, tensors: Iterable[tf.Tensor]) -> tuple[int, ...]:
        """The buffers that hold `tensors`; tensors that are always kept have none."""
        return tuple(dict.fromkeys(self.views[id(t)][0] for t in tensors if id(t) in self.views))
