"""What the tests of parts share: a small network, its gradients, comparison in every bit."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from optckpt.config import Config

QUICK = Config.model_validate(
    {"costs": {"model": "flops"}, "solver": {"gap": 0.05, "time_limit": 5.0}}
)
X = tf.constant(np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32))


def weights(layers: int = 8) -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.normal(size=(64, 64)).astype(np.float32) / 8, name=f"w{i}")
        for i in range(layers)
    ]


def stack(x, ws):
    for w in ws:
        x = tf.tanh(x @ w) * 1.5
    return x


def repeats(plan) -> int:
    return len(plan.schedule) - len(set(plan.schedule.executions))


def gradients_of(block, x, sources, graph):
    """Loss and gradients of a network around `block`, in eager mode or in a tf.function."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(block(tf.sin(x))))
        return loss, tape.gradient(loss, [x, *sources])

    return (tf.function(step) if graph else step)(x)


def same(got, expected) -> None:
    got, expected = tf.nest.flatten(got, True), tf.nest.flatten(expected, True)
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
