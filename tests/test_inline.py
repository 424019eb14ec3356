"""Functions that a step calls become part of it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tf_support import grappler_off, normal, weight

import optckpt
from optckpt.config import parse_config
from optckpt.inline import inlined

FLOPS = parse_config({"costs": {"model": "flops"}, "memory": {"margin": 0.0}})


def here(graph: tf.Graph):
    return lambda other: other is graph


def calls(graph: tf.Graph) -> list[str]:
    return [op.name for op in graph.get_operations() if "PartitionedCall" in op.type]


def traced(function, *args, inline=True):
    """The graph of a function of `args` that calls `function`."""

    @tf.function(autograph=False)
    def outer(*args):
        graph = tf.compat.v1.get_default_graph()
        with inlined(here(graph)) if inline else contextlib.nullcontext():
            return function(*args)

    return outer.get_concrete_function(*args)


def test_bodies_are_in_the_graph_and_give_the_same():
    v = tf.Variable(2.0)

    @tf.function
    def double(x):
        if tf.reduce_sum(x) > 0:  # AutoGraph turns this into tf.cond.
            x = x * v
        return x + 1.0

    x = tf.constant([1.0, -3.0, 4.0])
    function = traced(double, x)
    assert not calls(function.graph)
    assert any(op.name.startswith("double/") for op in function.graph.get_operations())
    assert calls(traced(double, x, inline=False).graph)
    np.testing.assert_array_equal(function(x), double(x))


def test_methods_defaults_and_nested_functions():
    class Layer(tf.Module):
        def __init__(self):
            self.w = tf.Variable(3.0)

        @tf.function
        def scale(self, x, *, by=2.0):
            return x * self.w * by

        @tf.function(autograph=False)
        def __call__(self, x):
            return self.scale(x, by=5.0) + self.scale(x)

    layer = Layer()
    function = traced(layer, tf.constant(1.0))
    assert not calls(function.graph)
    assert float(function(tf.constant(1.0))) == 21.0


@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": True},
        {"input_signature": [tf.TensorSpec([], tf.float32)]},
        {"experimental_attributes": {"_noinline": True}},
    ],
)
def test_what_stays_a_call(options):
    function = tf.function(lambda x: x * 2.0, **options)
    assert len(calls(traced(function, tf.constant(1.0)).graph)) == 1


def test_other_graphs_and_other_times_are_left_alone():
    double = tf.function(lambda x: x * 2.0)
    before = type(double).__call__

    @tf.function(autograph=False)
    def outer(x):
        graph = tf.compat.v1.get_default_graph()
        with inlined(here(graph)):
            # The branches of a cond are graphs of their own.
            y = tf.cond(x > 0, lambda: double(x), lambda: x)
        with pytest.raises(ZeroDivisionError), inlined(here(graph)):
            raise ZeroDivisionError
        assert type(double).__call__ is before
        return y + double(x)

    function = outer.get_concrete_function(tf.constant(1.0))
    assert len(calls(function.graph)) == 1
    assert float(function(tf.constant(1.0))) == 4.0


def test_a_step_of_functions_is_planned_inside():
    weights = [weight(256, 256, seed=i) for i in range(6)]

    def block(w):
        return tf.function(lambda x: tf.tanh(tf.tanh(x @ w) * 1.5))

    blocks = [block(w) for w in weights]

    @tf.function
    def forward(x):
        for f in blocks:
            x = f(x)
        return tf.reduce_mean(x * x)

    def run(budget):
        @tf.function
        def step(x):
            scope = optckpt.whole_step(budget, config=FLOPS) if budget else contextlib.nullcontext()
            with scope as whole, tf.GradientTape() as tape:
                loss = forward(x)
                gradients = tape.gradient(loss, weights)
                if whole is not None:
                    whole.keep(gradients)
            return loss, gradients

        with grappler_off():
            return tf.nest.map_structure(lambda t: t.numpy(), step(tf.constant(normal(2048, 256))))

    plain = run(None)
    planned = run("60%")
    plan = optckpt.last_plan()
    assert len(plan.schedule) > len(set(plan.schedule.executions)) > 6 * 3
    assert plan.predicted_peak <= 0.6 * plan.plain_peak
    tf.nest.map_structure(np.testing.assert_array_equal, planned, plain)
