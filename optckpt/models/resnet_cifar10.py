"""ResNet v2 for CIFAR-10 (He et al. 2016, "Identity mappings in deep residual networks")."""

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
    images_and_labels,
)
from optckpt.models.params import ResnetCifar10


def build(params: ResnetCifar10) -> Step:
    """The network with 6 x blocks_per_stage + 2 layers; inputs are images and labels."""
    weights = Weights(params.seed)
    first = conv(weights, 3, params.width, name="first/conv")
    blocks: list[Layer] = []
    channels = params.width
    for stage in range(3):
        for number in range(params.blocks_per_stage):
            channels_out = params.width * 2**stage
            stride = 2 if stage and not number else 1
            blocks.append(
                _block(weights, channels, channels_out, stride, not number, f"s{stage}/b{number}")
            )
            channels = channels_out
    last_norm = batch_norm(weights, channels, name="last/norm")
    classify = dense(weights, channels, params.classes, channels**-0.5, name="last/dense")
    inputs = images_and_labels(weights, params.batch_size, params.image_size, params.classes)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        x = first(images)
        for block in blocks:
            x = block(x)
        x = tf.nn.relu(last_norm(x))
        value = cross_entropy(classify(tf.reduce_mean(x, axis=[1, 2])), labels)
        if params.weight_decay:
            penalty = tf.add_n([tf.nn.l2_loss(v) for v in weights.trainable])
            value += params.weight_decay * penalty
        return value

    return Step(params.name, tuple(weights.trainable), tuple(weights.state), inputs, loss)


def _block(
    weights: Weights, channels_in: int, channels: int, stride: int, project: bool, name: str
) -> Layer:
    """Norm, ReLU, convolution, twice, beside a shortcut (projected from the normalised input)."""
    norm1 = batch_norm(weights, channels_in, name=f"{name}/norm1")
    shortcut = (
        conv(weights, channels_in, channels, 1, stride, name=f"{name}/shortcut")
        if project
        else None
    )
    conv1 = conv(weights, channels_in, channels, 3, stride, name=f"{name}/conv1")
    norm2 = batch_norm(weights, channels, name=f"{name}/norm2")
    conv2 = conv(weights, channels, channels, name=f"{name}/conv2")

    def apply(x: Tensor) -> Tensor:
        y = tf.nn.relu(norm1(x))
        kept = x if shortcut is None else shortcut(y)
        y = conv1(y)
        y = tf.nn.relu(norm2(y))
        return conv2(y) + kept

    return apply
