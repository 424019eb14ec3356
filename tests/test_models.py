"""Reference networks: shapes, finite gradients, and that training them lowers the loss."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from optckpt import models
from optckpt.models import Gpt, MobilenetV2, ResnetCifar10, Unet, Vgg16

TINY = {
    "resnet_cifar10": ResnetCifar10(batch_size=4, blocks_per_stage=1, width=4, image_size=8),
    "vgg16": Vgg16(batch_size=2, image_size=32, width=4, dense_width=16),
    "unet": Unet(batch_size=2, image_size=16, width=4, levels=2),
    "gpt": Gpt(batch_size=2, blocks=2, width=16, heads=2, tokens=8, vocabulary=20),
    "gpt_dropout": Gpt(
        batch_size=2, blocks=1, width=16, heads=2, tokens=8, vocabulary=20, dropout=0.2
    ),
    "mobilenetv2": MobilenetV2(batch_size=4, image_size=32, width=0.25),
}


def traced(step):
    @tf.function(autograph=False)
    def run(*inputs):
        loss = step.loss(*inputs)
        return loss, tf.gradients(loss, list(step.variables))

    return run


@pytest.mark.parametrize("name", sorted(TINY))
def test_gradients_are_finite_and_training_lowers_the_loss(name):
    step = models.build(TINY[name])
    run = traced(step)
    losses = []
    for _ in range(8):
        loss, gradients = run(*step.inputs)
        assert loss.shape == ()
        assert loss.dtype == tf.float32
        losses.append(float(loss))
        for variable, gradient in zip(step.variables, gradients, strict=True):
            assert gradient is not None, f"{variable.name} has no gradient"
            dense = tf.convert_to_tensor(gradient)
            assert dense.shape == variable.shape
            assert np.isfinite(dense.numpy()).all()
            variable.assign_sub((0.005 if name == "vgg16" else 0.05) * dense)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", sorted(TINY))
def test_building_twice_gives_the_same_numbers(name):
    first, second = (models.build(TINY[name]) for _ in range(2))
    for a, b in zip(
        (*first.variables, *first.inputs), (*second.variables, *second.inputs), strict=True
    ):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_another_seed_gives_other_numbers():
    first = models.build(TINY["unet"])
    other = models.build(TINY["unet"].model_copy(update={"seed": 1}))
    assert not np.array_equal(first.variables[0].numpy(), other.variables[0].numpy())
    assert not np.array_equal(first.inputs[0].numpy(), other.inputs[0].numpy())


def test_moving_averages_move_once_a_step():
    step = models.build(TINY["resnet_cifar10"])
    before = step.state[0].numpy()
    traced(step)(*step.inputs)
    moved = step.state[0].numpy() - before
    assert np.abs(moved).max() > 0
    traced(step)(*step.inputs)
    # The batch is the same, so the second step goes 0.99 times as far as the first.
    np.testing.assert_allclose(step.state[0].numpy() - before, 1.99 * moved, rtol=1e-3, atol=1e-7)


def test_dropout_differs_from_step_to_step_but_not_from_run_to_run():
    def losses():
        step = models.build(TINY["gpt_dropout"])
        run = traced(step)
        return [float(run(*step.inputs)[0]) for _ in range(2)]

    first = losses()
    assert first[0] != first[1]
    assert losses() == first


def test_the_transformer_does_not_see_the_future():
    step = models.build(TINY["gpt"])
    (tokens,) = step.inputs
    changed = tokens.numpy()
    changed[:, -2] = (changed[:, -2] + 1) % 20
    embedding = step.variables[0]

    @tf.function(autograph=False)
    def gradient(batch):
        # The input rows of the last tokens reach the loss only through later predictions.
        return tf.convert_to_tensor(tf.gradients(step.loss(batch), [embedding])[0])

    only_last = np.full_like(changed, 0)
    only_last[:, -1] = 7  # A target, never an input.
    assert np.abs(gradient(tf.constant(only_last)).numpy()[7]).max() == 0
    as_input = np.full_like(changed, 0)
    as_input[:, -2] = 7
    assert np.abs(gradient(tf.constant(as_input)).numpy()[7]).max() > 0


def test_sizes_of_the_reference_resnet():
    step = models.build(ResnetCifar10(batch_size=1))
    convolutions = [v for v in step.variables if len(v.shape) == 4]
    # 74 layers: one first convolution, 72 in the blocks, the classifier; and three shortcuts.
    assert len(convolutions) == 1 + 72 + 3


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="reference network"):
        models.build(object())  # type: ignore[arg-type]
