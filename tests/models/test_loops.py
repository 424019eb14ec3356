"""Loops and lists that are executed again: the same gradients bit by bit, less memory."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import (
    Scheduler,
    Step,
    assert_same,
    everything_again,
    grappler_off,
    normal,
    random_schedule,
    weight,
)

import optckpt
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

raw = tf.raw_ops
SETTINGS: dict[str, Any] = {"solver": {"time_limit": 5.0}, "plans": {"cache": False}}

BATCH, STEPS, WIDTH = 16, 6, 32
LOOPS = ("While", "StatelessWhile")

Built = tuple[Callable[..., tf.Tensor], list[tf.Variable]]


def recurrent(*layers: Any, mask: bool = False) -> Built:
    def run(x: tf.Tensor) -> tf.Tensor:
        seen = tf.sequence_mask(tf.range(BATCH) % STEPS + 1, STEPS) if mask else None
        h = x
        for layer in layers:
            h = layer(h, mask=seen, training=True) if mask else layer(h, training=True)
        return tf.reduce_mean(tf.square(h))

    run(tf.zeros([BATCH, STEPS, WIDTH]))
    return run, [w.value for layer in layers for w in layer.trainable_weights]


def lstms() -> Built:
    return recurrent(*(keras.layers.LSTM(WIDTH, return_sequences=True) for _ in range(3)))


def grus() -> Built:
    first = keras.layers.GRU(WIDTH, return_sequences=True, recurrent_dropout=0.2)
    return recurrent(first, keras.layers.GRU(WIDTH))


def masked_lstm() -> Built:
    layers = (keras.layers.LSTM(WIDTH, return_sequences=True) for _ in range(2))
    return recurrent(*layers, mask=True)


def bidirectional() -> Built:
    return recurrent(
        keras.layers.Bidirectional(keras.layers.LSTM(WIDTH, return_sequences=True)),
        keras.layers.Bidirectional(keras.layers.GRU(WIDTH)),
    )


def seq2seq() -> Built:
    """A loop that starts from what another loop ends with."""
    reader = keras.layers.LSTM(WIDTH, return_state=True)
    writer = keras.layers.LSTM(WIDTH, return_sequences=True)

    def run(x: tf.Tensor) -> tf.Tensor:
        _, *state = reader(x)
        return tf.reduce_mean(tf.square(writer(tf.sin(x), initial_state=state)))

    run(tf.zeros([BATCH, STEPS, WIDTH]))
    return run, [w.value for layer in (reader, writer) for w in layer.trainable_weights]


def by_hand(**options: Any) -> Built:
    ws = [weight(WIDTH, WIDTH, seed=s) for s in range(3)]

    def run(x: tf.Tensor) -> tf.Tensor:
        h = x[:, 0]
        for w in ws:

            def body(i: tf.Tensor, t: tf.Tensor, w: tf.Variable = w) -> tuple[tf.Tensor, tf.Tensor]:
                return i + 1, tf.tanh(tf.cos(t @ w) + t)

            _, h = tf.while_loop(lambda i, _: i < STEPS, body, (0, tf.sin(h)), **options)
        return tf.reduce_sum(tf.square(h))

    return run, ws


def until_small() -> Built:
    """Loops that end when the data say so."""
    ws = [weight(WIDTH, WIDTH, seed=s) for s in range(2)]

    def run(x: tf.Tensor) -> tf.Tensor:
        h = x[:, 0]
        for w in ws:
            (h,) = tf.while_loop(
                lambda t: tf.reduce_sum(t * t) > 20.0,
                lambda t, w=w: (0.7 * tf.tanh(t @ w),),
                (tf.sin(h),),
                maximum_iterations=20,
            )
        return tf.reduce_sum(tf.square(h))

    return run, ws


def mapped() -> Built:
    w = weight(WIDTH, WIDTH)

    def run(x: tf.Tensor) -> tf.Tensor:
        h = tf.map_fn(lambda row: tf.tanh(tf.cos(row @ w) @ w), tf.sin(x @ w))
        h = tf.map_fn(lambda row: tf.tanh(tf.cos(row @ w) @ w), tf.sin(h), swap_memory=True)
        return tf.reduce_sum(tf.square(h))

    return run, [w]


def scanned() -> Built:
    w, v = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH, seed=1)

    def run(x: tf.Tensor) -> tf.Tensor:
        rows = tf.transpose(tf.sin(x @ w), [1, 0, 2])
        sums = tf.scan(lambda a, row: tf.tanh(a @ w + row), rows, parallel_iterations=1)
        sums = tf.scan(lambda a, row: tf.tanh(a @ v + row), tf.sin(sums), reverse=True)
        return tf.reduce_sum(tf.square(sums))

    return run, [w, v]


def nested() -> Built:
    """A loop in a loop, with a branch in it, and a loop in a branch."""
    w = weight(WIDTH, WIDTH)

    def inner(t: tf.Tensor) -> tf.Tensor:
        step = lambda i, s: (  # noqa: E731
            i + 1,
            tf.cond(i > 0, lambda: tf.tanh(s @ w), lambda: tf.sin(tf.cos(s))),
        )
        return tf.while_loop(lambda i, _: i < 3, step, (0, t), maximum_iterations=3)[1]

    def run(x: tf.Tensor) -> tf.Tensor:
        _, h = tf.while_loop(
            lambda i, _: i < STEPS, lambda i, t: (i + 1, inner(t) + t), (0, tf.sin(x[:, 0] @ w))
        )
        h = tf.cond(tf.reduce_sum(h) > 1e9, lambda: tf.exp(h), lambda: inner(tf.cos(h)))
        return tf.reduce_sum(tf.square(h))

    return run, [w]


def unrolled() -> Built:
    """A list that no loop makes."""
    w = weight(WIDTH, WIDTH)

    def run(x: tf.Tensor) -> tf.Tensor:
        h, rows = x[:, 0], tf.TensorArray(tf.float32, STEPS)
        for i in range(STEPS):
            h = tf.tanh(tf.cos(h @ w) + x[:, i])
            rows = rows.write(i, h)
        return tf.reduce_sum(tf.square(tf.sin(rows.stack())))

    return run, [w]


MODELS = [
    lstms,
    grus,
    seq2seq,
    masked_lstm,
    bidirectional,
    by_hand,
    until_small,
    mapped,
    scanned,
    nested,
    unrolled,
]


@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_gradients_are_the_same_when_loops_are_executed_again(build: Callable[[], Built]) -> None:
    def made(schedule: Scheduler | None, **options: Any) -> Step:
        # Anew each time: a layer's dropout goes on from seed to seed.
        keras.utils.set_random_seed(1)
        return Step(*build(), schedule, **options)

    x = normal(BATCH, STEPS, WIDTH)
    plain = made(None)(x)
    executed: Counter[str] = Counter()
    for schedule in (everything_again, random_schedule(1), random_schedule(2, 0.7)):
        step = made(schedule, chain_from=256, count_from=0)
        assert_same(plain, step(x))
        assert step.report is not None
        executed += Counter(op.type for op in step.report.clones)
    if build is not unrolled:
        assert executed["While"] + executed["StatelessWhile"] > 1


def test_whoever_holds_a_list_keeps_it_as_it_is() -> None:
    def rows(handle: tf.Tensor) -> np.ndarray:
        found: np.ndarray = raw.TensorListStack(
            input_handle=handle, element_shape=[3], element_dtype=tf.float32
        ).numpy()
        return found

    held = raw.TensorListFromTensor(tensor=normal(4, 3), element_shape=[3])
    before = rows(held)
    changed: list[Callable[[], Any]] = [
        lambda: raw.TensorListPushBack(input_handle=held, tensor=tf.ones(3)),
        lambda: raw.TensorListSetItem(input_handle=held, index=1, item=tf.ones(3)),
        lambda: raw.TensorListPopBack(
            input_handle=held, element_shape=[3], element_dtype=tf.float32
        )[0],
        lambda: raw.AddN(inputs=[held, held]),
        lambda: raw.ZerosLike(x=held),
    ]
    for change in changed:
        first, second = change(), change()
        assert not np.array_equal(rows(first), before)
        np.testing.assert_array_equal(rows(first), rows(second))
        np.testing.assert_array_equal(rows(held), before)


def loops(step: Step) -> list[bool]:
    """Of each loop of the forward pass, whether it may be executed again."""
    return [op.repeatable for op in step.graph.operations if op.forward and op.kind in LOOPS]


def traced(run: Callable[..., Any], xs: list[tf.Variable]) -> Step:
    step = Step(run, xs, Schedule.base, chain_from=256, count_from=0)
    step.function.get_concrete_function(tf.TensorSpec([BATCH, STEPS, WIDTH]))
    return step


def test_loops_with_effects_are_executed_once() -> None:
    w, count = weight(WIDTH, WIDTH), tf.Variable(0.0)
    generator = tf.random.Generator.from_seed(1)

    def loop(h: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, change(tf.tanh(t @ w))), (0, h)
        )[1]

    def counted(t: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([count.assign_add(1.0)]):
            return tf.identity(t)

    def run(change: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
        return lambda x: tf.reduce_sum(loop(tf.sin(x[:, 0]), change))

    assert loops(traced(run(tf.cos), [w])) == [True]
    assert loops(traced(run(counted), [w])) == [False]
    assert loops(traced(run(lambda t: t + tf.random.uniform([WIDTH])), [w])) == [False]
    assert loops(traced(run(lambda t: t + generator.normal([WIDTH])), [w])) == [False]
    same = tf.random.stateless_uniform
    assert loops(traced(run(lambda t: t + same([WIDTH], seed=(1, 2))), [w])) == [True]


def test_a_loop_is_not_executed_again_after_its_variable_was_changed() -> None:
    w = weight(WIDTH, WIDTH)

    def run(x: tf.Tensor, early: bool, late: bool) -> tf.Tensor:
        if early:
            w.assign_add(tf.ones([WIDTH, WIDTH]))
        h = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, tf.tanh(t @ w)), (0, x[:, 0]))
        if late:
            w.assign_sub(tf.ones([WIDTH, WIDTH]))
        return tf.reduce_sum(tf.cos(h[1]))

    assert loops(traced(lambda x: run(x, True, False), [w])) == [True]
    assert loops(traced(lambda x: run(x, False, True), [w])) == [False]

    def with_python(x: tf.Tensor) -> tf.Tensor:
        tf.py_function(lambda: None, [], [])
        return run(x, False, False)

    assert loops(traced(with_python, [w])) == [False]


def test_an_update_after_the_gradients_waits_for_executions_that_are_added() -> None:
    def trained(schedule: Callable[..., Schedule] | None) -> list[np.ndarray]:
        run, ws = by_hand()

        step = Step(run, ws, schedule, chain_from=256, count_from=0)

        def train(x: tf.Tensor) -> None:
            step.function.python_function(x)
            for w, g in zip(ws, step.gradients, strict=True):
                w.assign_sub(0.1 * g)

        function = tf.function(train, autograph=False)
        with grappler_off():
            for _ in range(3):
                function(tf.constant(normal(BATCH, STEPS, WIDTH)))
        if schedule is not None:
            assert step.report is not None
            assert any(op.type in LOOPS for op in step.report.clones)
        return [w.numpy() for w in ws]

    assert_same(trained(None), trained(everything_again))


def test_whole_steps_execute_loops_again_before_their_variables_are_updated() -> None:
    def trained(budget: float | None) -> tuple[list[np.ndarray], int]:
        keras.utils.set_random_seed(1)
        ws = [weight(WIDTH, WIDTH, seed=s) for s in range(3)]
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        variables = [keras.Variable(w.numpy()) for w in ws]
        optimizer.build(variables)

        def loss_of(x: tf.Tensor) -> tf.Tensor:
            h = x[:, 0]
            for w in variables:
                _, h = tf.while_loop(
                    lambda i, _: i < 8,
                    lambda i, t, w=w: (i + 1, tf.tanh(tf.cos(t @ w.value))),
                    (0, tf.sin(h)),
                )
            return tf.reduce_mean(tf.square(h))

        def train(x: tf.Tensor) -> tf.Tensor:
            with contextlib.ExitStack() as stack:
                if budget is not None:
                    stack.enter_context(optckpt.whole_step(budget, config=SETTINGS))
                loss = loss_of(x)
                optimizer.apply(tf.gradients(loss, [v.value for v in variables]), variables)
            return loss

        function = tf.function(train, autograph=False)
        x = tf.constant(normal(1024, STEPS, WIDTH))
        with grappler_off():
            for _ in range(3):
                function(x)
        made = function.get_concrete_function(x).graph.get_operations()
        again = [op for op in made if op.type in LOOPS and op.name.startswith("optckpt/")]
        return [v.numpy() for v in variables], len(again)

    weights, none = trained(None)
    same, again = trained(0.75)
    assert_same(weights, same)
    assert again > none == 0


@pytest.mark.parametrize("build", [lstms, by_hand], ids=lambda b: b.__name__)
def test_loops_that_are_executed_again_free_their_lists(build: Callable[[], Built]) -> None:
    run, xs = build()
    x = tf.constant(normal(8192, STEPS, WIDTH))

    def peak(budget: float | None) -> tuple[int, list[np.ndarray]]:
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            loss = run(x)
            if budget is None:
                return [loss, *tf.gradients(loss, xs)]
            return [loss, *optckpt.gradients(loss, xs, budget=budget, config=SETTINGS)]

        function = tf.function(step, autograph=False)
        with grappler_off():
            values = [t.numpy().copy() for t in function(x)]
            return used(lambda: function(x)), values

    plain, expected = peak(None)
    less, same = peak(0.7)
    assert_same(expected, same)
    assert less < 0.75 * plain
    step = Step(run, xs, random_schedule(1))
    assert_same(expected, step(x))
    with grappler_off():
        measured = used(lambda: step.function(x))
    graph = step.graph
    predicted = simulate(graph, random_schedule(1)(graph)).peak - graph.resident
    assert abs(measured - predicted) < 0.1 * predicted


def used(run: Callable[[], Any]) -> int:
    """Bytes that the device's allocator hands out at the peak, beyond what is in use before."""
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    run()
    return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)


def test_second_derivatives_through_loops_that_are_executed_again() -> None:
    w = weight(WIDTH, WIDTH)

    def run(x: tf.Tensor) -> tf.Tensor:
        h = tf.sin(x[:, 0])
        loop = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, tf.tanh(t @ w)), (0, h))
        (slope,) = tf.gradients(tf.reduce_sum(tf.square(loop[1])), h)
        return tf.reduce_sum(tf.square(slope)) + tf.reduce_sum(loop[1])

    x = normal(BATCH, STEPS, WIDTH)
    plain = Step(run, [w])(x)
    for schedule in (everything_again, random_schedule(3)):
        step = Step(run, [w], schedule, chain_from=256, count_from=0)
        assert_same(plain, step(x))
