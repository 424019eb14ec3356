"""The zoo's steps with effects, states and unusual types."""

from __future__ import annotations

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.core.util import event_pb2

from zoo.harness import (
    STEPS,
    Family,
    Trial,
    Way,
    descend,
    everything_of,
    loop,
    normal,
    weight,
)

zoo = Family("semantics")
BATCH = 4096
X = normal(BATCH, 32)


def mlp(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


def squares(count: int, dtype: str = "float32") -> list[tf.Variable]:
    return [weight(32, 32, seed=i, dtype=dtype) for i in range(count)]


@zoo.row("whole_step", "tf.print, tf.summary, assertions, py_function: once in each step", 0.7)
def effects(way: Way) -> Trial:
    ws, calls = squares(6), []
    folder = tempfile.TemporaryDirectory()
    printed = os.path.join(folder.name, "printed.txt")
    writer = tf.summary.create_file_writer(os.path.join(folder.name, "events"))
    count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def call(mean):
        calls.append(float(mean))
        return mean

    @tf.function
    def step(x):
        with way.whole_step() as whole, writer.as_default(step=count):
            with tf.GradientTape() as tape:
                h = mlp(x, ws[:3])
                tf.print("mean", tf.reduce_mean(h), output_stream=f"file://{printed}")
                tf.debugging.assert_less(tf.reduce_max(h), 2.0)
                h = tf.debugging.check_numerics(h, "no number")
                tf.summary.write("mean", tf.reduce_mean(h))
                called = tf.py_function(call, [tf.reduce_mean(h)], tf.float32)
                called.set_shape(())
                h *= 1.0 + called
                loss = tf.reduce_mean(mlp(h, ws[3:]) ** 2)
            descend(ws, tape.gradient(loss, ws))
            count.assign_add(1)
            whole.keep(loss)
        return loss

    def state():
        writer.flush()
        (name,) = tf.io.gfile.glob(os.path.join(folder.name, "events", "*"))
        events = [event_pb2.Event.FromString(e.numpy()) for e in tf.data.TFRecordDataset(name)]
        written = [tf.make_ndarray(v.tensor) for e in events for v in e.summary.value]
        with open(printed, encoding="utf-8") as file:
            lines = file.read().splitlines()
        writer.close()
        folder.cleanup()
        assert len(calls) == len(written) == len(lines) == STEPS
        return [*ws, count, calls, written, lines]

    return loop(step, [(X,)], state)


@zoo.row("gradients", "a variable that is read, assigned and read again in the step", 0.7)
def variable_between_assignments(way: Way) -> Trial:
    ws, moving = squares(6), tf.Variable(tf.ones(32), trainable=False)

    @tf.function
    def step(x):
        h = mlp(x, ws[:2]) * moving
        moving.assign(0.9 * moving + 0.1 * tf.math.reduce_std(h, axis=0))
        h = mlp(h / moving, ws[2:4])
        moving.assign_add(tf.reduce_mean(h, axis=0))
        loss = tf.reduce_mean(mlp(h * moving, ws[4:]) ** 2)
        grads = way.gradients(loss, ws)
        descend(ws, grads)
        return loss, grads, moving.read_value()

    return loop(step, [(X,)], [*ws, moving])


@zoo.row("gradients", "fused batch normalisation with moving averages by hand", 0.65)
def fused_batch_norm(way: Way) -> Trial:
    ws = [weight(3, 3, 8, 8, seed=i) for i in range(3)]
    scale, moving = tf.Variable(tf.ones(8)), [tf.Variable(tf.zeros(8)) for _ in range(6)]

    @tf.function
    def step(x):
        for i, w in enumerate(ws):
            x = tf.nn.conv2d(x, w, 1, "SAME")
            x, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, scale, scale * 0.5)
            moving[2 * i].assign(moving[2 * i] * 0.9 + mean * 0.1)
            moving[2 * i + 1].assign(moving[2 * i + 1] * 0.9 + variance * 0.1)
            x = tf.nn.relu(x)
        loss = tf.reduce_mean(x * x)
        grads = way.gradients(loss, [*ws, scale])
        descend([*ws, scale], grads)
        return loss, grads

    return loop(step, [(normal(32, 16, 16, 8),)], [*ws, scale, *moving])


@zoo.row("GradientTape", "stateful dropout: its mask is never drawn again", 0.75)
def stateful_dropout(way: Way) -> Trial:
    ws, generator = squares(6), tf.random.Generator.from_seed(3)

    @tf.function
    def step(x):
        with way.tape() as tape:
            for i, w in enumerate(ws):
                x = tf.tanh(x @ w)
                if i % 2:
                    x *= tf.cast(tf.random.uniform(x.shape, seed=i) > 0.1, x.dtype)
                else:
                    x += 0.1 * generator.normal((BATCH, 1))
            loss = tf.reduce_mean(x * x)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X,)], [*ws, generator.state])


@zoo.row("value_and_gradients", "complex numbers: a Fourier layer", 0.7)
def fourier(way: Way) -> Trial:
    filters = [weight(8, 16, 17, seed=i) for i in range(3)]
    mix = [weight(8, 8, seed=i) for i in range(3)]

    def loss(x):
        for f, w in zip(filters, mix, strict=True):
            waves = tf.signal.rfft2d(tf.transpose(x, [0, 3, 1, 2]))
            waves *= tf.complex(tf.cos(f), tf.sin(f))
            x = tf.tanh(tf.transpose(tf.signal.irfft2d(waves), [0, 2, 3, 1]) @ w + x)
        return tf.reduce_mean(tf.abs(tf.complex(x, tf.sin(x))) ** 2)

    step = way.value_and_gradients(loss, [*filters, *mix])
    return loop(step, [(normal(32, 16, 32, 8),)], [*filters, *mix])


@zoo.row("GradientTape", "bfloat16 activations, float32 weights", 0.7)
def bfloat16(way: Way) -> Trial:
    ws = squares(6)

    @tf.function
    def step(x):
        with way.tape() as tape:
            for w in ws:
                x = tf.nn.gelu(tf.cast(x, tf.bfloat16) @ tf.cast(w, tf.bfloat16))
            loss = tf.reduce_mean(tf.cast(x, tf.float32) ** 2)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(normal(2 * BATCH, 32),)], ws)


@zoo.row("gradients", "float64, cumulative sums, sorting, a determinant", 0.7)
def float64(way: Way) -> Trial:
    ws = squares(6, "float64")

    @tf.function
    def step(x):
        h = mlp(tf.cast(x, tf.float64), ws[:3])
        h = tf.sort(tf.cumsum(h, axis=1) * 0.3, axis=1)
        loss = tf.reduce_mean(mlp(h, ws[3:]) ** 2) + 1e-3 * tf.linalg.logdet(
            tf.eye(32, dtype=tf.float64) + tf.transpose(ws[0]) @ ws[0]
        )
        grads = way.gradients(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X,)], ws)


@zoo.row(
    "whole_step",
    "einsum, broadcasting, reversed and cumulative sums, selection, tiling",
    0.75,
    margin=0.15,
)
def array_operations(way: Way) -> Trial:
    ws = [weight(16, 16, seed=i) for i in range(4)]

    @tf.function
    def step(x):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                h = x
                for w in ws:
                    h = tf.einsum("bijc,cd->bijd", h, w)
                    h = tf.where(h > 0, tf.reverse(h, [1]), tf.math.cumsum(h, axis=2) * 0.2)
                    top = tf.reduce_max(h, axis=[1, 2], keepdims=True)
                    h = tf.nn.elu(tf.roll(h, 3, axis=2) + top)
                loss = tf.reduce_mean(tf.tile(h, [1, 1, 1, 2]) ** 2)
            descend(ws, tape.gradient(loss, ws))
            whole.keep(loss)
        return loss

    return loop(step, [(normal(32, 16, 16, 16),)], ws)


@zoo.row("keras.apply", "an untrainable counter layer, integer and boolean inputs", 0.7)
def counting_layer(way: Way) -> Trial:
    class Counter(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), dtype="int32", trainable=False)

        def call(self, x, mask):
            self.count.assign_add(keras.ops.sum(keras.ops.cast(mask, "int32")))
            return keras.ops.where(mask[:, None], x, keras.ops.cos(x))

    inputs, mask = keras.Input((32,)), keras.Input((), dtype="bool")
    x = inputs
    for _ in range(4):
        x = Counter()(layers.Dense(32, activation="tanh")(x), mask)
    model = keras.Model([inputs, mask], layers.Dense(1)(x))
    model.compile("adam", "mse")
    way.keras(model)
    masks = np.arange(BATCH) % 3 > 0

    def step(x, mask):
        return model.train_on_batch((x, mask), tf.ones((BATCH, 1)))

    return loop(step, [(X, masks)], lambda: everything_of(model))


test_semantics = zoo.test()
