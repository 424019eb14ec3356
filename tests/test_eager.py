"""value_and_gradients: training steps from eager code, whole steps under the budget."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, InfeasibleBudgetError, OptckptError

pytestmark = pytest.mark.usefixtures("grappler_off")

FLOPS = Config.model_validate({"costs": {"model": "flops"}})
X = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)


def weights(layers: int = 8) -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.normal(size=(64, 64)).astype(np.float32) / 8, name=f"w{i}")
        for i in range(layers)
    ]


def mlp(x, ws):
    for w in ws:
        x = tf.tanh(x @ w) * 1.5
    return tf.reduce_mean(x * x)


def plain(fn, variables, *args):
    """(value, gradients), as TensorFlow computes them in a tf.function."""

    @tf.function
    def step(*args):
        with tf.GradientTape() as tape:
            tape.watch([v if callable(v.value) else v.value for v in tf.nest.flatten(variables)])
            value = fn(*args)
        return value, tape.gradient(value, variables)

    return step(*args)


def same(got, expected) -> None:
    got, expected = tf.nest.flatten(got, True), tf.nest.flatten(expected, True)
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def repeats(plan) -> int:
    return len(plan.schedule) - len(set(plan.schedule.executions))


def peak_of(step, *args) -> int:
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(*args)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


class TestValueAndGradients:
    def test_same_as_plain_within_the_budget(self):
        ws = weights()
        x = tf.constant(X)
        step = optckpt.value_and_gradients(lambda x: mlp(x, ws), ws, "70%", config=FLOPS)
        got = step(x)
        assert isinstance(got[1], list)
        same(got, plain(lambda x: mlp(x, ws), ws, x))
        plan = step.last_plan
        assert repeats(plan) > 0
        assert plan.budget < plan.plain_peak
        del got
        assert 0 < peak_of(step, x) <= plan.budget

    def test_a_share_is_as_many_bytes_for_a_smaller_batch(self):
        ws = weights()
        step = optckpt.value_and_gradients(lambda x: mlp(x, ws), ws, "70%", config=FLOPS)
        for n in (len(X), len(X) // 2, 2):
            step(tf.constant(X[:n]))
        large, half, two = step.plans.values()
        assert large.budget == half.budget == two.budget < large.plain_peak
        assert two.plain_peak < two.budget
        # What is larger is planned for its own share.
        step(tf.concat([X, X], 0))
        assert step.last_plan.budget > large.budget

    def test_nested_variables_of_both_kinds(self):
        ws = weights()
        own = keras.Variable(ws[0].numpy(), name="own")
        variables = {"first": own, "rest": [ws[1], tuple(ws[2:])]}
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, [own, *ws[1:]]), variables, "75%", config=FLOPS
        )
        value, grads = step(X)
        assert set(grads) == {"first", "rest"}
        assert isinstance(grads["rest"][1], tuple)
        same((value, grads), plain(lambda x: mlp(x, [own, *ws[1:]]), variables, tf.constant(X)))

    def test_aux_none_gradients_and_indexed_slices(self):
        ws = weights(4)
        table = tf.Variable(tf.random.stateless_normal((50, 64), (1, 2)))
        unused = tf.Variable(1.0)

        def fn(ids, scale):
            y = tf.gather(table, ids)
            return mlp(y, ws) * scale, {"mean": tf.reduce_mean(y), "name": "a"}

        step = optckpt.value_and_gradients(fn, [table, unused], "90%", has_aux=True, config=FLOPS)
        ids = np.arange(4096) % 50
        (value, aux), grads = step(ids, scale=0.5)
        assert grads[1] is None
        assert isinstance(grads[0], tf.IndexedSlices)
        assert aux["mean"].shape == ()
        same(
            (value, grads[0]),
            plain(lambda ids: fn(ids, 0.5)[0], [table], tf.constant(ids)),
        )

    def test_one_plan_per_signature(self):
        ws = weights(4)
        traced = []

        def fn(x, training):
            traced.append(training)
            return mlp(x, ws if training else ws[:2])

        step = optckpt.value_and_gradients(fn, ws, "80%", config=FLOPS)
        step(X, True)
        first = step.last_plan
        step(X, True)
        step(X[:2048], True)
        step(X, training=False)
        assert traced == [True, True, False]
        assert list(step.plans) == [
            "float32[4096, 64], True",
            "float32[2048, 64], True",
            "float32[4096, 64], training=False",
        ]
        assert len({p.fingerprint for p in step.plans.values()}) == 3
        step(X, True)
        assert step.last_plan == first
        assert len(traced) == 3

    def test_python_control_flow_and_tf_functions(self):
        ws = weights(4)

        @tf.function
        def fn(x):
            if tf.reduce_sum(x) > 0:
                x = -x
            return mlp(x, ws)

        step = optckpt.value_and_gradients(fn, ws, "80%", config=FLOPS)
        same(step(X), plain(fn.python_function, ws, tf.constant(X)))
        # The function's own operations are planned, not one call of it.
        assert len(step.last_plan.schedule) > 8

        unconverted = optckpt.value_and_gradients(fn, ws, "80%", autograph=False, config=FLOPS)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            unconverted(X)

    def test_a_saved_plan_and_on_plan(self, tmp_path):
        ws = weights()
        plans = []
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, "75%", config=FLOPS, on_plan=plans.append
        )
        step(X)
        assert plans == [step.last_plan] == [optckpt.last_plan()]
        plans[0].save(tmp_path / "p.json")
        again = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, plan=tmp_path / "p.json", config=FLOPS
        )
        again(X)
        assert again.last_plan.schedule == plans[0].schedule

    def test_nothing_to_differentiate_is_said(self, caplog):
        ws = weights(1)
        step = optckpt.value_and_gradients(lambda x: tf.reduce_sum(x), ws, "80%", config=FLOPS)
        with caplog.at_level(logging.WARNING, "optckpt"):
            _, grads = step(X)
        assert grads == [None]
        assert "nothing was planned" in caplog.text
        with pytest.raises(OptckptError, match="no plan yet"):
            _ = step.last_plan


def trained(optimizer, budget, *, layers=8, steps=4, **options):
    """Values of some steps and the weights and slots after them, plain for None."""
    ws = weights(layers)

    def fn(x):
        return mlp(x, ws)

    if budget is None:

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                value = fn(x)
                loss = optimizer.scale_loss(value)
            grads = tape.gradient(loss, ws)
            optimizer.apply_gradients(zip(grads, ws, strict=True))
            return value, grads

        optimizer.build(ws)
        return [step(tf.constant(X))[0] for _ in range(steps)], ws, optimizer.variables
    step = optckpt.value_and_gradients(fn, ws, budget, optimizer=optimizer, config=FLOPS, **options)
    values = []
    for _ in range(steps):
        value, grads = step(X)
        assert grads is None
        values.append(value)
    return values, ws, optimizer.variables, step


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd, clipped by the global norm": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.01
    ),
    "adamw, moving average": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "accumulated gradients": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_whole_step_trains_as_without(self, name):
        expected = trained(OPTIMIZERS[name](), None)
        values, ws, slots, step = trained(OPTIMIZERS[name](), "75%", calibrate=True)
        same(values, expected[0])
        same(ws, expected[1])
        same(slots, expected[2])
        plan = step.last_plan
        assert repeats(plan) > 0
        del values
        assert 0 < peak_of(step, tf.constant(X)) <= plan.budget

    def test_slots_are_there_before_the_plan(self):
        ws = [tf.Variable(tf.random.stateless_normal((512, 512), (1, i))) for i in range(4)]
        adam = keras.optimizers.Adam()
        x = np.ones((32, 512), np.float32)
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, 1 << 30, optimizer=adam, config=FLOPS
        )
        step(x)
        assert step.last_plan.floor >= 3 * 4 * 4 * 512 * 512

    def test_gradients_can_be_had_as_well(self):
        ws = weights()
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws),
            ws,
            "75%",
            optimizer=keras.optimizers.SGD(0.0),
            return_gradients=True,
            config=FLOPS,
        )
        same(step(X), plain(lambda x: mlp(x, ws), ws, tf.constant(X)))

    def test_update_of_ones_own(self):
        ws = weights()
        adam = keras.optimizers.Adam(0.01)
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, "75%", optimizer=adam, update=False, config=FLOPS
        )
        before = ws[0].numpy()
        _, grads = step(X)
        assert adam.built
        np.testing.assert_array_equal(ws[0], before)
        adam.apply_gradients(zip(grads, ws, strict=True))
        assert not np.array_equal(ws[0], before)

    def test_any_object_with_apply_gradients(self):
        class Plain:
            def apply_gradients(self, pairs):
                for g, v in pairs:
                    v.assign_sub(0.1 * g)

        ws = weights()
        _, grads = plain(lambda x: mlp(x, ws), ws, tf.constant(X))
        expected = [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, "75%", optimizer=Plain(), config=FLOPS
        )
        step(X)
        for w, e in zip(ws, expected, strict=True):
            np.testing.assert_allclose(w, e, rtol=1e-6)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"fn": 3}, OptckptError, "fn must be a function .* got int"),
            ({"variables": []}, OptckptError, "variables is empty: build the model"),
            ({"variables": [tf.constant(1.0)]}, OptckptError, r"variables takes tf\.Variables"),
            ({"optimizer": "adam"}, OptckptError, "optimizer= takes .* got str"),
            ({"budget": "lots"}, BudgetError, "lots"),
            ({"max_overhead": 0.1}, BudgetError, "either a budget or max_overhead"),
            ({"fn": tf.function(mlp, jit_compile=True)}, CaptureError, "mlp.*compiled by XLA"),
        ],
    )
    def test_arguments(self, arguments, error, text):
        given = {"fn": mlp, "variables": weights(1), "budget": "80%"} | arguments
        with pytest.raises(error, match=text):
            optckpt.value_and_gradients(**given)

    def test_inside_a_tf_function(self):
        ws = weights(1)
        step = optckpt.value_and_gradients(lambda x: mlp(x, ws), ws, "80%", config=FLOPS)
        with pytest.raises(CaptureError, match=r"for eager code: inside a tf\.function use"):
            tf.function(lambda: step(X))()

    def test_functions_run_eagerly(self):
        ws = weights(1)
        step = optckpt.value_and_gradients(lambda x: mlp(x, ws), ws, "80%", config=FLOPS)
        tf.config.run_functions_eagerly(True)
        try:
            with pytest.raises(CaptureError, match="run_functions_eagerly"):
                step(X)
        finally:
            tf.config.run_functions_eagerly(False)

    def test_no_pair(self):
        ws = weights(1)
        step = optckpt.value_and_gradients(
            lambda x: mlp(x, ws), ws, "80%", has_aux=True, config=FLOPS
        )
        with pytest.raises(OptckptError, match=r"has_aux=True: fn must return \(value, aux\)"):
            step(X)

    def test_budget_that_cannot_be_met(self):
        ws = weights(2)
        step = optckpt.value_and_gradients(lambda x: mlp(x, ws), ws, 1000, config=FLOPS)
        with pytest.raises(InfeasibleBudgetError, match="no schedule fits"):
            step(X)
