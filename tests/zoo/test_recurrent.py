"""The zoo's recurrent models and loops."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from zoo.harness import (
    Family,
    Trial,
    Way,
    descend,
    everything_of,
    fit,
    integers,
    loop,
    normal,
    weight,
)

zoo = Family("recurrent")
LENGTH, BATCH = 16, 256
TOKENS = integers(50, 2 * BATCH, LENGTH)
SERIES = normal(BATCH, LENGTH, 32)


@zoo.row("keras.apply", "embedding and stacked LSTM", 0.8)
def embedding_lstm(way: Way) -> Trial:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(50, 32)(inputs)
    x = layers.LSTM(32, return_sequences=True)(x)
    for _ in range(3):
        x = layers.LayerNormalization()(layers.Dense(64, activation="tanh")(x))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(16)(x)))
    model.compile("adam", "mse")
    return fit(way.keras(model), TOKENS, normal(2 * BATCH, 1), batch=BATCH)


@zoo.row("whole_step", "bidirectional GRU, dropout", 0.8)
def bidirectional_gru(way: Way) -> Trial:
    inputs = keras.Input((LENGTH, 32))
    x = layers.Bidirectional(layers.GRU(16, return_sequences=True))(inputs)
    for _ in range(4):
        x = layers.Dropout(0.1, seed=1)(layers.Dense(64, activation="tanh")(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    adam = keras.optimizers.Adam(0.01)
    adam.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            whole.keep(loss)
        return loss

    batches = [(SERIES, normal(BATCH, LENGTH, 1))]
    return loop(step, batches, lambda: everything_of(model, adam))


class Cell(layers.Layer):
    """A recurrent cell of one's own."""

    def __init__(self, units):
        super().__init__()
        self.state_size = self.output_size = units
        self.kernel = layers.Dense(units)

    def build(self, shape):
        self.kernel.build((shape[0], shape[1] + self.state_size))

    def call(self, x, states):
        state = keras.ops.tanh(self.kernel(keras.ops.concatenate([x, states[0]], axis=-1)))
        return state, [state]


@zoo.row("value_and_gradients", "a cell of one's own, unrolled", 0.6)
def unrolled_cell(way: Way) -> Trial:
    inputs = keras.Input((6, 32))
    x = layers.RNN(Cell(64), unroll=True, return_sequences=True)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.RNN(Cell(64), unroll=True)(x)))

    def loss(x, y):
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    step = way.value_and_gradients(loss, model.trainable_variables)
    return loop(step, [(normal(2048, 6, 32), normal(2048, 1))], lambda: everything_of(model))


def dense_layers(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


@zoo.row("gradients", "tf.while_loop written by hand", 0.8)
def while_loop(way: Way) -> Trial:
    ws, inner = [weight(32, 32, seed=i) for i in range(6)], weight(32, 32, seed=9)
    variables = [*ws, inner]

    @tf.function
    def step(x):
        x = dense_layers(x, ws[:3])
        _, x = tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ inner) + x), (0, x)
        )
        loss = tf.reduce_mean(dense_layers(x, ws[3:]) ** 2)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(normal(4096, 32),)], variables)


@zoo.row("gradients", "Python's while on tensors, by autograph; iterations differ by step", 0.85)
def autograph_loop(way: Way) -> Trial:
    ws, inner = [weight(32, 32, seed=i) for i in range(6)], weight(32, 32, seed=9)
    variables = [*ws, inner]

    @tf.function
    def step(x, count):
        x = dense_layers(x, ws[:3])
        i = 0
        while i < count:
            tf.autograph.experimental.set_loop_options(maximum_iterations=2)
            x = x + 0.1 * tf.tanh(tf.reduce_mean(x, axis=0, keepdims=True) @ inner)
            i += 1
        loss = tf.reduce_mean(dense_layers(x, ws[3:]) ** 2)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(normal(4096, 32), n) for n in (2, 2, 1)], variables)


@zoo.row("GradientTape", "tf.map_fn over rows of different use", 0.85)
def map_fn(way: Way) -> Trial:
    ws, inner = [weight(32, 32, seed=i) for i in range(6)], weight(32, 32, seed=9)
    variables = [*ws, inner]

    @tf.function
    def step(x):
        with way.tape() as tape:
            x = dense_layers(x, ws[:3])
            x = tf.map_fn(lambda rows: tf.sin(rows @ inner), x)
            loss = tf.reduce_mean(dense_layers(x, ws[3:]) ** 2)
        grads = tape.gradient(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(normal(4, 1024, 32),)], variables)


@zoo.row("whole_step", "tf.scan and a TensorArray", 0.85)
def scan(way: Way) -> Trial:
    ws, inner = [weight(32, 32, seed=i) for i in range(6)], weight(32, 32, seed=9)
    variables = [*ws, inner]

    @tf.function
    def step(x):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                h = dense_layers(x, ws[:3])
                h = tf.scan(
                    lambda state, rows: tf.tanh(state + rows @ inner), h, tf.zeros_like(h[0])
                )
                parts = tf.TensorArray(tf.float32, 4).unstack(h)
                h = tf.concat([parts.read(i) for i in (3, 0, 2, 1)], axis=0)
                loss = tf.reduce_mean(dense_layers(h, ws[3:]) ** 2)
            descend(variables, tape.gradient(loss, variables))
            whole.keep(loss)
        return loss

    return loop(step, [(normal(4, 1024, 32),)], variables)


@zoo.row("gradients", "gradients taken inside the body of a loop over steps", 0.75, margin=0.2)
def steps_in_a_loop(way: Way) -> Trial:
    ws = [weight(32, 32, seed=i) for i in range(6)]

    @tf.function
    def step(x):
        loss = tf.constant(0.0)
        for _ in tf.range(2):
            loss = tf.reduce_mean(dense_layers(x, ws) ** 2)
            descend(ws, way.gradients(loss, ws))
        return loss

    return loop(step, [(normal(4096, 32),)], ws)


test_recurrent = zoo.test()
