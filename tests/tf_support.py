"""Helpers for tests that rewrite TensorFlow graphs: schedules to follow, small networks, runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context

from optckpt.backends.tensorflow import RewriteReport, rewrite
from optckpt.frontends.tensorflow import Capture, capture
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule

Scheduler = Callable[[TrainingGraph], Schedule]


def random_schedule(seed: int, share: float = 0.4) -> Scheduler:
    """A schedule that forgets random buffers before random backward operations."""

    def make(graph: TrainingGraph) -> Schedule:
        rng = random.Random(seed)
        executions: list[int] = []
        valid: set[int] = set()

        def run(o: int) -> None:
            for b in graph.operations[o].reads:
                if b not in valid:
                    run(graph.producer[b])
            executions.append(o)
            valid.update(graph.operations[o].writes)

        for o, op in enumerate(graph.operations):
            if not op.forward and rng.random() < share:
                for b in sorted(valid):
                    maker = graph.operations[graph.producer[b]]
                    if maker.repeatable and not maker.repeat_before and rng.random() < share:
                        valid.discard(b)
            run(o)
        return Schedule(tuple(executions))

    return make


def random_order(seed: int, share: float = 0.3) -> Scheduler:
    """A random order that respects every dependency, now and then with buffers forgotten."""

    def make(graph: TrainingGraph) -> Schedule:
        rng = random.Random(seed)
        waiting = [{graph.producer[b] for b in op.reads} | set(op.after) for op in graph.operations]
        waits_for: list[list[int]] = [[] for _ in graph.operations]
        for o, above in enumerate(waiting):
            for a in above:
                waits_for[a].append(o)
        ready = [o for o, above in enumerate(waiting) if not above]
        order = []
        while ready:
            o = ready.pop(rng.randrange(len(ready)))
            order.append(o)
            for c in waits_for[o]:
                waiting[c].discard(o)
                if not waiting[c]:
                    ready.append(c)
        again = random_schedule(seed, share)(graph.in_order(order))
        return again.out_of(order)

    return make


def everything_again(graph: TrainingGraph) -> Schedule:
    """A schedule that re-executes each repeatable operation whose output is read backward."""
    return random_schedule(0, share=1.1)(graph)


def flat(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """The tensors of `gradients`: None left out, IndexedSlices taken apart."""
    found = []
    for g in gradients:
        if isinstance(g, tf.IndexedSlices):
            found += [t for t in (g.values, g.indices, g.dense_shape) if t is not None]
        elif g is not None:
            found.append(g)
    return found


@contextlib.contextmanager
def grappler_off() -> Iterator[None]:
    """Functions called in here run as they were traced, up to oneDNN's own layout pass."""
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    ctx = context.context()
    before = ctx.function_call_options
    ctx.function_call_options = context.FunctionCallOptions(config_proto=config)
    try:
        yield
    finally:
        ctx.function_call_options = before


class Step:
    """A training step `model(*args) -> loss` with gradients of `xs`, plain or rewritten."""

    def __init__(
        self,
        model: Callable[..., Any],
        xs: Sequence[Any],
        scheduler: Scheduler | None = None,
        **options: Any,
    ) -> None:
        self.capture: Capture | None = None
        self.report: RewriteReport | None = None
        self.gradients: list[Any] = []

        def step(*args: tf.Tensor) -> list[tf.Tensor]:
            ys = tf.nest.flatten(model(*args))
            self.gradients = tf.gradients(ys, list(xs))
            outputs = flat(self.gradients)
            if scheduler is not None:
                graph = tf.compat.v1.get_default_graph()
                self.capture = capture(graph, ys, outputs, **options)
                self.report = rewrite(self.capture, scheduler(self.capture.graph))
            return [*ys, *outputs]

        self.function = tf.function(step, autograph=False)

    def __call__(self, *args: Any) -> list[np.ndarray]:
        with grappler_off():
            return [t.numpy() for t in self.function(*args)]

    @property
    def graph(self) -> TrainingGraph:
        assert self.capture is not None
        return self.capture.graph


def assert_same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> None:
    """Assert that two lists of arrays are equal in every bit."""
    assert len(left) == len(right)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"output {i}")
        assert a.dtype == b.dtype


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: str = "float32") -> np.ndarray:
    """Normal numbers that are the same in every run."""
    return (np.random.RandomState(seed).standard_normal(shape) * scale).astype(dtype)


def weight(*shape: int, seed: int = 0) -> tf.Variable:
    """A variable of moderate random numbers."""
    fan_in = int(np.prod(shape[:-1])) or 1
    return tf.Variable(normal(*shape, seed=seed, scale=fan_in**-0.5))


def counted(value: Any) -> tf.Tensor:
    """A tensor of `value` in memory of the allocator: TensorFlow takes over some arrays."""
    return tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(value))
