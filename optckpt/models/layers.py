"""What the reference networks are written with: plain TensorFlow operations and variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Tensor = Any
"""A tf.Tensor; TensorFlow publishes no types that a checker could use."""


@dataclass(frozen=True)
class Step:
    """The forward pass of one training step, to be called inside a tf.function.

    `loss(*inputs)` returns a float32 scalar and updates `state` as training does.
    """

    name: str
    variables: tuple[Any, ...]
    """Trainable tf.Variables, float32, in order of creation."""
    state: tuple[Any, ...]
    """Variables that the forward pass assigns: moving averages, the dropout counter."""
    inputs: tuple[Tensor, ...]
    """One synthetic batch, always the same for the same parameters."""
    loss: Callable[..., Tensor]


class Weights:
    """Creates variables with reproducible initial values and remembers them.

    Values depend on `seed` and the order of creation only, not on the process.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0
        self.trainable: list[Any] = []
        self.state: list[Any] = []

    def next_seed(self) -> list[int]:
        """A seed for stateless random operations, another at each call."""
        self._drawn += 1
        return [self._seed, self._drawn]

    def normal(self, shape: Sequence[int], deviation: float, name: str) -> Any:
        """A trainable variable with normally distributed values."""
        value = deviation * tf.random.stateless_normal(shape, self.next_seed())
        return self._add(self.trainable, value, name)

    def constant(self, shape: Sequence[int], value: float, name: str) -> Any:
        """A trainable variable with equal values."""
        return self._add(self.trainable, tf.fill(shape, value), name)

    def average(self, shape: Sequence[int], value: float, name: str) -> Any:
        """A variable that is not trained but assigned in the forward pass."""
        return self._add(self.state, tf.fill(shape, value), name, trainable=False)

    @staticmethod
    def _add(kept: list[Any], value: Tensor, name: str, trainable: bool = True) -> Any:
        variable = tf.Variable(value, trainable=trainable, name=name)
        kept.append(variable)
        return variable


Layer = Callable[[Tensor], Tensor]


def conv(
    weights: Weights,
    channels_in: int,
    channels_out: int,
    size: int = 3,
    stride: int = 1,
    *,
    bias: bool = False,
    padding: str = "SAME",
    name: str,
) -> Layer:
    """Convolution over NHWC, initialised after He et al. 2015."""
    deviation = (2 / (size * size * channels_in)) ** 0.5
    kernel = weights.normal((size, size, channels_in, channels_out), deviation, f"{name}/kernel")
    offset = weights.constant((channels_out,), 0.0, f"{name}/bias") if bias else None

    def apply(x: Tensor) -> Tensor:
        y = tf.nn.conv2d(x, kernel, strides=stride, padding=padding, name=name)
        return y if offset is None else tf.nn.bias_add(y, offset)

    return apply


def depthwise_conv(weights: Weights, channels: int, stride: int, *, name: str) -> Layer:
    """3x3 depthwise convolution over NHWC."""
    kernel = weights.normal((3, 3, channels, 1), (2 / 9) ** 0.5, f"{name}/kernel")

    def apply(x: Tensor) -> Tensor:
        return tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], "SAME", name=name)

    return apply


def batch_norm(weights: Weights, channels: int, *, momentum: float = 0.99, name: str) -> Layer:
    """Fused batch normalisation in training mode; updates its moving averages."""
    scale = weights.constant((channels,), 1.0, f"{name}/scale")
    offset = weights.constant((channels,), 0.0, f"{name}/offset")
    mean = weights.average((channels,), 0.0, f"{name}/moving_mean")
    variance = weights.average((channels,), 1.0, f"{name}/moving_variance")

    def apply(x: Tensor) -> Tensor:
        y, batch_mean, batch_variance = tf.compat.v1.nn.fused_batch_norm(
            x, scale, offset, epsilon=1e-3, is_training=True, name=name
        )
        mean.assign_sub((mean - batch_mean) * (1 - momentum))
        variance.assign_sub((variance - batch_variance) * (1 - momentum))
        return y

    return apply


def dense(weights: Weights, units_in: int, units_out: int, deviation: float, *, name: str) -> Layer:
    """Matrix product over the last axis, plus a bias."""
    kernel = weights.normal((units_in, units_out), deviation, f"{name}/kernel")
    offset = weights.constant((units_out,), 0.0, f"{name}/bias")

    def apply(x: Tensor) -> Tensor:
        flat = tf.reshape(x, (-1, units_in))
        y = tf.nn.bias_add(tf.matmul(flat, kernel, name=name), offset)
        return tf.reshape(y, (*x.shape[:-1], units_out))

    return apply


def layer_norm(weights: Weights, width: int, *, name: str) -> Layer:
    """Normalisation over the last axis, in primitive operations."""
    scale = weights.constant((width,), 1.0, f"{name}/scale")
    offset = weights.constant((width,), 0.0, f"{name}/offset")

    def apply(x: Tensor) -> Tensor:
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset

    return apply


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean softmax cross entropy; integer `labels` have the shape of `logits` but its last axis."""
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def images_and_labels(
    weights: Weights, batch: int, size: int, classes: int, *, per_pixel: bool = False
) -> tuple[Tensor, Tensor]:
    """Synthetic float32 images [batch, size, size, 3] and int32 labels (one each, or per pixel)."""
    images = tf.random.stateless_normal((batch, size, size, 3), weights.next_seed())
    shape = (batch, size, size) if per_pixel else (batch,)
    labels = tf.random.stateless_uniform(shape, weights.next_seed(), maxval=classes, dtype=tf.int32)
    return images, labels
