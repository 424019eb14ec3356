"""MobileNetV2 (Sandler et al. 2018): inverted residuals with linear bottlenecks."""

from __future__ import annotations

import tensorflow as tf

from optckpt.models.layers import (
    Layer,
    Step,
    Tensor,
    Weights,
    batch_norm,
    conv,
    cross_entropy,
    dense,
    depthwise_conv,
    images_and_labels,
)
from optckpt.models.params import MobilenetV2

_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and first stride of each stage (Table 2 of the paper)."""


def build(params: MobilenetV2) -> Step:
    """The network; inputs are images and labels."""
    weights = Weights(params.seed)

    def scaled(channels: int) -> int:
        return max(8, round(channels * params.width / 8) * 8)

    channels = scaled(32)
    layers: list[Layer] = [
        conv(weights, 3, channels, stride=2, name="first/conv"),
        batch_norm(weights, channels, name="first/norm"),
        tf.nn.relu6,
    ]
    for number, (expansion, width, count, first_stride) in enumerate(_STAGES):
        for i in range(count):
            stride = first_stride if i == 0 else 1
            name = f"s{number}/b{i}"
            layers.append(_block(weights, channels, scaled(width), expansion, stride, name))
            channels = scaled(width)
    last = scaled(1280)
    layers += [
        conv(weights, channels, last, 1, name="last/conv"),
        batch_norm(weights, last, name="last/norm"),
        tf.nn.relu6,
    ]
    classify = dense(weights, last, params.classes, last**-0.5, name="last/dense")
    inputs = images_and_labels(weights, params.batch_size, params.image_size, params.classes)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for layer in layers:
            x = layer(x)
        return cross_entropy(classify(tf.reduce_mean(x, axis=[1, 2])), labels)

    return Step(params.name, tuple(weights.trainable), tuple(weights.state), inputs, loss)


def _block(
    weights: Weights, channels_in: int, channels: int, expansion: int, stride: int, name: str
) -> Layer:
    """Widen, filter each channel, narrow; added to the input where shapes allow."""
    wide = channels_in * expansion
    layers: list[Layer] = []
    if expansion != 1:
        layers += [
            conv(weights, channels_in, wide, 1, name=f"{name}/widen"),
            batch_norm(weights, wide, name=f"{name}/norm1"),
            tf.nn.relu6,
        ]
    layers += [
        depthwise_conv(weights, wide, stride, name=f"{name}/filter"),
        batch_norm(weights, wide, name=f"{name}/norm2"),
        tf.nn.relu6,
        conv(weights, wide, channels, 1, name=f"{name}/narrow"),
        batch_norm(weights, channels, name=f"{name}/norm3"),
    ]

    def apply(x: Tensor) -> Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return x + y if stride == 1 and channels_in == channels else y

    return apply
