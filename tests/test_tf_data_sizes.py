"""Sizes that depend on the data: bounded, or as the arguments of the call make them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config
from optckpt.errors import CaptureError
from optckpt.frontends.tf_shadow import shadow
from optckpt.sizes import values_of_inputs

pytestmark = pytest.mark.usefixtures("grappler_off")

FLOPS = Config.model_validate({"costs": {"model": "flops"}, "plans": {"cache": False}})
RNG = np.random.default_rng(0)


def shape_in_copy(function, *arguments, signature=None):
    """The shape of what `function` returns, in a copy of its graph made while it is traced."""
    found = []

    def traced(*args):
        result = function(*args)
        graph = tf.compat.v1.get_default_graph()
        copy = shadow(graph, {}, values=values_of_inputs(graph))
        assert result.shape.num_elements() is None
        found.append(copy.carried(result).shape.as_list())
        return result

    step = tf.function(traced, autograph=False, input_signature=signature)
    if signature is None:
        step(*arguments)
    else:
        step.get_concrete_function()
    return found[0]


X = tf.constant(RNG.normal(size=(40, 8)).astype(np.float32))
SPEC = tf.TensorSpec([40, 8])


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: tf.where(x > 0), [320, 2]),
        (lambda x: tf.boolean_mask(x, x[:, 0] > 0), [40, 8]),
        (lambda x: tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 3)[1], [40, 8]),
        (lambda x: tf.dynamic_partition(x, tf.cast(x > 0, tf.int32), 2)[0], [320]),
        (lambda x: tf.unique(tf.reshape(x, [-1]))[0], [320]),
        (lambda x: tf.unique_with_counts(x[:, 1])[2], [40]),
        (lambda x: tf.raw_ops.ListDiff(x=x[:, 0], y=x[:, 1])[0], [40]),
        (lambda x: tf.image.non_max_suppression(x[:, :4], x[:, 4], 12), [12]),
        (lambda x: tf.image.non_max_suppression(x[:, :4], x[:, 4], 99), [40]),
        (
            lambda x: tf.gather(x, tf.where(tf.gather(x, tf.where(x[:, 0] > 0)[:, 0])[:, 1] > 0)),
            None,
        ),
    ],
)
def test_sizes_are_bounded(function, most):
    most = most or [40, 1, 8]
    assert shape_in_copy(function, signature=[SPEC]) == most


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.where(x > 0),
        lambda x: tf.boolean_mask(x, x[:, 0] > 0),
        lambda x: tf.repeat(x, tf.cast(x[:, 0] > 0, tf.int32) * 2, axis=0),
        lambda x: tf.zeros([tf.reduce_sum(tf.cast(x > 0, tf.int32)), 3]),
        lambda x: tf.range(tf.reduce_sum(tf.cast(x > 0, tf.int32))),
        lambda x: tf.repeat(tf.boolean_mask(x, x[:, 1] < 0), 1 + tf.argmax(x)[0], axis=0),
    ],
)
def test_sizes_are_as_the_arguments_make_them(function):
    assert shape_in_copy(function, X) == function(X).shape.as_list()


def test_captured_constants_count_as_arguments():
    counts = tf.constant([3, 0, 2])
    rows = tf.constant(RNG.normal(size=(3, 5)).astype(np.float32))
    assert shape_in_copy(lambda x: tf.repeat(rows, counts, axis=0), X) == [5, 5]


def test_what_depends_on_variables_has_no_size():
    n = tf.Variable(3)
    assert shape_in_copy(lambda x: tf.tile(x, [n, 1]), X) == [None, 8]


def run(budget, chosen, plans):
    """Losses and gradients, and the peaks of each call, of a step whose rows are chosen by data."""
    ws = [tf.Variable(tf.random.stateless_normal([128, 128], [i, 0]) / 12) for i in range(6)]

    def step(x, keep):
        rows = tf.boolean_mask(x, keep > 0)
        for w in ws:
            rows = tf.tanh(rows @ w)
        loss = tf.reduce_sum(rows * rows)
        if budget is None:
            return [loss, *tf.gradients(loss, ws)]
        return [
            loss,
            *optckpt.gradients(loss, ws, budget=budget, config=FLOPS, on_plan=plans.append),
        ]

    # Whatever the first call has: it is traced for specifications.
    function = tf.function(step, autograph=False).get_concrete_function(
        tf.TensorSpec([4096, 128]), tf.TensorSpec([4096])
    )
    results, peaks = [], []
    for keep in chosen:
        tf.config.experimental.reset_memory_stats("CPU:0")
        result = function(ROWS, tf.constant(keep))
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        results.append([t.numpy() for t in result])
        del result
    return results, peaks


ROWS = tf.constant(RNG.normal(size=(4096, 128)).astype(np.float32))


@pytest.mark.fresh_process
def test_a_budget_holds_whatever_the_data_are():
    chosen = [np.full(4096, k, np.float32) for k in (1, 0)]
    chosen.append((RNG.random(4096) < 0.5).astype(np.float32))
    expected, peaks = run(None, chosen, [])
    plans = []
    budget = int(0.75 * peaks[0])
    got, got_peaks = run(budget, chosen, plans)
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    (plan,) = plans
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    # Of no rows, no tensor is large enough to be counted.
    assert max(got_peaks) <= budget, (got_peaks, budget)
    assert got_peaks[0] > 0.7 * budget


def test_bounds_that_do_not_go_together_are_refused():
    w = tf.Variable(tf.ones([128, 128]))

    @tf.function(input_signature=[tf.TensorSpec([4096, 128])], autograph=False)
    def step(x):
        # As many rows as there are, in fact; the bounds say 4096 + 4096.
        both = tf.concat([tf.boolean_mask(x, x[:, 0] > 0), tf.boolean_mask(x, x[:, 0] <= 0)], 0)
        loss = tf.reduce_sum(tf.tanh((both + x) @ w))
        return optckpt.gradients(loss, [w], budget="80%", config=FLOPS)

    with pytest.raises(CaptureError, match=r"Where.*its size depends on the data"):
        step.get_concrete_function()
