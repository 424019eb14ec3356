"""The graphs on which OpenAI's gradient-checkpointing toolkit was tested, measured here by the
allocator: chains, double chains, residual chains, chosen checkpoints, long chains and deep
residual nets within their memory bounds, in tf.function and in a v1 Session."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config

FLOPS = Config.model_validate({"costs": {"model": "flops"}, "memory": {"margin": 0.0}})
MB = 2**20
SIZE = MB // 4  # floats in 1 MiB

pytestmark = pytest.mark.usefixtures("grappler_off")


def node(x, name=None):
    """One node of a chain; its gradient needs its output."""
    return tf.tanh(x, name=name)


def start():
    return tf.Variable(tf.random.stateless_uniform((SIZE,), (1, 2)) / 10)


def chain(n):
    def forward(x):
        tensors = [tf.identity(x) * 0.5]
        for _ in range(n - 1):
            tensors.append(node(tensors[-1]))
        return tensors

    return forward


def double_chain(n):
    """Two chains that exchange their values at every step: no articulation points."""

    def forward(x):
        a, b = x * 0.5, x * 0.25
        tensors = [a, b]
        for _ in range(n - 1):
            a, b = node(a + b * 0.1), node(b - a * 0.1)
            tensors += [a, b]
        return [*tensors, a + b]

    return forward


def residual_chain(n):
    def forward(x):
        tensors = [x * 0.5]
        for _ in range(n - 1):
            tensors.append(tensors[-1] + node(node(tensors[-1])))
        return tensors

    return forward


def peak_and_gradient(forward, call):
    """Measured peak beyond what was in use, in MiB, and the gradient."""
    x = start()

    @tf.function
    def step():
        tensors = forward(x)
        return call(tensors, tf.reduce_sum(tensors[-1]), x)

    step()  # tracing and first call
    info = tf.config.experimental.get_memory_info
    before = info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    (grad,) = step()
    return (info("CPU:0")["peak"] - before) / MB, grad.numpy()


def plain(tensors, loss, x):
    return tf.gradients(loss, [x])


def with_mode(mode):
    return lambda tensors, loss, x: optckpt.gradients(loss, [x], checkpoints=mode, config=FLOPS)


def with_budget(budget):
    return lambda tensors, loss, x: optckpt.gradients(loss, [x], budget=budget, config=FLOPS)


def keep(*indices):
    return lambda tensors, loss, x: optckpt.gradients(
        loss, [x], checkpoints=[tensors[i] for i in indices], config=FLOPS
    )


@pytest.mark.parametrize(
    "call",
    [keep(1), keep(-2), keep(5), keep(3, 6), with_mode("memory"), with_budget("70%")],
    ids=["save-first", "save-last", "save-middle", "save-two", "memory", "optimal"],
)
@pytest.mark.parametrize(
    "forward",
    [chain(10), double_chain(8), residual_chain(8)],
    ids=["chain", "double-chain", "residual-chain"],
)
def test_gradients_are_identical(forward, call):
    _, expected = peak_and_gradient(forward, plain)
    peak, got = peak_and_gradient(forward, call)
    np.testing.assert_array_equal(got, expected)
    # The prediction includes the variable; the measured figure is what comes on top of it.
    plan = optckpt.last_plan()
    assert peak <= (plan.predicted_peak - MB) / MB * 1.02


def test_saving_the_middle_of_a_chain_halves_its_memory():
    n = 40
    before, _ = peak_and_gradient(chain(n), plain)
    after, _ = peak_and_gradient(chain(n), keep(n // 2))
    assert before == pytest.approx(n, abs=3)
    assert after == pytest.approx(n / 2, abs=4)


@pytest.mark.parametrize("n", [100, 400])
def test_long_chain_needs_the_square_root(n):
    before, expected = peak_and_gradient(chain(n), plain)
    after, got = peak_and_gradient(chain(n), with_mode("memory"))
    np.testing.assert_array_equal(got, expected)
    assert before >= n - 2
    assert after <= 2 * math.sqrt(n) + 4
    assert optckpt.last_plan().overhead < 1


def test_long_residual_net_needs_the_square_root():
    n = 150
    before, expected = peak_and_gradient(residual_chain(n), plain)
    after, got = peak_and_gradient(residual_chain(n), with_mode("memory"))
    np.testing.assert_array_equal(got, expected)
    assert before >= 2 * n - 4
    assert after <= 3 * math.sqrt(2 * n) + 6


def test_long_double_chain_without_articulation_points():
    n = 60
    before, expected = peak_and_gradient(double_chain(n), plain)
    after, got = peak_and_gradient(double_chain(n), with_mode("memory"))
    np.testing.assert_array_equal(got, expected)
    assert after < before / 2


def test_v1_session():
    values = {}
    for call in (plain, with_mode("memory"), with_budget("60%")):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, (SIZE,))
            tensors = residual_chain(12)(x)
            grads = call(tensors, tf.reduce_sum(tensors[-1]), x)
            values[call] = session.run(grads[0], {x: np.linspace(0, 1, SIZE, dtype=np.float32)})
    first, *others = values.values()
    for other in others:
        np.testing.assert_array_equal(other, first)
