"""Functions that a step calls become part of it."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import assert_same, grappler_off, normal, weight

import optckpt
from optckpt.config import parse_config
from optckpt.frontends.tf_sums import orders
from optckpt.frontends.tf_traced import Reading
from optckpt.inline import inlined

FLOPS = parse_config({"costs": {"model": "flops"}, "memory": {"margin": 0.0}})


def here(graph: tf.Graph):
    return lambda other: other is graph


def calls(graph: tf.Graph) -> list[str]:
    return [op.name for op in graph.get_operations() if "PartitionedCall" in op.type]


def traced(function, *args, inline=True, xs=()):
    """The function of `args` that returns what `function` does, and its gradients."""

    @tf.function(autograph=False)
    def outer(*args):
        graph = tf.compat.v1.get_default_graph()
        with inlined(here(graph)) if inline else contextlib.nullcontext():
            with tf.GradientTape() as tape:
                tape.watch(args)
                found = function(*args)
            watched = [t for t in (*args, *xs) if t.dtype.is_floating]
            return found, tape.gradient(found, watched)

    return outer.get_concrete_function(*args)


def assert_inlined(function, *args, xs=(), kept=0):
    """That bodies take the place of calls and that nothing differs in any bit."""
    plain, mine = (traced(function, *args, inline=inline, xs=xs) for inline in (False, True))
    assert calls(plain.graph)
    assert len(calls(mine.graph)) == kept
    with grappler_off():
        expected, got = (
            [t.numpy() for t in tf.nest.flatten(f(*args), expand_composites=True) if t is not None]
            for f in (plain, mine)
        )
    assert_same(got, expected)
    return mine.graph


def test_bodies_are_in_the_graph_and_give_the_same():
    v = tf.Variable(2.0)

    @tf.function
    def double(x):
        if tf.reduce_sum(x) > 0:  # AutoGraph turns this into tf.cond.
            x = x * v
        return x + 1.0

    x = tf.constant([1.0, -3.0, 4.0])
    graph = assert_inlined(double, x, xs=[v])
    assert any(op.name.startswith("double/") for op in graph.get_operations())
    assert any(op.name.startswith("gradients/double/") for op in graph.get_operations())


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
    assert_inlined(layer, tf.constant(1.0), xs=[layer.w])


@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": True},
        {"experimental_attributes": {"_noinline": True}},
    ],
)
def test_what_stays_a_call(options):
    function = tf.function(lambda x: x * 2.0, **options)
    # The call and that of its gradient.
    assert_inlined(function, tf.constant(1.0), kept=2)


def test_functions_with_a_signature():
    v = tf.Variable(3.0)
    signature = [tf.TensorSpec([None], tf.float32)]
    triple = tf.function(lambda x: x * v * v, input_signature=signature)
    assert_inlined(triple, tf.constant([1.0, 2.0]), xs=[v])


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
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = double(x)
        return y + z, tape.gradient(z, x)

    function = outer.get_concrete_function(tf.constant(1.0))
    assert len(calls(function.graph)) == 2
    assert [float(t) for t in function(tf.constant(1.0))] == [4.0, 2.0]


def test_what_no_gradient_can_be_foreseen_of_stays_a_call():
    """Several tapes, one that is persistent, tf.gradients: they add in orders of their own."""
    v = tf.Variable(normal(8, 8))

    @tf.function
    def layer(x):
        h = tf.tanh(x @ v)
        return h * h + tf.sin(h) * x

    def persistent(x):
        with tf.GradientTape(persistent=True) as tape:
            y = layer(x)
            z = y * y
        return tape.gradient(y, v), tape.gradient(z, v)

    def nested(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = layer(x)
            g = inner.gradient(y, v)
        return outer.gradient(g, v)

    def symbolic(x):
        y = layer(x)
        (g,) = tf.gradients(y, [x])
        return g, tf.gradients(tf.reduce_sum(g * g), [x])

    x = tf.constant(normal(8, 8, seed=1))
    for way in (persistent, nested, symbolic):

        def step(x, inline, way=way):
            graph = tf.compat.v1.get_default_graph()
            with inlined(here(graph)) if inline else contextlib.nullcontext():
                return way(x)

        function = tf.function(step, autograph=False)
        assert calls(function.get_concrete_function(x, True).graph)
        with grappler_off():
            expected, got = (tf.nest.flatten(function(x, inline)) for inline in (False, True))
        assert_same([t.numpy() for t in got], [t.numpy() for t in expected])


def test_loops_and_branches_run_though_nobody_needs_them():
    w = tf.Variable(normal(4, 4))

    @tf.function(autograph=False)
    def inner(x):
        tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h) * x), [0, x])
        tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x), lambda: x)
        tf.cos(x)
        return x @ w

    function = tf.function(lambda x: inner(x) * 2.0, autograph=False)
    graph = assert_inlined(function, tf.constant(normal(4, 4)), xs=[w])
    kinds = {op.type for op in graph.get_operations()}
    assert {"StatelessWhile", "StatelessIf"} <= kinds
    assert "Cos" not in kinds


def test_results_that_nobody_needs_are_not_waited_for():
    """Else they would hold what sums read, which would add in another order."""
    count = tf.Variable(0.0)

    @tf.function(autograph=False)
    def inner(x):
        count.assign(1.0)
        return tf.sin(x), tf.cos(x)

    @tf.function(autograph=False)
    def function(x):
        y, _ = inner(x)
        return y, count + 1.0

    graph = assert_inlined(function, tf.constant([1.0, 2.0]))
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    waited_for = {p for op in reads for p in op.control_inputs}
    assert waited_for
    assert "Cos" not in {op.type for op in Reading(graph).closure(waited_for)}


def test_functions_that_take_gradients_themselves_become_part_of_the_step():
    weights = [weight(256, 256, seed=i) for i in range(5)]

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.tanh(x @ w)
            loss = tf.reduce_mean(x * x)
        return loss, tape.gradient(loss, weights)

    x = tf.constant(normal(2048, 256))
    with grappler_off():
        plain = [t.numpy() for t in tf.nest.flatten(gradients(x))]
    for _ in range(2):

        @tf.function
        def step(x):
            with optckpt.whole_step("70%", config=FLOPS) as whole:
                found = gradients(x)
                whole.keep(found)
            return found

        with grappler_off():
            assert_same([t.numpy() for t in tf.nest.flatten(step(x))], plain)
        assert len(optckpt.last_plan().schedule.executions) > 10


class RandomNetwork:
    """Functions that call each other, drawn from a seed."""

    def __init__(self, seed):
        rng = np.random.RandomState(seed)
        self.squares = [weight(16, 16, seed=i) for i in range(3)]
        self.table = weight(20, 16, seed=7)
        self.count = tf.Variable(0.0, trainable=False)
        self.xs = [*self.squares, self.table]
        self.functions = []
        for _ in range(4):
            self.functions.append(self._function(rng.randint(1 << 30), list(self.functions)))

    def __call__(self, x, ids):
        a, b, _ = self.functions[-1](x, x)
        # A layer that is shared, one of whose results nobody uses.
        c, _, d = self.functions[-2](a, tf.gather(self.table, ids))
        return tf.reduce_mean(tf.add_n([a * a, b * c, c, d, a]) + x * self.count)

    def _function(self, seed, inner):
        @tf.function(autograph=False)
        def function(x, y):
            rng = np.random.RandomState(seed)
            pool = [x, y]

            def one():
                return pool[rng.randint(len(pool))]

            for _ in range(7):
                w = self.squares[rng.randint(3)]
                kinds = [
                    lambda w=w: tf.tanh(one() @ w),
                    lambda: tf.add_n([one() for _ in range(rng.randint(3, 7))]) * 0.3,
                    lambda: tf.add_n([tf.sin(one()), tf.square(one()) * 0.3, one()]) * 0.5,
                    lambda: one() * one(),
                    lambda: one() - tf.reduce_mean(one(), 0),
                    lambda: tf.nn.dropout(one(), 0.3, seed=rng.randint(99)),
                    lambda: one() + tf.gather(self.table, [1, 2, 3, 1]),
                    lambda: tf.cond(tf.reduce_sum(one()) > 0, one, one),
                    lambda w=w: tf.while_loop(
                        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h @ w) + h), [0, one()]
                    )[1],
                ]
                if inner:
                    called = inner[rng.randint(len(inner))]
                    kinds += 3 * [lambda f=called: tf.add_n(f(one(), one())[: rng.randint(1, 4)])]
                pool.append(tf.tanh(kinds[rng.randint(len(kinds))]()))
            self.count.assign_add(1e-3)
            return pool[-1], tf.add_n(pool[-4:-1]) * 0.3, x

        return function


# Of networks whose sums add in an order that does not depend on what runs first.
@pytest.mark.parametrize(
    ("seed", "watched"),
    [*((seed, True) for seed in (4, 11, 20, 22)), *((seed, False) for seed in (1, 4, 12, 20, 23))],
)
def test_random_networks_of_functions_are_the_same_in_every_bit(seed, watched, caplog):
    x, ids = tf.constant(normal(4, 16)), tf.constant([1, 5, 1, 2])

    def run(inline):
        tf.random.set_seed(seed)
        network = RandomNetwork(seed)

        @tf.function(autograph=False)
        def step(x, ids):
            graph = tf.compat.v1.get_default_graph()
            with inlined(here(graph)) if inline else contextlib.nullcontext():
                with tf.GradientTape() as tape:
                    if watched:
                        tape.watch(x)
                    loss = network(x, ids)
                found = tape.gradient(loss, [*[x][:watched], *network.xs])
                results = [loss, *(tf.convert_to_tensor(t) for t in found if t is not None)]
                if inline:
                    members = Reading(graph).closure([t.op for t in results])
                    assert orders(graph, members, [loss], results[1:], results)
                return results, network.count.read_value()

        found = calls(step.get_concrete_function(x, ids).graph)
        assert bool(found) is not inline
        with grappler_off():
            results = [tf.nest.flatten(step(x, ids), expand_composites=True) for _ in range(2)]
        return [t.numpy() for r in results for t in r if t is not None]

    with caplog.at_level("DEBUG", "optckpt.frontends.tf_sums"):
        assert_same(run(True), run(False))
    assert not any("depends on timing" in line for line in caplog.messages)


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


def test_a_function_that_creates_variables_in_its_first_step_is_planned():
    """The step itself creates none, so that it is traced only once."""

    def run(budget):
        weights = [weight(256, 256, seed=i) for i in range(6)]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        @tf.function
        def train(x):
            with tf.GradientTape() as tape:
                y = x
                for w in weights:
                    y = tf.tanh(tf.tanh(y @ w) * 1.5)
                loss = tf.reduce_mean(y * y)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        plans = []

        @tf.function
        def step(x):
            if budget is None:
                return train(x)
            with optckpt.whole_step(budget, config=FLOPS, on_plan=plans.append) as whole:
                loss = train(x)
                whole.keep(loss)
            return loss

        x = tf.constant(normal(2048, 256))
        with grappler_off():
            losses = [step(x).numpy() for _ in range(3)]
        return losses, [w.numpy() for w in weights], plans

    *plain, _ = run(None)
    *planned, plans = run("70%")
    assert len(plans) == 1
    assert len(plans[0].schedule) > len(set(plans[0].schedule.executions))
    tf.nest.map_structure(np.testing.assert_array_equal, planned, plain)
