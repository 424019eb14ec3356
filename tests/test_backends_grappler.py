"""What TensorFlow's graph optimiser leaves as it is in a graph that was rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fresh_process import PeakError
from tensorflow.python.eager import context
from tf_support import Step, counted, everything_again, normal, weight

import optckpt
from optckpt.backends.grappler import KEEP
from optckpt.backends.tensorflow import rewrite
from optckpt.config import Config
from optckpt.frontends.tensorflow import capture
from optckpt.planner import Plan
from optckpt.schedule import Schedule

ROWS, SIDE = 1024, 256
QUICK = Config.model_validate(
    {"costs": {"model": "flops"}, "solver": {"time_limit": 2.0}, "plans": {"cache": False}}
)

Layer = Callable[[tf.Tensor, int], tf.Tensor]


def layers(layer: Layer, depth: int) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[tf.Variable]]:
    ws = [weight(SIDE, SIDE, seed=i) for i in range(depth)]

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        for i, w in enumerate(ws):
            x = layer(x @ w, i)
        return tf.reduce_mean(tf.square(x))

    return loss_of, ws


def normed(x: tf.Tensor, i: int) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return x + tf.sin(0.5 * ((x - mean) * tf.math.rsqrt(variance + 1e-3) * 3.0 + 1.0))


def dropped(x: tf.Tensor, i: int) -> tf.Tensor:
    h = tf.nn.silu(x)
    return x + tf.nn.experimental.stateless_dropout(h, 0.1, seed=(i, 0))


LAYERS: dict[str, Layer] = {
    "gelu": lambda x, i: tf.nn.gelu(x),
    "gelu tanh": lambda x, i: tf.nn.gelu(x, approximate=True),
    "softplus": lambda x, i: tf.nn.softplus(2.0 * x) * 0.5 + 0.1,
    "normed": normed,
    "dropped": dropped,
}


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function`, as Keras' training function does a step."""

    @tf.function(autograph=False)
    def outer(*args: tf.Tensor) -> Any:
        return function(*args)

    return outer


@pytest.mark.parametrize("nested", [False, True], ids=["function", "called by another"])
@pytest.mark.parametrize("name", LAYERS)
def test_chained_operations_are_what_runs(
    name: str, nested: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    loss_of, ws = layers(LAYERS[name], 3)
    step = Step(loss_of, ws, everything_again)
    run = called(step.function) if nested else step.function
    x = tf.constant(normal(ROWS, SIDE))
    collecting = context.context()
    collecting.enable_graph_collection()
    try:
        values = run(x)
        graphs = [
            f.post_optimization_graph for f in collecting.export_run_metadata().function_graphs
        ]
    finally:
        collecting.disable_graph_collection()
    assert "topological" not in capfd.readouterr().err

    assert step.capture is not None
    members = step.capture.tf_graph.get_operations()
    kept = {op.name: op for op in members if KEEP in op.node_def.attr}
    assert any(op.name.startswith("optckpt/") for op in kept.values())
    ran = {
        node.name.removeprefix("StatefulPartitionedCall/").removeprefix("PartitionedCall/"): node
        for graph in graphs
        for node in graph.node
    }
    # These read the same tensor: of a division by a constant, of a product with one.
    same = {"RealDiv": "Mul", "Mul": "Identity"}
    others = {
        n: op.type
        for n, op in kept.items()
        if n not in ran or ran[n].op not in (op.type, same.get(op.type))
    }
    assert others == {}
    for a, b in zip(values, Step(loss_of, ws).function(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())


def test_a_session_of_tensorflow_1_runs_them_too() -> None:
    def run(scheduler: Callable[[Any], Schedule] | None) -> tuple[list[np.ndarray], set[str]]:
        with tf.Graph().as_default() as graph:
            w = tf.constant(normal(SIDE, SIDE))
            x = tf.compat.v1.placeholder(tf.float32, [ROWS, SIDE])
            h = x
            for i in range(4):
                h = tf.nn.gelu(h @ (w * (1.0 + i)))
            loss = tf.reduce_mean(tf.square(h))
            gradients = tf.gradients(loss, [x])
            if scheduler is not None:
                found = capture(graph, [loss], gradients)
                rewrite(found, scheduler(found.graph))
        kept = {op.name for op in graph.get_operations() if KEEP in op.node_def.attr}
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session(graph=graph) as session:
            values = session.run([loss, *gradients], {x: normal(ROWS, SIDE)}, options, metadata)
        ran = {node.name for part in metadata.partition_graphs for node in part.node}
        return values, kept - ran

    plain, _ = run(None)
    values, missing = run(everything_again)
    assert missing == set()
    for a, b in zip(values, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max())


@pytest.mark.fresh_process
@pytest.mark.parametrize("name", ["gelu", "dropped"])
def test_the_peak_of_a_step_that_is_called_is_as_predicted(name: str) -> None:
    loss_of, ws = layers(LAYERS[name], 10)
    plans: list[Plan] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        loss = loss_of(x)
        return loss, optckpt.gradients(loss, ws, budget="55%", config=QUICK, on_plan=plans.append)

    run = called(step)
    x = counted(normal(4 * ROWS, SIDE))
    run(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    run(x)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    (plan,) = plans
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    if peak > 1.01 * plan.predicted_peak:
        raise PeakError(f"{peak} bytes, predicted {plan.predicted_peak}")
