"""What Keras adds to a part: `training`, masks, losses; and recomputation around it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from part_support import QUICK, X, gradients_of, same, stack, weights

import optckpt
from optckpt.errors import CaptureError

pytestmark = pytest.mark.usefixtures("grappler_off")

SMALL = X[:64]


def part_of(fn):
    return optckpt.budgeted(strategy="store_all", config=QUICK)(fn)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("remat", [tf.recompute_grad, keras.remat])
def test_recomputed_by_tensorflow(graph, remat):
    """That calls it first while tapes do not record."""
    ws = weights(2)
    part = part_of(lambda x: stack(x, ws))
    plain = gradients_of(tf.function(lambda x: stack(x, ws)), SMALL, ws, graph)
    same(gradients_of(remat(lambda x: part(x)), SMALL, ws, graph), plain)
    same(gradients_of(part, SMALL, ws, graph), plain)


@pytest.mark.parametrize("graph", [False, True])
def test_none_among_the_results(graph):
    ws = weights(2)
    part = part_of(lambda x: {"cache": None, "y": stack(x, ws), "more": (None, x * 2.0)})

    def run(x):
        return part(x)

    got = (tf.function(run) if graph else run)(SMALL)
    assert got["cache"] is got["more"][0] is None
    same((got["y"], got["more"][1]), (tf.function(lambda x: stack(x, ws))(SMALL), SMALL * 2.0))


@pytest.mark.parametrize("graph", [False, True])
def test_a_function_without_results(graph):
    count = tf.Variable(0)

    def fn(x):
        count.assign_add(tf.shape(x)[0])

    part = part_of(fn)
    assert (tf.function(part) if graph else part)(SMALL) is None
    assert count.numpy() == 64


class Block(keras.layers.Layer):
    """Its layers pick up `training` from the call of the model."""

    def __init__(self, decorate):
        super().__init__()
        self.inside = [keras.layers.Dense(64), keras.layers.BatchNormalization()]
        self.part = decorate(self.body)

    def build(self, shape):
        for layer in self.inside:
            layer.build(shape)

    def body(self, x):
        for layer in self.inside:
            x = layer(x)
        return x

    def call(self, x):
        return self.part(x)


def model(decorate):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((64,)), Block(decorate), keras.layers.Dense(1)])


class TestKeras:
    @pytest.mark.parametrize("graph", [False, True])
    def test_training_of_the_call_around(self, graph):
        plain, mine = model(lambda fn: fn), model(part_of)

        def step(m):
            def run(x):
                return [m(x, training=t) for t in (True, False, None, True)]

            return (tf.function(run) if graph else run)(SMALL)

        tf.debugging.assert_near(step(mine), step(plain))
        same([v.value for v in mine.variables], [v.value for v in plain.variables])

    def test_layers_that_are_frozen_and_thawed(self):
        plans = []
        plain = model(lambda fn: fn)
        mine = model(optckpt.budgeted(strategy="store_all", config=QUICK, on_plan=plans.append))
        for trainable in (True, False, True, False):
            for m in (plain, mine):
                m.layers[0].inside[1].trainable = trainable
            got, expected = (m(SMALL, training=True) for m in (mine, plain))
            tf.debugging.assert_near(got, expected)
        same([v.value for v in mine.variables], [v.value for v in plain.variables])
        assert len(plans) == 2

    def test_what_a_layer_leaves_for_the_next(self):
        """Keras has layers pick up `training` from the layer that was called before, too."""
        inside = keras.layers.Dropout(0.0)

        class Outer(keras.layers.Layer):
            def __init__(self, decorate):
                super().__init__()
                self.part = decorate(lambda x: inside(x, training=True))
                self.after = keras.layers.BatchNormalization()

            def call(self, x):
                return self.after(self.part(x))

        plain, mine = Outer(lambda fn: fn), Outer(part_of)
        for _ in range(3):
            tf.debugging.assert_near(mine(SMALL), plain(SMALL))

    @pytest.mark.parametrize("graph", [False, True])
    def test_masks_on_arguments_and_results(self, graph):
        keras.utils.set_random_seed(1)
        embedding = keras.layers.Embedding(9, 8, mask_zero=True)
        inside = keras.layers.LSTM(8, return_sequences=True)
        outside = keras.layers.LSTM(4)
        ids = tf.constant([[3, 1, 0, 0], [5, 0, 0, 0], [1, 2, 3, 0]])
        outside(inside(embedding(ids)))
        sources = [v.value for m in (embedding, inside, outside) for v in m.trainable_variables]

        def step(part, masked):
            def run(ids):
                with tf.GradientTape() as tape:
                    x = embedding(ids)
                    if not masked:
                        x = tf.identity(x)
                    y = outside(part(x))
                return y, tape.gradient(y, sources)

            return (tf.function(run) if graph else run)(ids)

        part = part_of(lambda x: inside(x))
        for masked in (True, False, True):
            got, expected = step(part, masked), step(inside, masked)
            for a, b in zip(
                tf.nest.flatten(got, True), tf.nest.flatten(expected, True), strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_stateless_scope_is_refused(self):
        mine = model(part_of)
        mine(SMALL)
        values = [v.value for v in mine.trainable_variables]
        others = [v.value for v in mine.non_trainable_variables]
        with pytest.raises(CaptureError, match=r"'body' has a budget.*keras\.StatelessScope"):
            mine.stateless_call(values, others, SMALL)

    @pytest.mark.parametrize("eagerly", [False, True])
    @pytest.mark.parametrize("own", [False, True])
    def test_losses_added_inside_are_refused(self, eagerly, own):
        class Adding(Block):
            def body(self, x):
                x = super().body(x)
                if own:
                    self.add_loss(tf.reduce_mean(x))
                return x

        block = Adding(part_of)
        block.inside[0].activity_regularizer = None if own else keras.regularizers.L2(0.1)
        mine = keras.Sequential([keras.Input((64,)), block, keras.layers.Dense(1)])
        mine.compile("sgd", "mse", run_eagerly=eagerly)
        name = block.name if own else block.inside[0].name
        for _ in range(2):
            with pytest.raises(CaptureError, match=f"layer '{name}' adds a loss"):
                mine.train_on_batch(SMALL, SMALL[:, :1])
        assert not block.losses

    def test_layers_of_a_part_in_a_part(self):
        plain, mine = model(lambda fn: fn), model(part_of)
        part = part_of(lambda x: mine(x, training=True))
        for trainable in (True, False):
            for m in (plain, mine):
                m.layers[0].inside[1].trainable = trainable
            tf.debugging.assert_near(part(SMALL), plain(SMALL, training=True))
