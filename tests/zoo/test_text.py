"""The zoo's models of text: embeddings, transformers, ragged and sparse batches."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.distribute.sharded_variable import ShardedVariable

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

zoo = Family("text")
WORDS, LENGTH, BATCH = 100, 64, 32
TOKENS = integers(WORDS, 2 * BATCH, LENGTH)
LABELS = integers(4, 2 * BATCH)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def block(x, width: int = 32, *, causal: bool = False, mask=None):
    attended = layers.MultiHeadAttention(2, width // 2)(
        x, x, attention_mask=mask, use_causal_mask=causal
    )
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(2 * width, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(width)(hidden))


@zoo.row("keras.apply", "mixed_float16, loss scaling, causal attention", 0.85, margin=0.15)
def gpt_mixed_float16(way: Way) -> Trial:
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 32)(inputs)
    x = block(x, causal=True)
    outputs = layers.Dense(WORDS, dtype="float32")(x)
    model = way.keras(keras.Model(inputs, outputs))
    model.compile(keras.optimizers.Adam(0.01), CROSS_ENTROPY)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return fit(model, TOKENS, np.roll(TOKENS, -1, axis=1), batch=BATCH)


@zoo.row("value_and_gradients", "padding masks through attention, dropout", 0.7)
def masked_transformer(way: Way) -> Trial:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 32, mask_zero=True)(inputs)
    x = layers.Dropout(0.1, seed=1)(block(layers.Dropout(0.1, seed=2)(x)))
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))

    def loss(tokens, labels):
        return tf.reduce_mean(CROSS_ENTROPY(labels, model(tokens, training=True)))

    step = way.value_and_gradients(loss, model.trainable_variables)
    padded = np.where(np.arange(LENGTH) < 1 + TOKENS[:, :1] % LENGTH, TOKENS, 0)
    return loop(step, [(padded, LABELS)], lambda: everything_of(model))


def ragged_words():
    lengths = 1 + integers(LENGTH, 2 * BATCH)
    tokens = integers(WORDS, int(lengths.sum()))
    return tf.RaggedTensor.from_row_lengths(tokens, lengths)


def ragged_layers(words, table, ws):
    x = tf.ragged.map_flat_values(tf.gather, table, words)
    for w in ws:
        x = tf.ragged.map_flat_values(lambda v, w=w: tf.tanh(v @ w), x)
    return x


@zoo.row(
    "gradients",
    "a RaggedTensor of words, padded after some layers",
    0.8,
)
def ragged_text(way: Way) -> Trial:
    table, ws, out = weight(WORDS, 64), [weight(64, 64, seed=i) for i in range(6)], weight(64, 4)
    variables = [table, *ws, out]

    @tf.function
    def step(words, labels):
        x = ragged_layers(words, table, ws[:4]).to_tensor(shape=(2 * BATCH, LENGTH, 64))
        for w in ws[4:]:
            x = tf.tanh(x @ w)
        logits = tf.reduce_mean(x, axis=1) @ out
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(ragged_words, LABELS)], variables)


@zoo.row(
    "GradientTape",
    "reductions of a RaggedTensor",
    0.8,
)
def ragged_reduction(way: Way) -> Trial:
    table, ws = weight(WORDS, 64), [weight(64, 64, seed=i) for i in range(4)]
    variables = [table, *ws]

    @tf.function
    def step(words):
        with way.tape() as tape:
            x = tf.reduce_mean(ragged_layers(words, table, ws), axis=1)
            loss = tf.reduce_mean(x * x)
        grads = tape.gradient(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(ragged_words,)], variables)


@zoo.row("whole_step", "IndexedSlices, sparse updates of Adam and by scatter", 0.95, margin=0.1)
def sparse_embedding_update(way: Way) -> Trial:
    tables, ws = (
        [weight(5000, 32), weight(5000, 32, seed=1)],
        [weight(32, 32, seed=i) for i in range(4)],
    )
    dense = tables[:1] + ws
    adam = keras.optimizers.Adam(0.01)
    adam.build(dense)

    @tf.function
    def step(tokens):
        with way.whole_step() as whole:
            with tf.GradientTape() as tape:
                x = tf.nn.embedding_lookup(tables[0], tokens) + tf.gather(tables[1], tokens * 3)
                for w in ws:
                    x = tf.tanh(x @ w)
                loss = tf.reduce_mean(x * x)
            *grads, sparse = tape.gradient(loss, [*dense, tables[1]])
            assert isinstance(grads[0], tf.IndexedSlices)
            adam.apply_gradients(zip(grads, dense, strict=True))
            tables[1].scatter_sub(tf.IndexedSlices(0.1 * sparse.values, sparse.indices))
            whole.keep(loss)
        return loss

    return loop(step, [(TOKENS,)], lambda: [*tables, *ws, adam.variables])


@zoo.row(
    "gradients",
    "a table in a list: how many rows each part gives depends on the data",
    0.8,
)
def embedding_lookup_over_a_list(way: Way) -> Trial:
    shards = [weight(40, 32, seed=i) for i in range(3)]
    ws = [weight(32, 32, seed=i) for i in range(4)]

    @tf.function
    def step(tokens):
        x = tf.nn.embedding_lookup(shards, tokens)
        for w in ws:
            x = tf.tanh(x @ w)
        loss = tf.reduce_mean(x * x)
        return loss, way.gradients(loss, [*shards, *ws])

    return loop(step, [(TOKENS,)], [*shards, *ws])


@zoo.row("gradients", "a ShardedVariable as a kernel", 0.78)
def sharded_variable(way: Way) -> Trial:
    shards = [weight(16, 32, seed=i) for i in range(3)]
    ws = [weight(32, 32, seed=i) for i in range(4)]
    kernel = ShardedVariable(shards)
    variables = [*shards, *ws]

    @tf.function
    def step(x):
        x = x @ tf.convert_to_tensor(kernel)
        for w in ws:
            x = tf.tanh(x @ w)
        loss = tf.reduce_mean(x * x)
        grads = way.gradients(loss, variables)
        descend(variables, grads)
        return loss, grads

    return loop(step, [(normal(16384, 48),)], variables)


@zoo.row("GradientTape", "strings, hash buckets, booleans and integers in the step", 0.7)
def strings(way: Way) -> Trial:
    table, ws = weight(WORDS, 32), [weight(32, 32, seed=i) for i in range(4)]
    variables = [table, *ws]
    seen = tf.Variable(0, dtype=tf.int64, trainable=False)
    text = np.array([[f"word {t}" for t in row] for row in TOKENS])

    @tf.function
    def step(text):
        ids = tf.strings.to_hash_bucket_fast(tf.strings.lower(text), WORDS)
        seen.assign_add(tf.reduce_sum(tf.cast(ids > 7, tf.int64)))
        with way.tape() as tape:
            x = tf.gather(table, ids)
            known = tf.logical_not(tf.strings.regex_full_match(text, "word 1.*"))
            for w in ws:
                x = tf.where(known[..., None], tf.tanh(x @ w), x)
            loss = tf.reduce_mean(x * x)
        grads = tape.gradient(loss, variables)
        descend(variables, grads)
        return loss, grads, tf.strings.as_string(loss)

    return loop(step, [(text,)], [*variables, seen])


@zoo.row("value_and_gradients", "experts: top_k, one-hot, gather and scatter", 0.75)
def mixture_of_experts(way: Way) -> Trial:
    gate, out = weight(32, 4), weight(32, 32, seed=9)
    experts = [[weight(32, 64, seed=i), weight(64, 32, seed=i + 4)] for i in range(4)]

    def loss(x):
        for _ in range(2):
            shares = tf.nn.softmax(x @ gate)
            chances, chosen = tf.math.top_k(tf.transpose(shares), 2048)
            y = tf.zeros_like(x)
            for i, (first, second) in enumerate(experts):
                z = tf.tanh(tf.gather(x, chosen[i]) @ first) @ second
                rows = chosen[i][:, None]
                y = tf.tensor_scatter_nd_add(y, rows, z * chances[i][:, None])
            x = tf.tanh((x + y) @ out)
        load = tf.reduce_mean(tf.one_hot(tf.argmax(shares, axis=1), 4), axis=0)
        return tf.reduce_mean(x * x) + tf.reduce_sum(load * tf.reduce_mean(shares, axis=0))

    variables = {"gate": gate, "experts": experts, "out": out}
    step = way.value_and_gradients(loss, variables)
    return loop(step, [(normal(4096, 32),)], tf.nest.flatten(variables))


@zoo.row(
    "whole_step",
    "experts chosen by tf.where: how many rows each gets depends on the data",
    0.85,
)
def routing_by_where(way: Way) -> Trial:
    gate, experts = weight(32, 2), [weight(32, 32, seed=i) for i in range(2)]
    ws = [weight(32, 32, seed=i) for i in range(2, 8)]
    variables = [*experts, *ws]

    @tf.function
    def step(x):
        with way.whole_step(), tf.GradientTape() as tape:
            for w in ws:
                x = tf.tanh(x @ w)
            chosen, y = tf.argmax(x @ gate, axis=1), tf.zeros_like(x)
            for i, expert in enumerate(experts):
                rows = tf.where(chosen == i)
                z = tf.tanh(tf.gather_nd(x, rows) @ expert)
                y += tf.scatter_nd(rows, z, tf.shape(x, tf.int64))
            loss = tf.reduce_mean(y * y)
            descend(variables, tape.gradient(loss, variables))
        return loss

    return loop(step, [(normal(16384, 32),)], variables)


test_text = zoo.test()
