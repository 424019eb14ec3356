"""The zoo's ways to train: optimizers, accumulation, averages, sessions, data sets."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from zoo.harness import (
    STEPS,
    Family,
    Trial,
    Watch,
    Way,
    arrays,
    descend,
    everything_of,
    fit,
    loop,
    normal,
    weight,
)

zoo = Family("training")
BATCH = 4096
X = normal(2 * BATCH, 32)
Y = normal(2 * BATCH, 1)


def mlp(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


def squares(count: int) -> list[tf.Variable]:
    return [weight(32, 32, seed=i) for i in range(count)]


def network(count: int = 5, dropout: float = 0.0) -> keras.Model:
    inputs = keras.Input((32,))
    x = inputs
    for _ in range(count):
        x = layers.Dense(32, activation="tanh")(x)
        x = layers.Dropout(dropout)(x) if dropout else x
    return keras.Model(inputs, layers.Dense(1)(x))


@zoo.row("keras.apply", "dropout from Keras' seed generator", 0.6)
def dropout_mlp(way: Way) -> Trial:
    model = way.keras(network(dropout=0.2))
    model.compile("adam", "mse", metrics=["mae"])
    return fit(model, X, Y, batch=BATCH)


@zoo.row("keras.apply", "gradient accumulation over two steps", 0.8)
def gradient_accumulation(way: Way) -> Trial:
    model = way.keras(network())
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse")
    return fit(model, X, Y, batch=BATCH)


@zoo.row("keras.compile", "clipping by the global norm, learning rate schedule", 0.85)
def global_clipnorm(way: Way) -> Trial:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    sgd = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, global_clipnorm=0.01)
    model = way.compile(network(), sgd, "mse")
    return fit(model, X, Y, batch=BATCH)


@zoo.row("value_and_gradients", "AdamW with weight decay and a moving average of the weights", 0.7)
def adamw_with_average(way: Way) -> Trial:
    model = network()
    adamw = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2)
    step = way.value_and_gradients(
        lambda x, y: tf.reduce_mean((model(x, training=True) - y) ** 2),
        model.trainable_variables,
        optimizer=adamw,
    )
    return loop(step, [(X[:BATCH], Y[:BATCH])], lambda: everything_of(model, adamw))


@zoo.row("keras.apply", "steps_per_execution=2, BatchNormalization", 0.7)
def steps_per_execution(way: Way) -> Trial:
    inputs = keras.Input((32,))
    x = inputs
    for _ in range(3):
        x = layers.BatchNormalization()(layers.Dense(32, activation="tanh")(x))
    model = way.keras(keras.Model(inputs, layers.Dense(1)(x)))
    model.compile("adam", "mse", steps_per_execution=2)
    return fit(model, X, Y, batch=BATCH)


class TwoPasses(keras.Model):
    """A model whose training step takes gradients twice."""

    def __init__(self):
        super().__init__()
        self.net = network(4, 0.1)

    def build(self, shape):
        self.net.build(shape)

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@zoo.row("keras.apply", "train_step of a subclass: two updates in a step", 0.7)
def custom_train_step(way: Way) -> Trial:
    model = way.keras(TwoPasses())
    model.compile("rmsprop", "mse")
    return fit(model, X, Y, batch=BATCH)


@zoo.row("keras.apply", "train_on_batch with class weights", 0.7)
def train_on_batch(way: Way) -> Trial:
    model = way.keras(network(dropout=0.1))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    labels = (Y > 0).astype(np.float32)

    def step(x, y):
        return model.train_on_batch(x, y, class_weight={0: 0.5, 1: 2.0}, return_dict=True)

    def run(watch: Watch) -> list:
        outputs = []
        for i in range(STEPS):
            part = slice(i % 2 * BATCH, (i % 2 + 1) * BATCH)
            watch.begin()
            result = step(X[part], labels[part])
            watch.end()
            outputs.append(arrays(result))
        return outputs

    return Trial(run, lambda: everything_of(model))


@zoo.row("GradientTape", "next(iterator) inside the step", 0.75)
def dataset_iterator(way: Way) -> Trial:
    ws, seen = squares(6), tf.Variable(0, trainable=False)
    data = tf.data.Dataset.from_tensor_slices(X).batch(BATCH, drop_remainder=True).repeat()
    iterator = iter(data)
    next(iterator)  # From now on TensorFlow has the batch after the next in memory, too.

    @tf.function
    def step():
        x = next(iterator)
        with way.tape() as tape:
            loss = tf.reduce_mean(mlp(x, ws) ** 2)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        seen.assign_add(1)
        return loss, grads, x[0]

    return loop(step, [()], [*ws, seen])


@zoo.row("whole_step", "accumulated by hand: gradients of two micro-batches, one update", 0.55)
def micro_batches(way: Way) -> Trial:
    ws = squares(5)
    adam = keras.optimizers.Adam(0.01)
    adam.build(ws)

    @tf.function
    def step(x):
        total = [tf.zeros_like(w) for w in ws]
        with way.whole_step() as whole:
            for part in tf.split(x, 2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(mlp(part, ws) ** 2)
                total = [t + g for t, g in zip(total, tape.gradient(loss, ws), strict=True)]
            adam.apply_gradients(zip(total, ws, strict=True))
            whole.keep(loss)
        return loss

    return loop(step, [(X,)], lambda: [*ws, adam.variables])


@zoo.row("GradientTape", "one persistent tape, two targets, one plan each", 0.75, plans=2)
def persistent_tape(way: Way) -> Trial:
    ws = squares(6)

    @tf.function
    def step(x):
        with way.tape(persistent=True) as tape:
            first = mlp(x, ws[:4])
            a, b = tf.reduce_mean(first**2), tf.reduce_mean(tf.sin(mlp(first, ws[4:])))
        grads = [tape.gradient(loss, ws) for loss in (a, b)]
        for gs in grads:
            descend(ws, gs, 0.01)
        return a, b, grads

    return loop(step, [(X[:BATCH],)], ws)


def session(way: Way, resource: bool, minimize) -> Trial:
    """Training in a v1 graph; `minimize(loss, variables)` returns an operation and tensors."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (BATCH, 32))
        ws = [
            tf.compat.v1.get_variable(
                f"w{i}", initializer=w, use_resource=resource, dtype=tf.float32
            )
            for i, w in enumerate(normal(6, 32, 32) * 0.2)
        ]
        h = x
        for w in ws:
            # Products with reference variables are never repeated, the rest is.
            h = tf.tanh(tf.sin(h @ w))
        loss = tf.reduce_mean(h**2)
        train, fetched = minimize(loss, ws)
        everything = tf.compat.v1.global_variables()
        start = tf.compat.v1.global_variables_initializer()
    options = tf.compat.v1.ConfigProto()
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    running = tf.compat.v1.Session(graph=graph, config=options)
    running.run(start)

    def step(batch):
        return running.run([train, loss, *fetched], {x: batch})[1:]

    def run(watch: Watch) -> list:
        outputs = []
        for _ in range(STEPS):
            watch.begin()
            result = step(X[:BATCH])
            watch.end()
            outputs.append(arrays(result))
        return outputs

    def state():
        with running:
            return running.run(everything)

    return Trial(run, state)


@zoo.row("gradients", "v1 graph and Session, reference variables", 0.75)
def session_with_reference_variables(way: Way) -> Trial:
    def minimize(loss, ws):
        grads = way.gradients(loss, ws)
        # Nobody copies a reference variable that is read and assigned at the same time.
        with tf.control_dependencies(grads):
            pairs = zip(ws, grads, strict=True)
            return tf.group([tf.compat.v1.assign_sub(w, 0.1 * g) for w, g in pairs]), grads

    return session(way, False, minimize)


@zoo.row("patch", "v1 optimizer in a Session, resource variables", 0.7)
def session_with_v1_optimizer(way: Way) -> Trial:
    def minimize(loss, ws):
        with way.patch():
            return tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss), []

    return session(way, True, minimize)


@zoo.row("patch", "tf.gradients of a library's own, inside tf.function", 0.7)
def patched_gradients(way: Way) -> Trial:
    ws = squares(6)

    def library(loss):
        return tf.gradients(loss, ws)

    @tf.function
    def step(x):
        with way.patch():
            loss = tf.reduce_mean(mlp(x, ws) ** 2)
            grads = library(loss)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], ws)


test_training = zoo.test()
