"""Variables that are created with the step count before they have any memory of their own."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import counted, normal

import optckpt.keras
from optckpt.coming import blocks_to_come, larger_arguments
from optckpt.config import Config
from optckpt.frontends.tensorflow import capture
from optckpt.schedule import Plan
from optckpt.sizes import of_inputs, values_of_inputs
from optckpt.step import whole_step

pytestmark = [pytest.mark.usefixtures("grappler_off"), pytest.mark.fresh_process]

SIDE = 320
BYTES = 4 * SIDE * SIDE
CHUNKS = 1.03
"""The first step leaves memory cut up otherwise than it was when the step was planned."""
QUICK = Config.model_validate(
    {
        "costs": {"model": "flops"},
        "plans": {"cache": False},
        "solver": {"order": "fixed", "gap": 0.3, "time_limit": 2.0},
    }
)


def coming_of(step: Any, *tensors: tf.Tensor) -> list[int]:
    """`blocks_to_come` of the gradients of what `step` returns."""
    found: list[int] = []

    def traced(*given: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss, variables = step(*given)
        gradients = tape.gradient(loss, variables)
        graph = tf.compat.v1.get_default_graph()
        found.extend(blocks_to_come(capture(graph, [loss], gradients)))
        return loss

    tf.function(traced, autograph=False).get_concrete_function(*tensors)
    return found


def test_variables_that_share_their_memory_will_each_have_their_own() -> None:
    value = tf.zeros((SIDE, SIDE))
    changed = [tf.Variable(value) for _ in range(3)]
    constant = tf.Variable(value)
    small = [tf.Variable(value[0]) for _ in range(2)]

    def step(x: tf.Tensor) -> Any:
        for v in (*changed, *small):
            v.assign_add(tf.ones_like(v))
        return tf.reduce_sum(tf.add_n([x * v for v in (*changed, constant, small[0])])), changed

    x = counted(normal(SIDE, SIDE))
    assert coming_of(step, x) == [BYTES] * 3
    changed[0].assign(counted(normal(SIDE, SIDE)))
    assert coming_of(step, x) == [BYTES] * 2
    for v in changed:
        v.assign(counted(normal(SIDE, SIDE)))
    assert coming_of(step, x) == []


def test_variables_without_a_value_will_have_one() -> None:
    found: list[int] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        if not variables:
            variables.append(tf.Variable(lambda: tf.zeros((SIDE, SIDE))))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * variables[0])
        gradient = tape.gradient(loss, variables[0])
        found.append(sum(blocks_to_come(capture(loss.graph, [loss], [gradient]))))
        return loss

    variables: list[tf.Variable] = []
    step(counted(normal(SIDE, SIDE)))
    assert found == [BYTES, 0]


def test_a_step_that_creates_what_it_changes_is_planned_once_with_all_of_it() -> None:
    plans: list[Plan] = []
    optimizer = keras.optimizers.Adam(1e-3)
    weights: list[tf.Variable] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with whole_step(2**40, config=QUICK, on_plan=plans.append):
            if not weights:
                rng = tf.random.Generator.from_seed(0)
                value = rng.normal((SIDE, SIDE)) / SIDE
                weights.extend(tf.Variable(lambda: value) for _ in range(4))
            with tf.GradientTape() as tape:
                for w in weights:
                    x = tf.tanh(x @ w)
                loss = tf.reduce_mean(x * x)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    x = counted(normal(SIDE, SIDE))
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    step(x)
    (plan,) = plans
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    info = tf.config.experimental.get_memory_info("CPU:0")
    assert info["current"] - before >= 12 * BYTES
    assert info["peak"] <= CHUNKS * plan.predicted_peak


class TwoOptimizers(keras.Model):
    """A model with a training step and optimizers of its own; Keras' default one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = [
            keras.Sequential([keras.layers.Dense(SIDE, "gelu") for _ in range(3)]) for _ in range(2)
        ]

    def compile(self, *optimizers: Any) -> None:
        super().compile()
        self.own = optimizers

    def call(self, x: Any) -> Any:
        return self.halves[1](self.halves[0](x))

    def train_step(self, data: Any) -> Any:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            middle = self.halves[0](x)
            ends = [tf.reduce_mean(middle**2), tf.reduce_mean((self.halves[1](middle) - x) ** 2)]
        for half, optimizer, loss in zip(self.halves, self.own, ends, strict=True):
            weights = half.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": ends[1]}


@pytest.mark.parametrize("built", [False, True])
def test_a_model_with_optimizers_of_its_own(built: bool) -> None:
    def trained(budget: int | None) -> tuple[Any, list[np.ndarray], int]:
        keras.utils.set_random_seed(1)
        model = TwoOptimizers()
        model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.1, momentum=0.9))
        if built:
            model(x[:1])
        if budget is not None:
            optckpt.keras.apply(model, budget, config=QUICK)
        peaks = []
        for _ in range(3):
            tf.config.experimental.reset_memory_stats("CPU:0")
            model.train_on_batch(x)
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        variables = [*model.variables, *(v for o in model.own for v in o.variables)]
        return model, [v.numpy() for v in variables], max(peaks[1:])

    def in_use() -> int:
        keras.backend.clear_session()
        gc.collect()
        return int(tf.config.experimental.get_memory_info("CPU:0")["current"])

    x = normal(4 * SIDE, SIDE)
    begin = in_use()
    model, expected, peak = trained(None)
    del model
    plain = peak - begin
    budget = in_use() + round(0.85 * plain)
    model, got, peak = trained(budget)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    plan = optckpt.keras.plan(model)
    assert peak <= CHUNKS * budget
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    assert not model.optimizer.built


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_in_a_loop_counts_what_the_loop_holds(rows: int) -> None:
    weights = [tf.Variable(normal(SIDE, SIDE) / SIDE) for _ in range(6)]
    plans: list[Plan] = []

    @tf.function
    def steps(xs: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for x in xs:
            with whole_step(2**40, config=QUICK, on_plan=plans.append):
                with tf.GradientTape() as tape:
                    for w in weights:
                        x = tf.tanh(x @ w)
                    loss = tf.reduce_mean(x * x)
                for w, g in zip(weights, tape.gradient(loss, weights)):  # noqa: B905
                    w.assign_sub(g)
            total += loss
        return total

    xs = tf.stack([counted(normal(SIDE, SIDE))] * rows)
    steps(xs)
    tf.config.experimental.reset_memory_stats("CPU:0")
    steps(xs)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    (plan,) = plans
    assert peak <= CHUNKS * plan.predicted_peak


def test_what_a_loop_carries_and_what_it_takes_from_outside_will_be_there() -> None:
    found: list[int] = []
    weight = tf.Variable(normal(SIDE, SIDE))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        outside = tf.tanh(x)

        def body(i: tf.Tensor, carried: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            loss = tf.reduce_sum(tf.tanh(carried * weight) + outside + x)
            (gradient,) = tf.gradients(loss, weight)
            found.extend(blocks_to_come(capture(loss.graph, [loss], [gradient])))
            return i + 1, carried + gradient

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    step(counted(normal(SIDE, SIDE)))
    assert found == [BYTES] * 2


def test_arguments_that_will_be_larger() -> None:
    weights = tf.Variable(tf.ones((SIDE, SIDE)))
    found: list[Any] = []

    @tf.function(reduce_retracing=True, autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weights) * y))
        graph = tf.compat.v1.get_default_graph()
        settings = Config.model_validate({})
        sizes = {"shapes": of_inputs(graph, settings), "values": values_of_inputs(graph)}
        captured = capture(graph, [loss], tf.gradients(loss, [weights]), **sizes)
        found.append(larger_arguments(captured))
        return loss

    for rows in (SIDE, SIDE - 20, SIDE - 40):
        step(tf.ones((rows, SIDE)), tf.ones((rows, 1)))
    # Traced for the first call, and for the second with any number of rows.
    smaller = 4 * (SIDE - 20) * SIDE
    assert found == [(), ((BYTES, smaller),)]
