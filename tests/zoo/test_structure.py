"""The zoo's models of unusual structure."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from zoo.harness import (
    Family,
    Trial,
    Way,
    descend,
    fit,
    integers,
    loop,
    normal,
    weight,
)

zoo = Family("structure")
BATCH = 4096
X = normal(2 * BATCH, 32)
Y = normal(2 * BATCH, 1)


def dense(x, count: int = 3, units: int = 32, **options):
    for _ in range(count):
        x = layers.Dense(units, activation="tanh", **options)(x)
    return x


def mlp(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


def squares(count: int, first: int = 0) -> list[tf.Variable]:
    return [weight(32, 32, seed=first + i) for i in range(count)]


@zoo.row("keras.apply", "two inputs, two losses, loss_weights, sample weights, metrics", 0.7)
def several_inputs_and_losses(way: Way) -> Trial:
    left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
    x = dense(layers.Concatenate()([dense(left), dense(right)]))
    outputs = {
        "size": layers.Dense(1, name="size")(dense(x)),
        "kind": layers.Dense(3, name="kind")(x),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    way.keras(model).compile(
        "adam",
        loss={"size": "mse", "kind": classes},
        loss_weights={"size": 0.3, "kind": 2.0},
        weighted_metrics={"kind": ["accuracy"]},
    )
    weights = abs(normal(2 * BATCH))
    return fit(
        model,
        {"left": X, "right": X[::-1]},
        {"size": Y, "kind": integers(3, 2 * BATCH)},
        {"size": weights, "kind": weights[::-1]},
        batch=BATCH,
    )


class Branching(keras.Model):
    """A model with tf.cond between its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(32, activation="tanh") for _ in range(4)]
        self.left, self.right = layers.Dense(32), layers.Dense(32, activation="sigmoid")
        self.out = layers.Dense(1)

    def build(self, shape):
        for layer in (*self.blocks, self.left, self.right, self.out):
            layer.build((None, 32))

    def call(self, x):
        for block in self.blocks[:2]:
            x = block(x)
        mean = tf.reduce_mean(x, axis=0, keepdims=True)
        x *= tf.cond(mean[0, 0] > 0, lambda: self.left(mean), lambda: self.right(mean))
        for block in self.blocks[2:]:
            x = block(x)
        return self.out(x)


@zoo.row("keras.apply", "subclassed model with tf.cond inside", 0.75)
def cond(way: Way) -> Trial:
    model = Branching()
    model.compile("sgd", "mse")
    model.build((BATCH, 32))
    return fit(way.keras(model), X, Y, batch=BATCH)


# A chunk more or less is a tenth of this step.
@zoo.row("gradients", "tf.switch_case: another branch in each step", 0.9)
def switch_case(way: Way) -> Trial:
    ws, inner = squares(5), squares(3, 9)
    variables = [*ws, *inner]

    @tf.function
    def step(x, which):
        x = mlp(x, ws[:2])
        branches = [lambda w=w: tf.tanh(x @ w) * x for w in inner]
        loss = tf.reduce_mean(mlp(tf.switch_case(which, branches), ws[2:]) ** 2)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(X[:BATCH], i) for i in range(3)], variables)


@tf.custom_gradient
def clipped(x):
    """The identity, whose gradient is clipped and depends on its input."""

    def grad(upstream):
        return tf.clip_by_value(upstream, -1e-5, 1e-5) * tf.cos(x)

    return x + 0.5 * tf.sin(x), grad


@tf.custom_gradient
def scaled(x, w):
    """A product whose gradient function takes its variables."""
    y = tf.tanh(x @ w)

    def grad(upstream, variables=None):
        through = upstream * (1 - y * y)
        return through @ tf.transpose(w), tf.transpose(x) @ through

    return y, grad


@zoo.row("GradientTape", "tf.custom_gradient", 0.5)
def custom_gradient(way: Way) -> Trial:
    ws = squares(6)

    @tf.function
    def step(x):
        with way.tape() as tape:
            for w in ws:
                x = clipped(scaled(x, w))
            loss = tf.reduce_mean(x * x)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], ws)


def called_functions(way: Way, **options) -> Trial:
    ws, hidden = squares(10), layers.Dense(32, activation="tanh")
    hidden.build((None, 32))
    sgd = keras.optimizers.SGD(0.05)
    variables = [*ws, *hidden.trainable_variables]
    sgd.build(variables)

    @tf.function(**options)
    def block(x, first, second):
        return hidden(mlp(x, (first, second)))

    @tf.function
    def step(x):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                x = mlp(block(mlp(x, ws[:4]), *ws[4:6]), ws[6:])
                loss = tf.reduce_mean(x * x)
            sgd.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            whole.keep(loss)
        return loss

    return loop(step, [(X[:BATCH],)], lambda: [*variables, sgd.variables])


@zoo.row("whole_step", "layers in tf.functions of their own", 0.7)
def functions_inlined(way: Way) -> Trial:
    return called_functions(way)


@zoo.row("whole_step", "layers in tf.functions marked as _noinline", 0.75, margin=0.15)
def functions_kept(way: Way) -> Trial:
    return called_functions(way, experimental_attributes={"_noinline": True})


class Decorated(layers.Layer):
    """A layer whose call is a tf.function."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(64, activation="tanh"), layers.Dense(32)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 64))
        self.norm.build(shape)

    @tf.function
    def call(self, x, training=False):
        return self.norm(self.second(self.first(x)), training=training) + x


@zoo.row("keras.apply", "layers whose call is a tf.function, batch normalisation inside", 0.7)
def decorated_layers(way: Way) -> Trial:
    inputs = keras.Input((32,))
    x = inputs
    for _ in range(3):
        x = Decorated()(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(way.keras(model), X, Y, batch=BATCH)


@zoo.row("keras.compile", "shared layer, frozen layers, stop_gradient", 0.7)
def shared_and_frozen(way: Way) -> Trial:
    inputs, shared = keras.Input((32,)), layers.Dense(32, activation="tanh")
    frozen = layers.Dense(32, activation="gelu")
    x = shared(dense(shared(inputs)))
    x = x + keras.ops.stop_gradient(keras.ops.sin(x)) * frozen(x)
    model = keras.Model(inputs, layers.Dense(1)(dense(x, 2)))
    frozen.trainable = False
    return fit(way.compile(model, "adam", "mse"), X, Y, batch=BATCH)


@zoo.row("gradients", "several losses with weights of their own (grad_ys), a None gradient", 0.7)
def several_losses(way: Way) -> Trial:
    ws, unused = squares(6), tf.Variable(1.0)

    @tf.function
    def step(x):
        first = mlp(x, ws[:3])
        second = mlp(first, ws[3:])
        penalty = tf.add_n([tf.nn.l2_loss(w) for w in ws])
        losses = [tf.reduce_mean(first**2), second, penalty]
        weights = [tf.constant(0.5), tf.sign(second) / BATCH, tf.constant(1e-3)]
        grads = way.gradients(losses, [*ws, unused], grad_ys=weights)
        assert grads.pop() is None
        descend(ws, grads)
        return losses[0], grads

    return loop(step, [(X[:BATCH],)], ws)


@zoo.row("keras.apply", "regularisers, add_loss, activity penalties, dropout", 0.7)
def regularisation(way: Way) -> Trial:
    inputs = keras.Input((32,))
    x = layers.ActivityRegularization(l1=1e-4)(dense(inputs, 3, kernel_regularizer="l2"))
    x = layers.GaussianNoise(0.1, seed=1)(layers.AlphaDropout(0.1, seed=2)(dense(x, 2)))
    model = keras.Model(inputs, layers.Dense(1, bias_regularizer="l1")(x))
    model.compile("adagrad", "mse")
    return fit(way.keras(model), X, Y, batch=BATCH)


@zoo.row(
    "gradients", "operations of several outputs: split, unstack, top_k, moments, svd, qr", 0.75
)
def several_outputs(way: Way) -> Trial:
    ws, small = squares(5), weight(12, 8, seed=9)

    @tf.function
    def step(x):
        h = mlp(x, ws[:2])
        a, b, *_ = tf.split(h, 4, axis=1)
        mean, variance = tf.nn.moments(tf.stack(tf.unstack(h, 32, axis=1)), axes=[1])
        best, _ = tf.math.top_k(h, 8)
        s, u, _ = tf.linalg.svd(small)
        q, r = tf.linalg.qr(small)
        turned = tf.tanh(h[:, :8]) @ (u[:8] * s)
        h = tf.concat([a * b, best, turned, tf.sin(h[:, 8:16])], axis=1)
        h = mlp(h, ws[2:])
        loss = tf.reduce_mean(h * h) + tf.reduce_mean(mean**2 + variance)
        loss += tf.reduce_sum(q) * 1e-3 + tf.linalg.trace(r[:8]) * 1e-3
        grads = way.gradients(loss, [*ws, small])
        descend([*ws, small], grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], [*ws, small])


@zoo.row("GradientTape", "sparse adjacency matrix times dense features", 0.75)
def graph_network(way: Way) -> Trial:
    ws = squares(7)
    edges = np.unique(integers(BATCH, 4 * BATCH, 2), axis=0).astype(np.int64)
    adjacency = tf.sparse.SparseTensor(edges, np.full(len(edges), 0.3, np.float32), (BATCH, BATCH))

    @tf.function
    def step(x):
        with way.tape() as tape:
            for w in ws:
                x = tf.tanh(tf.sparse.sparse_dense_matmul(adjacency, x @ w) + x)
            loss = tf.reduce_mean(x * x)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], ws)


test_structure = zoo.test()
