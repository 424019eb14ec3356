"""U-Net (Ronneberger et al. 2015) with batch normalisation; no articulation points within."""

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
    images_and_labels,
)
from optckpt.models.params import Unet


def build(params: Unet) -> Step:
    """The network; inputs are images and a label for every pixel."""
    weights = Weights(params.seed)
    widths = [params.width * 2**i for i in range(params.levels + 1)]
    down = [
        _double_conv(weights, before, width, f"down{i}")
        for i, (before, width) in enumerate(zip([3, *widths], widths, strict=False))
    ]
    up = []
    for i in reversed(range(params.levels)):
        enlarge = _up_conv(weights, widths[i + 1], widths[i], f"up{i}/enlarge")
        up.append((enlarge, _double_conv(weights, 2 * widths[i], widths[i], f"up{i}")))
    classify = conv(weights, params.width, params.classes, 1, bias=True, name="classify")
    inputs = images_and_labels(
        weights, params.batch_size, params.image_size, params.classes, per_pixel=True
    )

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        skips = []
        x = images
        for i, block in enumerate(down):
            if i:
                x = tf.nn.max_pool2d(x, 2, 2, "VALID")
            x = block(x)
            skips.append(x)
        skips.pop()
        for enlarge, block in up:
            x = block(tf.concat([skips.pop(), enlarge(x)], axis=-1))
        return cross_entropy(classify(x), labels)

    return Step(params.name, tuple(weights.trainable), tuple(weights.state), inputs, loss)


def _double_conv(weights: Weights, channels_in: int, channels: int, name: str) -> Layer:
    conv1 = conv(weights, channels_in, channels, name=f"{name}/conv1")
    norm1 = batch_norm(weights, channels, name=f"{name}/norm1")
    conv2 = conv(weights, channels, channels, name=f"{name}/conv2")
    norm2 = batch_norm(weights, channels, name=f"{name}/norm2")

    def apply(x: Tensor) -> Tensor:
        x = tf.nn.relu(norm1(conv1(x)))
        return tf.nn.relu(norm2(conv2(x)))

    return apply


def _up_conv(weights: Weights, channels_in: int, channels: int, name: str) -> Layer:
    """Transposed 2x2 convolution that doubles height and width."""
    kernel = weights.normal(
        (2, 2, channels, channels_in), (1 / channels_in) ** 0.5, f"{name}/kernel"
    )
    offset = weights.constant((channels,), 0.0, f"{name}/bias")

    def apply(x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        shape = (batch, 2 * height, 2 * width, channels)
        y = tf.nn.conv2d_transpose(x, kernel, shape, strides=2, padding="SAME", name=name)
        return tf.nn.bias_add(y, offset)

    return apply
