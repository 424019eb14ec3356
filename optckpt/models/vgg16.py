"""VGG-16 (Simonyan and Zisserman 2015), configuration D."""

from __future__ import annotations

import tensorflow as tf

from optckpt.models.layers import (
    Layer,
    Step,
    Tensor,
    Weights,
    conv,
    cross_entropy,
    dense,
    images_and_labels,
)
from optckpt.models.params import Vgg16

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels (in multiples of the width) and convolutions of each stage."""


def build(params: Vgg16) -> Step:
    """The network; inputs are images and labels."""
    weights = Weights(params.seed)
    stages: list[list[Layer]] = []
    channels = 3
    for number, (factor, count) in enumerate(_STAGES):
        stage = []
        for i in range(count):
            channels_out = params.width * factor
            name = f"s{number}/conv{i}"
            stage.append(conv(weights, channels, channels_out, bias=True, name=name))
            channels = channels_out
        stages.append(stage)
    flat = channels * (params.image_size // 32) ** 2
    hidden = params.dense_width
    dense1 = dense(weights, flat, hidden, (2 / flat) ** 0.5, name="dense1")
    dense2 = dense(weights, hidden, hidden, (2 / hidden) ** 0.5, name="dense2")
    classify = dense(weights, hidden, params.classes, hidden**-0.5, name="classify")
    inputs = images_and_labels(weights, params.batch_size, params.image_size, params.classes)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for stage in stages:
            for layer in stage:
                x = tf.nn.relu(layer(x))
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        x = tf.reshape(x, (params.batch_size, flat))
        x = tf.nn.relu(dense2(tf.nn.relu(dense1(x))))
        return cross_entropy(classify(x), labels)

    return Step(params.name, tuple(weights.trainable), tuple(weights.state), inputs, loss)
