"""Gradients of rewritten networks equal those of tf.gradients in every bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from tf_support import (
    Step,
    assert_same,
    everything_again,
    normal,
    random_order,
    random_schedule,
    weight,
)

Network = tuple[Callable[..., tf.Tensor], list[tf.Variable], list[np.ndarray], list[tf.Variable]]
"""model, trainable variables, arguments, state"""


def conv_bias_pad() -> Network:
    w = [weight(3, 3, 4, 8), weight(5, 5, 8, 8, seed=1), weight(3, 3, 8, 4, seed=2)]
    b = [weight(8, seed=3), weight(8, seed=4), weight(4, seed=5)]
    dense = weight(4 * 4 * 4, 5, seed=6)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w[0], 1, "SAME"), b[0]))
        h = tf.pad(h, [[0, 0], [2, 2], [2, 2], [0, 0]])
        h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, w[1], 2, "VALID"), b[1]))
        h = tf.nn.max_pool2d(h, 2, 2, "SAME")
        h = tf.nn.bias_add(tf.nn.conv2d(h, w[2], 1, "SAME"), b[2])
        h = tf.reshape(tf.tanh(h), [h.shape[0], -1])
        return tf.reduce_mean(tf.square(h @ dense))

    return model, [*w, *b, dense], [normal(4, 16, 16, 4)], []


def frozen_pad() -> Network:
    """Pad feeds the convolution only: the filter of the first layer is not trained."""
    frozen, w = weight(3, 3, 4, 8), weight(3, 3, 8, 8, seed=1)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.pad(tf.tanh(x), [[0, 0], [1, 1], [1, 1], [0, 0]])
        h = tf.nn.relu(tf.nn.conv2d(h, tf.stop_gradient(frozen), 1, "VALID"))
        h = tf.pad(tf.tanh(h), [[0, 0], [1, 1], [1, 1], [0, 0]])
        return tf.reduce_sum(tf.sigmoid(tf.nn.conv2d(h, w, 1, "VALID")))

    return model, [w], [normal(4, 12, 12, 4)], []


def shared_gradient() -> Network:
    """One gradient flows into two convolutions with biases."""
    w = [weight(3, 3, 4, 8), weight(1, 1, 4, 8, seed=1), weight(3, 3, 8, 8, seed=2)]
    b = [weight(8, seed=3), weight(8, seed=4)]

    def model(x: tf.Tensor) -> tf.Tensor:
        x = tf.tanh(x)
        left = tf.nn.bias_add(tf.nn.conv2d(x, w[0], 1, "SAME"), b[0])
        right = tf.nn.bias_add(tf.nn.conv2d(x, w[1], 1, "SAME"), b[1])
        h = tf.nn.relu(left + right)
        return tf.reduce_sum(tf.tanh(tf.nn.conv2d(h, w[2], 1, "SAME")))

    return model, [*w, *b], [normal(4, 12, 12, 4)], []


def batch_norm_fused() -> Network:
    w = [weight(3, 3, 4, 8), weight(3, 3, 8, 8, seed=1)]
    scale = [weight(8, seed=2), weight(8, seed=3)]
    moving = [tf.Variable(tf.zeros(8), trainable=False) for _ in range(4)]

    def model(x: tf.Tensor) -> tf.Tensor:
        for i in range(2):
            x = tf.nn.conv2d(x, w[i], 1, "SAME")
            x, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale[i], scale[i])
            moving[2 * i].assign(moving[2 * i] * 0.9 + mean * 0.1)
            moving[2 * i + 1].assign(moving[2 * i + 1] * 0.9 + variance * 0.1)
            x = tf.nn.relu(x)
        return tf.reduce_mean(tf.square(x))

    return model, [*w, *scale], [normal(4, 12, 12, 4)], moving


def batch_norm_decomposed() -> Network:
    w = [weight(3, 3, 4, 8), weight(3, 3, 8, 8, seed=1)]
    scale = [weight(8, seed=2), weight(8, seed=3)]
    moving = [tf.Variable(tf.zeros(8), trainable=False) for _ in range(2)]

    def model(x: tf.Tensor) -> tf.Tensor:
        for i in range(2):
            x = tf.nn.conv2d(x, w[i], 1, "SAME")
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            moving[i].assign_sub((moving[i] - mean) * 0.1)
            x = tf.nn.batch_normalization(x, mean, variance, scale[i], scale[i], 1e-3)
            x = tf.nn.swish(x)
        return tf.reduce_mean(tf.square(x))

    return model, [*w, *scale], [normal(4, 12, 12, 4)], moving


def dropout() -> Network:
    """Stateless dropout whose seed is updated, and stateful dropout."""
    w = [weight(32, 64), weight(64, 64, seed=1), weight(64, 8, seed=2)]
    seed = tf.Variable([3, 7], trainable=False)
    generator = tf.random.Generator.from_seed(5)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.nn.relu(x @ w[0])
        key = tf.identity(seed)
        seed.assign_add([1, 1])
        keep = tf.random.stateless_uniform(h.shape, key) < 0.7
        h = tf.where(keep, h / 0.7, tf.zeros_like(h))
        h = tf.nn.relu(h @ w[1])
        noise = generator.uniform(h.shape)
        h = h * tf.cast(noise < 0.5, tf.float32)
        return tf.reduce_mean(tf.square(h @ w[2]))

    return model, w, [normal(64, 32)], [seed, generator.state]


def u_net() -> Network:
    w = [weight(3, 3, 4, 8), weight(3, 3, 8, 16, seed=1), weight(3, 3, 24, 8, seed=2)]
    halves = weight(3, 3, 4, 4, seed=3)

    def model(x: tf.Tensor) -> tf.Tensor:
        top = tf.nn.relu(tf.nn.conv2d(x, w[0], 1, "SAME"))
        low = tf.nn.relu(tf.nn.conv2d(tf.nn.avg_pool2d(top, 2, 2, "SAME"), w[1], 1, "SAME"))
        up = tf.image.resize(low, [16, 16], "nearest")
        h = tf.nn.relu(tf.nn.conv2d(tf.concat([top, up], -1), w[2], 1, "SAME"))
        a, b = tf.split(h, 2, axis=-1)
        first, second = tf.split(a * tf.sigmoid(b), 2, axis=0)
        h = tf.nn.conv2d(tf.tanh(first) + tf.sin(second), halves, 1, "SAME")
        return tf.reduce_mean(tf.square(h))

    return model, [*w, halves], [normal(4, 16, 16, 4)], []


def residual() -> Network:
    w = [weight(3, 3, 8, 8, seed=i) for i in range(8)]

    def model(x: tf.Tensor) -> tf.Tensor:
        for i in range(0, 8, 2):
            h = tf.nn.relu(x)
            h = tf.nn.relu(tf.nn.conv2d(h, w[i], 1, "SAME"))
            x = x + tf.nn.conv2d(h, w[i + 1], 1, "SAME")
        return tf.reduce_mean(tf.square(x))

    return model, w, [normal(4, 12, 12, 8)], []


def embedding() -> Network:
    table, w = weight(50, 32), weight(32, 32, seed=1)

    def model(ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        h = tf.gather(table, ids) + x
        h = tf.tanh(tf.einsum("abc,cd->abd", h, w))
        h = tf.gather(h, [0, 2, 2], axis=1)
        return tf.reduce_mean(tf.square(h))

    ids = np.random.RandomState(0).randint(0, 50, [16, 12]).astype("int32")
    return model, [table, w], [ids, normal(16, 12, 32)], []


def several_outputs() -> Network:
    w = weight(64, 64)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ w)
        best, where = tf.math.top_k(h, 16)
        best = best * tf.cast(where % 3, tf.float32)
        rows = tf.unstack(tf.sin(h), axis=0)
        mean, variance = tf.nn.moments(h, [1])
        parts = tf.stack([tf.exp(r) for r in rows[::8]])
        total = tf.reduce_sum(best) + tf.reduce_sum(mean * variance) + tf.reduce_sum(parts)
        values = tf.linalg.qr(h[:, :8])[1]
        return total + tf.reduce_sum(values)

    return model, [w], [normal(64, 64)], []


def attention() -> Network:
    width, heads = 32, 4
    w = [weight(width, 3 * width), weight(width, width, seed=1)]
    v = [weight(width, 4 * width, seed=2), weight(4 * width, width, seed=3)]
    g = weight(width, seed=4)

    def norm(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * g

    def model(x: tf.Tensor) -> tf.Tensor:
        for _ in range(2):
            q, k, u = tf.split(tf.tensordot(norm(x), w[0], 1), 3, axis=-1)
            q, k, u = (
                tf.transpose(tf.reshape(t, [4, 16, heads, width // heads]), [0, 2, 1, 3])
                for t in (q, k, u)
            )
            scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 3.0)
            h = tf.reshape(tf.transpose(scores @ u, [0, 2, 1, 3]), [4, 16, width])
            x = x + tf.tensordot(h, w[1], 1)
            x = x + tf.tensordot(tf.nn.gelu(tf.tensordot(norm(x), v[0], 1)), v[1], 1)
        return tf.reduce_mean(tf.square(x))

    return model, [*w, *v, g], [normal(4, 16, width)], []


def mixed_precision() -> Network:
    w = [weight(3, 3, 4, 8), weight(3, 3, 8, 8, seed=1)]

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.cast(x, tf.bfloat16)
        for v in w:
            h = tf.nn.relu(tf.nn.conv2d(h, tf.cast(v, tf.bfloat16), 1, "SAME"))
        h = tf.cast(h, tf.float32) * 128.0
        return tf.reduce_mean(tf.square(h))

    return model, w, [normal(4, 12, 12, 4)], []


def _rounded(dtype: tf.DType) -> Network:
    """Biases are added before or after the one rounding, as oneDNN merges or not."""
    w = [weight(3, 3, 4, 8), weight(3, 3, 8, 8, seed=1), weight(3, 3, 8, 8, seed=2)]
    depth, volume = weight(3, 3, 8, 1, seed=3), weight(3, 3, 3, 8, 8, seed=4)
    dense = weight(8, 8, seed=5)
    b = [weight(8, seed=6 + i) for i in range(6)]

    def model(x: tf.Tensor) -> tf.Tensor:
        def low(v: tf.Variable) -> tf.Tensor:
            return tf.cast(v, dtype)

        h = tf.tanh(low(x))
        h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, low(w[0]), 1, "SAME"), low(b[0])))
        h = tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]])
        h = tf.tanh(tf.nn.bias_add(tf.nn.conv2d(h, low(w[1]), 1, "VALID"), low(b[1])))
        h = tf.nn.gelu(tf.nn.bias_add(tf.nn.conv2d(h, low(w[2]), 1, "SAME"), low(b[2])))
        h = tf.nn.depthwise_conv2d(h, low(depth), [1] * 4, "SAME")
        h = tf.tanh(tf.nn.bias_add(h, low(b[3])))[:, tf.newaxis]
        h = tf.tanh(tf.nn.bias_add(tf.nn.conv3d(h, low(volume), [1] * 5, "SAME"), low(b[4])))
        h = tf.sigmoid(tf.nn.bias_add(tf.reshape(h, [-1, 8]) @ low(dense), low(b[5])))
        return tf.reduce_mean(tf.square(tf.cast(h, tf.float32)))

    return model, [*w, depth, volume, dense, *b], [normal(4, 12, 12, 4)], []


def bfloat16_biases() -> Network:
    return _rounded(tf.bfloat16)


def half_biases() -> Network:
    return _rounded(tf.float16)


def read_after_assign() -> Network:
    w = weight(32, 32)
    state = tf.Variable(normal(64, 32), trainable=False)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ w + state)
        state.assign(h * 0.5)
        h = tf.sin(h @ w) * state
        state.assign_add(tf.cos(h))
        return tf.reduce_mean(tf.square(h * tf.exp(state)))

    return model, [w], [normal(64, 32)], [state]


def loops_and_calls() -> Network:
    w = weight(32, 32)

    @tf.function(autograph=False)
    def pure(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x) * tf.sigmoid(x)

    @tf.function(autograph=False)
    def with_variable(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ w)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.sin(x @ w)
        h = pure(h) + h
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, tf.tanh(t @ w) + t), (0, h))
        h = tf.cond(tf.reduce_sum(h) > 0, lambda: tf.exp(-h * h), lambda: tf.cos(h))
        h = with_variable(tf.sin(h))
        return tf.reduce_mean(tf.square(h))

    return model, [w], [normal(64, 32)], []


def strings() -> Network:
    w = weight(32, 32)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ w)
        text = tf.strings.as_string(tf.round(h[:, :4] * 4))
        number = tf.strings.to_number(text)
        h = tf.sin(h) * tf.reduce_sum(number, 1, keepdims=True)
        return tf.reduce_mean(tf.square(tf.exp(-h)))

    return model, [w], [normal(64, 32)], []


def views() -> Network:
    w = weight(64, 64)

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ w)
        h = tf.transpose(h[tf.newaxis], [1, 0, 2])
        h = tf.sin(tf.squeeze(tf.identity(h), 1))
        a, b = tf.split(h, 2, axis=0)
        h = tf.concat([tf.exp(a), tf.cos(b)[::-1]], 0)
        h = tf.reshape(h, [16, 4, 64])[2:10]
        h = tf.expand_dims(tf.sigmoid(h), -1)
        h = tf.broadcast_to(h, [8, 4, 64, 2]) * tf.constant([1.0, 2.0])
        return tf.reduce_mean(tf.square(tf.tanh(h)))

    return model, [w], [normal(64, 64)], []


NETWORKS = [
    conv_bias_pad, frozen_pad, shared_gradient, batch_norm_fused, batch_norm_decomposed, dropout,
    u_net, residual, embedding, several_outputs, attention, mixed_precision, bfloat16_biases,
    half_biases, read_after_assign, loops_and_calls, strings, views,
]  # fmt: skip


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_gradients_and_state_are_the_same(make: Callable[[], Network]) -> None:
    model, variables, arguments, state = make()
    start = [v.numpy() for v in state]
    plain = Step(model, variables)
    expected = plain(*arguments)
    after = [v.numpy() for v in state]
    clones = 0
    for schedule in (everything_again, random_schedule(1), random_schedule(2, 0.7)):
        for v, value in zip(state, start, strict=True):
            v.assign(value)
        step = Step(model, variables, schedule)
        assert_same(step(*arguments), expected)
        assert_same([v.numpy() for v in state], after)
        clones += len(step.report.clones)
    assert clones >= 5


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_another_order_changes_nothing(make: Callable[[], Network]) -> None:
    model, variables, arguments, state = make()
    start = [v.numpy() for v in state]
    plain = Step(model, variables)
    expected = plain(*arguments)
    after = [v.numpy() for v in state]
    for seed in range(4):
        for v, value in zip(state, start, strict=True):
            v.assign(value)
        step = Step(model, variables, random_order(seed))
        assert_same(step(*arguments), expected)
        assert_same([v.numpy() for v in state], after)
