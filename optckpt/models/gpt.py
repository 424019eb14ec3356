"""A causal transformer with normalisation before each part (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from optckpt.models.layers import Layer, Step, Tensor, Weights, cross_entropy, dense, layer_norm
from optckpt.models.params import Gpt

Dropout = Layer
Block = Callable[[Tensor, Dropout], Tensor]


def build(params: Gpt) -> Step:
    """The network; its input is int32 [batch, tokens + 1], of which it predicts all but the first.

    Dropout draws stateless random numbers from a counter that each step raises by one, so that
    every step has masks of its own, and computing one again gives the same mask.
    """
    weights = Weights(params.seed)
    width = params.width
    embedding = weights.normal((params.vocabulary, width), 0.02, "embedding")
    positions = weights.normal((params.tokens, width), 0.01, "positions")
    blocks = [_block(weights, params, f"b{i}") for i in range(params.blocks)]
    last_norm = layer_norm(weights, width, name="last/norm")
    predict = dense(weights, width, params.vocabulary, 0.02, name="last/dense")
    counter = None
    if params.dropout:
        counter = tf.Variable(0, dtype=tf.int32, trainable=False, name="dropout_counter")
        weights.state.append(counter)
    inputs = (
        tf.random.stateless_uniform(
            (params.batch_size, params.tokens + 1),
            weights.next_seed(),
            maxval=params.vocabulary,
            dtype=tf.int32,
        ),
    )

    def loss(tokens: Tensor) -> Tensor:
        draws = 0
        step = None if counter is None else counter.assign_add(1)

        def drop(x: Tensor) -> Tensor:
            nonlocal draws
            if step is None:
                return x
            draws += 1
            seed = tf.stack([step, params.seed * 1000 + draws])
            return tf.nn.experimental.stateless_dropout(x, params.dropout, seed)

        x = drop(tf.nn.embedding_lookup(embedding, tokens[:, :-1]) + positions)
        for block in blocks:
            x = block(x, drop)
        return cross_entropy(predict(last_norm(x)), tokens[:, 1:])

    return Step(params.name, tuple(weights.trainable), tuple(weights.state), inputs, loss)


def _block(weights: Weights, params: Gpt, name: str) -> Block:
    width, heads = params.width, params.heads
    norm1 = layer_norm(weights, width, name=f"{name}/norm1")
    project = dense(weights, width, 3 * width, 0.02, name=f"{name}/qkv")
    join = dense(weights, width, width, 0.02, name=f"{name}/join")
    norm2 = layer_norm(weights, width, name=f"{name}/norm2")
    widen = dense(weights, width, 4 * width, 0.02, name=f"{name}/widen")
    narrow = dense(weights, 4 * width, width, 0.02, name=f"{name}/narrow")
    future = np.triu(np.full((params.tokens, params.tokens), -1e9, np.float32), k=1)

    def attend(x: Tensor, drop: Dropout) -> Tensor:
        shape = (params.batch_size, params.tokens, 3, heads, width // heads)
        queries, keys, values = tf.unstack(
            tf.transpose(tf.reshape(project(x), shape), (2, 0, 3, 1, 4))
        )
        scores = tf.matmul(queries, keys, transpose_b=True) * (width // heads) ** -0.5
        shares = drop(tf.nn.softmax(scores + future))
        y = tf.transpose(tf.matmul(shares, values), (0, 2, 1, 3))
        return join(tf.reshape(y, x.shape))

    def apply(x: Tensor, drop: Dropout) -> Tensor:
        x = x + drop(attend(norm1(x), drop))
        return x + drop(narrow(tf.nn.gelu(widen(norm2(x)))))

    return apply
