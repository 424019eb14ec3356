"""The zoo's models of which only a part has a budget."""

from __future__ import annotations

import tensorflow as tf

from zoo.harness import Family, Trial, Way, descend, loop, normal, weight

zoo = Family("parts")
BATCH = 4096
X = normal(2 * BATCH, 32)


def block(x, ws):
    for w in ws:
        x = tf.tanh(x @ w)
    return x


@zoo.row("budgeted", "two blocks with budgets of their own under a user's tape", 0.95, plans=2)
def two_blocks(way: Way) -> Trial:
    ws = [weight(32, 32, seed=i) for i in range(12)]
    first = way.budgeted(lambda x: block(x, ws[:6]), 0.85)
    second = way.budgeted(lambda x: block(x, ws[6:]), 0.85)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(second(tf.sin(first(x))) ** 2)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], ws)


@zoo.row("budgeted", "a block with dropout and a moving average in eager code", 0.95)
def eager_block(way: Way) -> Trial:
    ws, moving = [weight(32, 32, seed=i) for i in range(6)], tf.Variable(tf.zeros(32))
    seed = tf.Variable([3, 4])

    def inside(x):
        now = seed.read_value()
        seed.assign_add([1, 1])
        x = tf.nn.experimental.stateless_dropout(block(x, ws[:3]), 0.1, now)
        moving.assign(0.9 * moving + 0.1 * tf.reduce_mean(x, axis=0))
        return block(x, ws[3:])

    part = way.budgeted(inside, 0.85)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(part(x) ** 2)
        grads = tape.gradient(loss, ws)
        descend(ws, grads)
        return loss, grads

    return loop(step, [(X[:BATCH],)], [*ws, moving, seed])


test_parts = zoo.test()
