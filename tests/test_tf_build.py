"""In a training graph operations wait for all that they depend on in TensorFlow's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from tf_support import weight

from optckpt.frontends.tensorflow import Capture, capture

SIDE, CHANNELS = 32, 16
IMAGES = (8, SIDE, SIDE, CHANNELS)


def traced(step: Callable[[tf.Tensor], tuple[tf.Tensor, Any]], shape: tuple[int, ...]) -> Capture:
    """The capture of a step that returns its loss and what it is differentiated by."""
    found: list[Capture] = []

    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        loss, xs = step(x)
        found.append(capture(x.graph, [loss], tf.gradients(loss, xs)))
        return loss

    function.get_concrete_function(tf.TensorSpec(shape))
    return found[0]


def missing(found: Capture) -> list[tuple[str, str]]:
    """(operation, one that it depends on) where the training graph lets the first come first."""
    operations = found.graph.operations
    unit_of = {op: u for u, unit in enumerate(found.units) for op in unit}
    producer = {b: u for u, operation in enumerate(operations) for b in operation.writes}
    waited: list[int] = []
    for u, operation in enumerate(operations):
        done = 1 << u
        for p in (*operation.after, *(producer[b] for b in operation.reads)):
            done |= waited[p]
        waited.append(done)
    above: dict[tf.Operation, int] = {}

    def units_above(op: tf.Operation) -> int:
        stack = [op]
        while stack:
            last = stack[-1]
            makers = [*(t.op for t in last.inputs), *last.control_inputs]
            unknown = [p for p in makers if p not in above]
            if last in above or not unknown:
                stack.pop()
                bits = 1 << unit_of[last] if last in unit_of else 0
                for p in makers:
                    bits |= above[p]
                above[last] = bits
            else:
                stack += unknown
        return above[op]

    wrong = []
    for u, unit in enumerate(found.units):
        left = units_above(unit[-1]) & ~waited[u]
        wrong += [
            (unit[0].name, other[0].name) for v, other in enumerate(found.units) if left >> v & 1
        ]
    return wrong


def gate(x: tf.Tensor, w: tf.Variable, kernel: tf.Variable) -> tf.Tensor:
    """Scales of what small convolutions with a bias make of a mean."""
    small = tf.reduce_mean(x, [1, 2], keepdims=True)
    small = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(small, kernel[:1, :1], 1, "SAME"), w))
    return tf.sigmoid(tf.nn.bias_add(tf.nn.conv2d(small, kernel[1:2, 1:2], 1, "SAME"), w))


def normalised(x: tf.Tensor, w: tf.Variable, kernel: tf.Variable) -> tf.Tensor:
    """The same with a batch normalisation and its activation, and a product with a bias."""
    small = tf.reduce_mean(x, [1, 2], keepdims=True)
    small, *_ = tf.compat.v1.nn.fused_batch_norm(small, w, w)
    small = tf.reshape(tf.nn.relu(small), [-1, CHANNELS])
    small = tf.nn.relu(tf.nn.bias_add(small @ kernel[0, 0], w))
    return small[:, None, None, :]


def padded(x: tf.Tensor, w: tf.Variable, kernel: tf.Variable) -> tf.Tensor:
    """The same with a convolution of padded images."""
    small = tf.nn.avg_pool2d(x, 16, 16, "SAME") * w
    small = tf.nn.conv2d(tf.pad(small, [[0, 0], [1, 1], [1, 1], [0, 0]]), kernel, 1, "VALID")
    return tf.reduce_mean(small, [1, 2], keepdims=True)


@pytest.mark.parametrize("scale", [gate, normalised, padded])
def test_small_operations_in_between_hand_on_what_they_wait_for(
    scale: Callable[..., tf.Tensor],
) -> None:
    ws = weight(CHANNELS), weight(3, 3, CHANNELS, CHANNELS)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        x = tf.sin(x)
        return tf.reduce_mean(tf.square(tf.tanh(x * scale(x, *ws)))), ws

    found = traced(step, IMAGES)
    assert {"Sin", "Mul", "Tanh"} <= {op.kind for op in found.graph.operations}
    assert missing(found) == []


@pytest.mark.parametrize("name", ["EfficientNetB0", "MobileNetV3Small"])
def test_networks_with_gates(name: str) -> None:
    model: Any = getattr(keras.applications, name)(
        weights=None, input_shape=(64, 64, 3), classes=10
    )

    def step(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
        return loss, [v.value for v in model.trainable_variables]

    found = traced(step, (16, 64, 64, 3))
    assert len(found.graph.operations) > 500
    assert missing(found) == []
