"""Sums of three tensors and more add in the same order, rewritten or not."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_support import (
    Step,
    assert_same,
    everything_again,
    flat,
    grappler_off,
    normal,
    random_schedule,
    weight,
)

from optckpt.backends.tensorflow import rewrite
from optckpt.frontends import tf_sums
from optckpt.frontends.tensorflow import capture
from optckpt.frontends.tf_sharing import AtSizes, AtSomeSize
from optckpt.frontends.tf_sums import orders
from optckpt.frontends.tf_traced import as_traced, changes
from optckpt.frontends.tf_unique import Unique
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

Model = Callable[[tf.Tensor], tf.Tensor]

KEPT, LINEAR = "kept", "linear"
"""Terms whose value the backward pass needs, and terms that nobody needs after the sum."""


def sum_of(terms: list[str], dtype: str, width: int = 64) -> tuple[Model, list[tf.Variable]]:
    ws = [weight(width, width, seed=i) for i in range(len(terms) + 1)]

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ ws[-1])
        made = [h @ w for w in ws[:-1]]
        parts = [tf.tanh(t) if term == KEPT else t for t, term in zip(made, terms, strict=True)]
        total = tf.cast(tf.add_n([tf.cast(t, dtype) for t in parts]), tf.float32)
        return tf.reduce_mean(tf.square(tf.sin(total)))

    return model, ws


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "terms",
    [
        [KEPT] * 3,
        [KEPT] * 11,
        [KEPT, KEPT, LINEAR],
        [KEPT, KEPT, KEPT, LINEAR, KEPT],
        [*[KEPT] * 9, LINEAR, LINEAR],
    ],
    ids=lambda terms: "".join(t[0] for t in terms),
)
def test_forward_sums_keep_their_order(terms: list[str], dtype: str) -> None:
    model, ws = sum_of(terms, dtype)
    x = normal(64, 64)
    plain = Step(model, ws)(x)
    for schedule in (Schedule.base, everything_again, random_schedule(1), random_schedule(2, 0.7)):
        assert_same(Step(model, ws, schedule)(x), plain)


def forget(*terms: int) -> Callable[[TrainingGraph], Schedule]:
    """Keep all terms of the first sum but these; make them again right after it."""

    def make(graph: TrainingGraph) -> Schedule:
        total = next(u for u, op in enumerate(graph.operations) if op.kind == "AddN")
        again = [graph.producer[graph.operations[total].reads[t]] for t in terms]
        executions = list(range(len(graph.operations)))
        return Schedule((*executions[: total + 1], *again, *executions[total + 1 :]))

    return make


def test_the_input_that_dies_is_not_added_first() -> None:
    model, ws = sum_of([KEPT] * 4, "float32")
    x = normal(64, 64)
    plain = Step(model, ws)(x)
    for terms, copies in (((2,), 1), ((3, 2), 1), ((0, 2), 0), ((1, 3), 0), ((), 0)):
        step = Step(model, ws, forget(*terms))
        assert_same(step(x), plain)
        assert step.report is not None
        assert step.report.sum_copies == copies


def test_the_measured_peak_is_the_simulated_one_where_the_sum_copies() -> None:
    w = weight(1)

    def model(x: tf.Tensor) -> tf.Tensor:
        terms = [tf.stop_gradient(tf.exp(x * (i + 1.0))) for i in range(3)]
        total = tf.reduce_mean(tf.add_n(terms))
        for t in terms:
            total = tf.reduce_mean(t * total)
        return total * w

    x = tf.constant(normal(1024, 1024))
    found = {}
    for name, schedule in (("copied", forget(2)), ("taken over", forget(0))):
        step = Step(model, [w], schedule)
        with grappler_off():
            step.function(x)
            tf.config.experimental.reset_memory_stats("CPU:0")
            before = tf.config.experimental.get_memory_info("CPU:0")["current"]
            outputs = step.function(x)
        measured = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
        found[name] = simulate(step.graph, schedule(step.graph)).peak - step.graph.resident
        # Chunks left by earlier tests of the process may be larger than what is put in them.
        assert 0.97 * found[name] <= measured <= 1.3 * found[name]
        del outputs
    assert found["copied"] == found["taken over"] + 4 * 1024 * 1024


def test_small_sums_keep_their_order() -> None:
    ws = [weight(64, 64, seed=i) for i in range(4)]

    def model(x: tf.Tensor) -> tf.Tensor:
        h = [tf.tanh(x @ w) for w in ws]
        scalars = [tf.reduce_sum(tf.square(t)) for t in h]
        rows = tf.add_n([tf.reduce_mean(tf.exp(t), 0) for t in h])
        return tf.add_n([tf.sin(s) for s in scalars]) + tf.reduce_sum(tf.tanh(rows))

    x = normal(64, 64)
    plain = Step(model, ws)(x)
    for schedule in (everything_again, random_schedule(1)):
        assert_same(Step(model, ws, schedule)(x), plain)


def test_the_order_as_traced() -> None:
    """Which input the kernel puts first, told from the graph alone."""
    variable = tf.Variable(normal(8, 16), trainable=False)
    found: dict[str, tuple[int, ...]] = {}
    number = itertools.count(2)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def new() -> tf.Tensor:
            # Not twice the same, or TensorFlow would merge them.
            return tf.exp(x * float(next(number)))

        held, stored, twice = new(), new(), new()
        variable.assign(stored)
        constant = tf.ones([8, 16])
        half = tf.split(tf.tanh(tf.concat([x, x], 0)), 2, axis=0)
        sums = {
            "all die": tf.add_n([new(), new(), new()]),
            "resident": tf.add_n([x, variable.read_value(), new()]),
            "constant": tf.add_n([constant, tf.exp(constant), new()]),
            "output": tf.add_n([held, tf.identity(held), held + 1.0]),
            "stored": tf.add_n([stored, held, new(), new()]),
            "parts": tf.add_n([*half, new()]),
            "twice": tf.add_n([twice, tf.reshape(twice, [8, 16]), new()]),
            "merged": tf.add_n([tf.cosh(x * 2.0), tf.cosh(x * 2.0), new()]),
            "merged, inputs swapped": tf.add_n([held * x, x * held, new()]),
            "not merged": tf.add_n([tf.cosh(x * 3.0), tf.cosh(x * 4.0), new()]),
            "second": tf.add_n([held, new(), new()]),
            "nobody": tf.add_n([held, x, stored]),
        }
        with tf.control_dependencies([held]):
            merged = [tf.cosh(x * 5.0) for _ in range(2)]
        sums["merged, after another"] = tf.add_n([*merged, new()])
        early, late = new(), new()
        square = tf.square(late)
        with tf.control_dependencies([tf.reduce_sum(early)]):
            sums["read before"] = tf.add_n([x, held, early])
        sums["read after"] = tf.add_n([late, x, square])
        with tf.control_dependencies([sums["read after"]]):
            after = tf.cos(late)
        outputs = [*sums.values(), held, after]
        y = tf.add_n([tf.reduce_sum(t) for t in outputs])
        graph = tf.compat.v1.get_default_graph()
        got = orders(graph, graph.get_operations(), [y], [], [*outputs, y])
        found.update((name, got[t.op]) for name, t in sums.items())
        return outputs

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([8, 16]))
    natural, third = (0, 1, 2), (2, 1, 0)
    assert found == {
        "all die": natural,
        "resident": third,
        "constant": third,
        "output": third,
        "stored": (2, 1, 0, 3),
        "parts": third,
        "twice": third,
        "merged": third,
        "merged, after another": third,
        "merged, inputs swapped": third,
        "not merged": natural,
        "second": natural,
        "nobody": natural,
        "read before": third,
        "read after": third,
    }


def test_calls_and_derivatives_on_top_of_a_rewritten_graph() -> None:
    ws = [weight(64, 64, seed=i) for i in range(3)]

    def model(x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x)
        for w in ws:
            h = tf.add_n([tf.tanh(h @ w), tf.sin(h), 0.5 * h])
        return tf.reduce_mean(tf.square(h))

    def run(*schedules: Any) -> list[np.ndarray]:
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            y = model(x)
            outputs = [y]
            for schedule in schedules:
                with as_traced(graph):
                    gradients = flat(tf.gradients(y, ws))
                outputs += gradients
                if schedule is not None:
                    found = capture(graph, [y], gradients)
                    rewrite(found, schedule(found.graph))
                y = tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients]) + model(x * 0.5)
            return outputs

        with grappler_off():
            return [t.numpy() for t in tf.function(step, autograph=False)(normal(64, 64))]

    plain = run(None, None, None)
    for seed in range(2):
        schedules = [everything_again, random_schedule(seed), random_schedule(seed + 2, 0.7)]
        assert_same(run(*schedules), plain)


def test_outside_the_context_the_graph_is_as_rewritten() -> None:
    model, ws = sum_of([KEPT] * 3, "float32")
    step = Step(model, ws, everything_again)
    step(normal(64, 64))
    assert step.capture is not None
    graph = step.capture.tf_graph

    def reads() -> list[list[str]]:
        return [[t.name for t in op.inputs] for op in graph.get_operations()]

    rewritten = reads()
    with as_traced(graph):
        # Re-executions still read each other; nothing as traced reads them.
        assert not any(
            name.startswith("optckpt/")
            for op, names in zip(graph.get_operations(), reads(), strict=True)
            if not op.name.startswith("optckpt/")
            for name in names
        )
    assert reads() == rewritten


def test_a_copy_can_be_differentiated() -> None:
    model, ws = sum_of([KEPT] * 3, "float32")

    def twice(schedule: Any) -> list[np.ndarray]:
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            y = model(x)
            gradients = flat(tf.gradients(y, ws))
            if schedule is not None:
                found = capture(tf.compat.v1.get_default_graph(), [y], gradients)
                assert rewrite(found, schedule(found.graph)).sum_copies
            return flat(tf.gradients(y, ws))

        with grappler_off():
            return [t.numpy() for t in tf.function(step, autograph=False)(normal(64, 64))]

    for a, b in zip(twice(forget(2)), twice(None), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def test_a_long_chain_of_operations_without_variables_is_no_deep_recursion() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4])
        y = x
        for _ in range(1500):
            y = tf.tanh(y)
        total = tf.add_n([y, tf.sin(y), tf.cos(y)])
        (g,) = tf.gradients(total, [x])
        found = capture(graph, [total], [g])
    assert set(found.sums) >= {total.op}


def test_a_sum_of_losses_of_variables_needs_no_walk_unless_a_twin_might_be_merged() -> None:
    def takes_first(op: tf.Operation, held: Container[int]) -> bool:
        return tf_sums.takes_first(op, held, AtSizes(), Unique())

    with tf.Graph().as_default():
        variables = [tf.Variable(tf.ones([3])) for _ in range(3)]
        total = tf.add_n([tf.nn.l2_loss(v) for v in variables])
        assert takes_first(total.op, ())
        assert not takes_first(total.op, {id(total.op.inputs[0])})
        read = variables[0].read_value()
        losses = [tf.nn.l2_loss(read), tf.nn.l2_loss(read), tf.nn.l2_loss(variables[1])]
        assert not takes_first(tf.add_n(losses).op, ())
        shared = tf.nn.l2_loss(variables[2].read_value())
        again = tf.add_n([shared, losses[2], losses[1]])
        assert takes_first(again.op, ())
        tf.sqrt(shared)
        assert not takes_first(again.op, ())
        assert not takes_first(tf.add_n([tf.constant(1.0), *losses[:2]]).op, ())


def test_products_of_one_tensor_with_others_are_told_apart_by_what_these_are() -> None:
    with tf.Graph().as_default() as graph:
        read = tf.Variable(tf.ones([3])).read_value()
        x, y = (tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(2))
        unique = Unique()
        sine, root, other = read * tf.sin(x), tf.sqrt(x) * read, read * tf.exp(x)
        assert all(unique.holds(t.op) for t in (sine, root, other))
        again = tf.sin(y) * read
        unique = Unique()
        assert not unique.holds(sine.op)
        assert not unique.holds(again.op)
        assert unique.holds(other.op)
        again.op._add_control_input(other.op)
        assert Unique().holds(again.op)
        changes(graph).redirect(again.op, 1, other)
        assert not Unique(changes(graph)).holds(other.op)
        assert not Unique(changes(graph)).holds(again.op)


def test_parts_narrower_than_the_whole_are_copies_at_any_size() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8])
        begin = tf.compat.v1.placeholder(tf.int32, [2])
        rows = tf.compat.v1.placeholder(tf.int32, [])
        narrow = tf.slice(x, begin, tf.stack([rows, 4]))
        wide = tf.slice(x, begin, tf.stack([rows, 8]))
        assert not AtSomeSize().pairs(narrow.op)
        assert AtSomeSize().pairs(wide.op) == [(0, 0)]


def test_sums_of_the_same_in_another_order_are_one_sum() -> None:
    def step(x: tf.Tensor, rewritten: bool) -> list[tf.Tensor]:
        terms = [tf.exp(x), tf.sin(x), tf.cos(x)]
        again = [tf.exp(x), tf.sin(x), tf.cos(x)]
        sums = [
            tf.add_n([part[i] for i in order])
            for part in (terms, again)
            for order in itertools.permutations(range(3))
        ]
        if rewritten:
            graph = tf.compat.v1.get_default_graph()
            y = tf.add_n([tf.reduce_sum(t) for t in sums])
            found = capture(graph, [y], flat(tf.gradients(y, [x])), keep=sums, chain_from=1)
            rewrite(found, Schedule.base(found.graph))
        return sums

    x = tf.constant(normal(64, 64))
    with grappler_off():
        plain, mine = (
            [t.numpy() for t in tf.function(step, autograph=False)(x, way)] for way in (False, True)
        )
    for t in plain:
        np.testing.assert_array_equal(t, plain[0])
    assert_same(mine, plain)


class RandomSums:
    """A model of `n` rows whose gradients are sums of up to a dozen terms."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.squares = [weight(32, 32, seed=i) for i in range(4)]
        self.bias, self.row = weight(32, seed=5), weight(1, 32, seed=6)
        self.xs = [*self.squares, self.bias, self.row]

    def __call__(self, x: tf.Tensor) -> list[tf.Tensor]:
        rng = np.random.RandomState(self.seed)
        pool = [tf.tanh(x @ self.squares[0])]

        def one() -> tf.Tensor:
            return pool[max(0, len(pool) - int(rng.geometric(0.4)))]

        def term() -> tf.Tensor:
            t = one()
            kinds: list[Callable[[], tf.Tensor]] = [
                lambda: t,
                lambda: t * t,
                lambda: t * one(),
                lambda: one() * t,
                lambda: tf.square(t),
                lambda: t + self.bias,
                lambda: t * self.row,
                lambda: t * tf.broadcast_to(self.row, tf.shape(t)),
                lambda: t * tf.reshape(tf.reshape(t, [-1]), [-1, 32]),
                lambda: tf.nn.relu(t),
                lambda: tf.tanh(t @ self.squares[rng.randint(4)]),
                lambda: t - tf.reduce_mean(t, 0, keepdims=True),
                lambda: t - tf.reduce_mean(t, 1, keepdims=True),
                lambda: tf.where(t > 0, t * one(), t),
            ]
            return kinds[rng.randint(len(kinds))]()

        for _ in range(5):
            terms = [term() for _ in range(rng.randint(1, 7))]
            total = tf.add_n(terms) if rng.rand() < 0.5 else sum(terms[1:], terms[0])
            pool.append(tf.tanh(total / len(terms)))
        losses = [tf.reduce_mean(t * t) for t in pool[-3:]]
        return [*losses, tf.reduce_mean(pool[-1] @ self.squares[1] * pool[0])]


def test_random_sums_at_unknown_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """Planned for 16 rows, the gradients are those of the plain step at all sizes."""
    compared = 0
    for seed in range(6):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "optckpt.frontends.tf_sums"):
            compared += _at_unknown_sizes(RandomSums(seed), caplog)
    assert compared >= 3


def _at_unknown_sizes(model: RandomSums, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether it could be compared: which order a sum has may depend on timing."""
    schedules = (None, Schedule.base, everything_again)
    functions = []
    for schedule in schedules:

        def step(x: tf.Tensor, schedule: Any = schedule) -> list[tf.Tensor]:
            ys = model(x)
            gradients = flat(tf.gradients(ys, model.xs))
            if schedule is not None:
                graph = tf.compat.v1.get_default_graph()
                shapes = {id(x): tf.TensorShape([16, 32])}
                found = capture(graph, ys, gradients, shapes=shapes, chain_from=256, count_from=0)
                rewrite(found, schedule(found.graph))
            return [*ys, *gradients]

        made = tf.function(step, autograph=False, input_signature=[tf.TensorSpec([None, 32])])
        made.get_concrete_function()
        functions.append(made)
        if "depends on timing" in caplog.text:
            return False
    for n in (16, 1):
        x = tf.constant(normal(n, 32, seed=n))
        with grappler_off():
            plain, *others = ([t.numpy() for t in function(x)] for function in functions)
        for other in others:
            assert_same(other, plain)
    return True


def test_looking_at_a_shape_takes_no_time() -> None:
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        a, b = tf.tanh(x), tf.sin(x)
        last = tf.exp(tf.exp(tf.exp(x)))
        total = tf.add_n([a, b, last])
        y = tf.reduce_sum(total * tf.cast(tf.shape(last)[0], tf.float32))
        graph = tf.compat.v1.get_default_graph()
        kept = [y, a, b]
        assert orders(graph, graph.get_operations(), [y], [], kept)[total.op] == (2, 1, 0)
        return kept

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 16]))
