"""A capture of the plainest kind for the tests of costs: every operation is a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from optckpt.costs import cost
from optckpt.frontends.tf_bodies import Bodies
from optckpt.frontends.tf_inner import Inside
from optckpt.graph import Buffer, Operation, TrainingGraph


@dataclass(frozen=True)
class PlainCapture:
    graph: TrainingGraph
    units: tuple[tuple[tf.Operation, ...], ...]
    device: str = "/device:CPU:0"
    inside: Mapping[int, Any] = field(default_factory=dict)

    def index(self, kind: str) -> int:
        """Position of the first operation of this kind."""
        return next(i for i, op in enumerate(self.graph.operations) if op.kind == kind)


def capture_units(
    units: Sequence[Sequence[tf.Operation]],
    *,
    in_place: Sequence[str] = (),
    outputs: Sequence[tf.Tensor] = (),
    device: str = "/device:CPU:0",
) -> PlainCapture:
    number: dict[Any, int] = {}
    buffers: list[Buffer] = []
    operations = []
    for unit in units:
        kind = "+".join(op.type for op in unit)
        reads = tuple(
            dict.fromkeys(number[t.ref()] for op in unit for t in op.inputs if t.ref() in number)
        )
        writes = []
        for op in unit:
            for t in op.outputs:
                number[t.ref()] = len(buffers)
                writes.append(len(buffers))
                count = t.shape.num_elements() if t.shape.rank is not None else None
                buffers.append(Buffer(t.name, (count or 0) * max(t.dtype.size or 0, 0)))
        taken = tuple(
            b
            for b in reads
            if kind in in_place and writes and buffers[b].size == buffers[writes[0]].size
        )
        operations.append(Operation(unit[0].name, kind, 0.0, reads, tuple(writes), inplace=taken))
    graph = TrainingGraph(
        tuple(operations), tuple(buffers), tuple(number[t.ref()] for t in outputs)
    )
    bodies = Bodies()
    inside = {
        i: Inside(unit[0], bodies, frozenset(), lambda size: size)
        for i, unit in enumerate(units)
        if bodies.outputs(unit[0]) is not None
    }
    return PlainCapture(graph, tuple(tuple(u) for u in units), device, inside)


def capture_ops(ops: Sequence[tf.Operation], **options: Any) -> PlainCapture:
    return capture_units([(op,) for op in ops], **options)


def trace(function: Any, *args: Any) -> list[tf.Operation]:
    """The operations of a function traced on `args` (tensors or specs)."""
    concrete = tf.function(function, autograph=False).get_concrete_function(*args)
    # Operations do not keep their graph alive, and functions are dropped with it.
    _alive.append(concrete)
    return concrete.graph.get_operations()


_alive: list[Any] = []


def f32(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


def measure(capture: Any, **options: Any) -> TrainingGraph:
    """Measured costs, without a cache unless one is given."""
    return cost(capture, **{"cache": None, **options})


def training_step(x: Any, w: Any, b: Any, labels: Any) -> Any:
    h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b))
    logits = tf.reduce_mean(tf.nn.max_pool2d(h, 2, 2, "SAME"), [1, 2])
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.gradients(loss, [w, b])


STEP = (f32(4, 16, 16, 3), f32(3, 3, 3, 8), f32(8), tf.TensorSpec([4], tf.int32))
