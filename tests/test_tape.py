"""The tape: tf.GradientTape's interface, within a budget."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, OptckptError

pytestmark = pytest.mark.usefixtures("grappler_off")

FLOPS = Config.model_validate({"costs": {"model": "flops"}, "memory": {"margin": 0.0}})
X = tf.constant(np.random.default_rng(0).normal(size=(8192, 64)).astype(np.float32))


def weights(layers: int = 8) -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.normal(size=(64, 64)).astype(np.float32) / 8, name=f"w{i}")
        for i in range(layers)
    ]


def mlp(x, ws):
    for w in ws:
        x = tf.tanh(x @ w) * 1.5
    return tf.reduce_sum(x * x)


def tape_of(budget, **kwargs):
    """A function that makes tapes: TensorFlow's for None."""
    if budget is None:
        return lambda **more: tf.GradientTape(**more)
    return lambda **more: optckpt.GradientTape(budget, config=FLOPS, **kwargs, **more)


def both(step, budget="75%", *, repeats=True):
    """Run `step(tape factory)` plain and within `budget`: the results are equal in every bit."""
    plans = []
    expected = tf.function(step)(tape_of(None))
    got = tf.function(step)(tape_of(budget, on_plan=plans.append))
    got, expected = tf.nest.flatten(got, True), tf.nest.flatten(expected, True)
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert plans
    for plan in plans:
        assert plan.predicted_peak <= plan.budget
    if repeats:
        assert any(len(p.schedule) > len(set(p.schedule.executions)) for p in plans)
    return plans


class TestInterface:
    def test_gradient_of_variables_in_a_structure(self):
        ws = weights()

        def step(tape):
            with tape() as t:
                loss = mlp(X, ws)
            assert [v.name for v in t.watched_variables()] == [w.name for w in ws]
            grads = t.gradient(loss, {"first": ws[0], "rest": ws[1:]})
            assert set(grads) == {"first", "rest"}
            return loss, grads

        assert len(both(step)) == 1

    @pytest.mark.fresh_process
    def test_peak_of_the_allocator(self):
        ws = weights(12)
        x = tf.random.stateless_normal((16384, 64), (1, 2))
        plans = []

        @tf.function
        def step(x):
            with optckpt.GradientTape("50%", config=FLOPS, on_plan=plans.append) as tape:
                loss = mlp(x, ws)
            return tape.gradient(loss, ws)

        step(x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(x)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        assert plans[0].budget < plans[0].plain_peak
        assert 0 < peak <= plans[0].budget

    def test_watch_without_variables(self):
        ws = weights()

        def step(tape):
            x = tf.identity(X)
            with tape(watch_accessed_variables=False) as t:
                t.watch(x)
                loss = mlp(x, ws)
            assert t.watched_variables() == ()
            return t.gradient(loss, x)

        both(step)

    def test_stop_recording_and_reset(self):
        ws = weights()

        def step(tape):
            with tape() as t:
                mlp(X, ws[:2])
                t.reset()
                a = tf.tanh(X @ ws[0])
                with t.stop_recording():
                    b = tf.tanh(X @ ws[1])
                loss = mlp(a + b, ws[2:])
            grads = t.gradient(loss, ws)
            assert grads[1] is None
            return [g for g in grads if g is not None]

        both(step)

    def test_output_gradients_and_several_targets(self):
        ws = weights()

        def step(tape):
            with tape() as t:
                a = tf.tanh(X @ ws[0])
                b = a
                for w in ws[1:]:
                    b = tf.tanh(b @ w) * 1.5
            return t.gradient([a, b], ws, output_gradients=[tf.ones_like(a) * 3, b * 0.5])

        both(step)

    def test_none_and_zero_for_the_unconnected(self):
        ws = weights()
        other = tf.Variable(tf.ones((3, 2)))

        def step(tape, kind):
            with tape() as t:
                loss = mlp(X, ws)
            return t.gradient(loss, [ws[0], other], unconnected_gradients=kind)

        def with_none(tape):
            grads = step(tape, tf.UnconnectedGradients.NONE)
            assert grads[1] is None
            return grads[0]

        both(with_none)
        both(lambda tape: step(tape, tf.UnconnectedGradients.ZERO))

    def test_nothing_connected(self):
        other = tf.Variable(1.0)

        @tf.function
        def step():
            with optckpt.GradientTape(10, config=FLOPS) as tape:
                loss = tf.reduce_sum(X)
            assert tape.gradient(loss, [other]) == [None]
            return loss

        step()

    def test_indexed_slices(self):
        table = tf.Variable(tf.random.stateless_normal((100, 64), (1, 2)))
        ws = weights()
        ids = tf.constant(np.arange(8192) % 7)

        def step(tape):
            with tape() as t:
                loss = mlp(tf.gather(table, ids), ws)
            grad = t.gradient(loss, table)
            assert isinstance(grad, tf.IndexedSlices)
            return grad

        both(step)

    def test_used_up_like_tensorflows(self):
        ws = weights(2)

        @tf.function
        def step():
            with optckpt.GradientTape("90%", config=FLOPS) as tape:
                loss = mlp(X, ws)
            grads = tape.gradient(loss, ws)
            with pytest.raises(RuntimeError, match="non-persistent"):
                tape.gradient(loss, ws)
            return grads

        step()

    def test_signatures_follow_tensorflows(self):
        assert inspect.signature(optckpt.GradientTape.gradient).parameters.keys() == (
            inspect.signature(tf.GradientTape.gradient).parameters.keys()
        )
        assert issubclass(optckpt.GradientTape, tf.GradientTape)


class TestSeveral:
    def test_persistent_tape_gives_two_gradients(self):
        ws = weights()

        def step(tape):
            with tape(persistent=True) as t:
                a = mlp(X, ws)
                b = tf.reduce_mean(tf.sin(X @ ws[0]) * a)
            first = t.gradient(a, ws)
            second = t.gradient(b, ws)
            return first, second

        assert len(both(step, "85%")) == 2

    def test_two_tapes_over_one_forward(self):
        ws, vs = weights(), weights(4)

        def step(tape):
            with tape() as t, tape() as s:
                y = tf.tanh(X @ ws[0])
                a, b = mlp(y, ws[1:]), mlp(y, vs)
            return t.gradient(a, ws), s.gradient(b, vs)

        assert len(both(step, "85%")) == 2

    @pytest.mark.parametrize("inner_is_ours", [False, True])
    def test_gradient_penalty(self, inner_is_ours):
        ws = weights(4)

        def step(tape):
            x = tf.identity(X)
            with tape() as outer:
                with (tape if inner_is_ours else tf.GradientTape)() as inner:
                    inner.watch(x)
                    out = mlp(x, ws)
                slope = inner.gradient(out, x)
                loss = out + tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
            return loss, outer.gradient(loss, ws)

        both(step, "85%", repeats=not inner_is_ours)

    def test_in_a_whole_step_it_plans_nothing_of_its_own(self):
        ws = weights()
        plans, own = [], []

        @tf.function
        def step():
            with optckpt.whole_step("80%", config=FLOPS, on_plan=plans.append) as whole:
                with optckpt.GradientTape(1, on_plan=own.append) as tape:
                    loss = mlp(X, ws)
                grads = tape.gradient(loss, ws)
                whole.keep(grads)
            return grads

        plain = tf.function(lambda: tf.gradients(mlp(X, ws), ws))
        for a, b in zip(step(), plain(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert len(plans) == 1
        assert not own


class TestRefusals:
    def test_eager_mode(self):
        with pytest.raises(CaptureError, match=r"eager mode.*tf\.function.*value_and_gradients"):
            optckpt.GradientTape("80%")

    @pytest.mark.parametrize("name", ["jacobian", "batch_jacobian"])
    def test_jacobians(self, name):
        @tf.function
        def step(x):
            with optckpt.GradientTape("80%", config=FLOPS) as tape:
                tape.watch(x)
                y = tf.sin(x)
            return getattr(tape, name)(y, x)

        with pytest.raises(CaptureError, match=rf"GradientTape\.{name} is not planned"):
            step(tf.ones((2, 3)))

    def test_arguments_are_checked_at_once(self):
        with pytest.raises(BudgetError, match="lots"):
            optckpt.GradientTape("lots")
        with pytest.raises(OptckptError, match="unknown strategy"):
            optckpt.GradientTape("80%", strategy="nonsense")
        with pytest.raises(BudgetError, match="either a budget or max_overhead"):
            optckpt.GradientTape("80%", max_overhead=0.1)
