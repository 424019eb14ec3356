"""The zoo's models of images and volumes."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from zoo.harness import Family, Trial, Way, descend, everything_of, fit, integers, loop, normal

zoo = Family("vision")
BATCH = 32
IMAGES = normal(2 * BATCH, 16, 16, 3)
LABELS = integers(10, 2 * BATCH)


def conv(filters: int, size: int = 3, **options):
    return layers.Conv2D(filters, size, padding="same", **options)


@zoo.row("keras.apply", "residual blocks, batch normalisation, accuracy", 0.6)
def keras_resnet(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 3))
    x = conv(16)(inputs)
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization()(conv(16)(x)))
        y = layers.BatchNormalization()(conv(16)(y))
        x = layers.ReLU()(x + y)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = way.keras(keras.Model(inputs, outputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return fit(model, IMAGES, LABELS, batch=BATCH)


@zoo.row("keras.compile", "concatenation of all layers before", 0.75)
def densenet(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 3))
    x = conv(16)(inputs)
    for _ in range(4):
        y = conv(8)(layers.ReLU()(layers.BatchNormalization()(x)))
        x = layers.Concatenate()([x, y])
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = way.compile(keras.Model(inputs, outputs), keras.optimizers.SGD(0.1, 0.9), loss)
    return fit(model, IMAGES, LABELS, batch=BATCH)


@zoo.row("gradients", "skips from encoder to decoder, custom loop", 0.6)
def unet(way: Way) -> Trial:
    inputs = keras.Input((32, 32, 3))
    x, skips = inputs, []
    for filters in (8, 16):
        x = conv(filters, activation="relu")(conv(filters, activation="relu")(x))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = conv(32, activation="relu")(x)
    for filters in (16, 8):
        x = layers.Conv2DTranspose(filters, 2, 2)(x)
        x = conv(filters, activation="relu")(layers.Concatenate()([x, skips.pop()]))
        x = conv(filters, activation="tanh")(x)
    model = keras.Model(inputs, conv(1, 1)(x))
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def step(x, y):
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(normal(16, 32, 32, 3), normal(16, 32, 32, 1))], variables)


@zoo.row("value_and_gradients", "three-dimensional convolutions, whole step with Adam", 0.65)
def conv3d(way: Way) -> Trial:
    inputs = keras.Input((8, 16, 16, 4))
    x = inputs
    for _ in range(4):
        x = layers.Conv3D(8, 3, padding="same", activation="softplus")(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling3D()(x)))
    adam = keras.optimizers.Adam(0.01)

    def loss(x, y):
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    step = way.value_and_gradients(loss, model.trainable_variables, optimizer=adam)
    batches = [(normal(8, 8, 16, 16, 4, seed=i), normal(8, 1, seed=i)) for i in range(2)]
    return loop(step, batches, lambda: everything_of(model, adam))


@zoo.row("whole_step", "1-d, transposed, depthwise, separable and dilated convolutions", 0.7)
def convolutions(way: Way) -> Trial:
    inputs = keras.Input((256, 8))
    x = layers.Conv1D(16, 3, padding="causal", activation="tanh")(inputs)
    x = layers.SeparableConv1D(16, 3, padding="same", activation="tanh")(x)
    x = layers.Conv1DTranspose(8, 2, 2, activation="tanh")(x)
    x = layers.Reshape((32, 16, 8))(x)
    x = layers.DepthwiseConv2D(3, padding="same", activation="tanh")(x)
    x = layers.SeparableConv2D(16, 3, padding="same", activation="tanh")(x)
    x = layers.Conv2D(8, 3, dilation_rate=2, padding="same", activation="tanh")(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPooling2D()(x)))
    sgd = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x, y):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            sgd.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            whole.keep(loss)
        return loss

    sgd.build(model.trainable_variables)
    batches = [(normal(32, 256, 8), normal(32, 4))]
    return loop(step, batches, lambda: everything_of(model, sgd))


@zoo.row("GradientTape", "group, layer and unit normalisation", 0.6)
def normalisations(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 8))
    x = inputs
    for norm in (
        layers.GroupNormalization(4),
        layers.LayerNormalization(),
        layers.UnitNormalization(),
    ):
        x = norm(conv(16, activation="gelu")(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with way.tape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, variables)
        descend(variables, grads)
        return loss, grads

    batches = [(normal(32, 16, 16, 8), normal(32, 16, 16, 1))]
    return loop(step, batches, lambda: everything_of(model))


@zoo.row("keras.apply", "spectral normalisation: each call moves a vector", 0.7)
def spectral_normalisation(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 8))
    x = inputs
    for _ in range(3):
        x = layers.SpectralNormalization(conv(16))(x)
        x = layers.LeakyReLU()(x)
        x = layers.Activation("tanh")(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    model.compile("rmsprop", "mse")
    return fit(way.keras(model), normal(64, 16, 16, 8), normal(64, 1), batch=32)


@zoo.row("whole_step", "one batch normalisation applied twice", 0.8)
def batch_norm_twice(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 8))
    shared = layers.BatchNormalization(momentum=0.5)
    x = layers.ReLU()(shared(conv(8)(inputs)))
    x = layers.ReLU()(shared(conv(8)(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            descend(variables, tape.gradient(loss, variables))
            whole.keep(loss)
        return loss

    batches = [(normal(64, 16, 16, 8, seed=i), normal(64, 1)) for i in range(2)]
    return loop(step, batches, lambda: everything_of(model))


@zoo.row("value_and_gradients", "two inputs through one tower, contrastive loss", 0.6)
def siamese(way: Way) -> Trial:
    inputs = keras.Input((16, 16, 3))
    x = conv(16, activation="relu")(conv(16, activation="relu")(inputs))
    x = layers.Dropout(0.2, seed=3)(conv(16, activation="sigmoid")(x))
    tower = keras.Model(inputs, layers.Dense(8)(layers.GlobalAveragePooling2D()(x)))

    def loss(left, right, same):
        distance = tf.norm(tower(left, training=True) - tower(right, training=True), axis=1)
        near, far = distance**2, tf.nn.relu(1.0 - distance) ** 2
        return tf.reduce_mean(tf.where(same, near, far)), distance

    step = way.value_and_gradients(loss, tower.trainable_variables, has_aux=True)
    batches = [(normal(32, 16, 16, 3), normal(32, 16, 16, 3, seed=1), integers(2, 32) == 1)]
    return loop(step, batches, lambda: everything_of(tower))


test_vision = zoo.test()
