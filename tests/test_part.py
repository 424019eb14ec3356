"""A budget for a part: same values and gradients, fewer bytes kept."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from part_support import QUICK, X, gradients_of, repeats, same, stack, weights

import optckpt
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, InfeasibleBudgetError

pytestmark = pytest.mark.usefixtures("grappler_off")


@pytest.mark.parametrize("graph", [False, True])
class TestValues:
    def test_same_values_and_gradients(self, graph):
        ws = weights()
        plans = []
        block = optckpt.budgeted("70%", config=QUICK, on_plan=plans.append)(lambda x: stack(x, ws))
        for _ in range(2):
            same(
                gradients_of(block, X, ws, graph),
                gradients_of(tf.function(lambda x: stack(x, ws)), X, ws, graph),
            )
        (plan,) = plans if not graph else plans[:1]
        assert repeats(plan) > 0
        assert plan.predicted_peak <= plan.budget < plan.plain_peak

    def test_several_arguments_and_results(self, graph):
        ws = weights(4)
        other = tf.Variable(tf.ones((64,)), trainable=False)

        def fn(x, pair, scale, *, power=1):
            first = stack(x * pair["a"], ws) * scale + other
            return {"y": first**power, "n": tf.argmax(first, 1), "z": (pair["a"] * 2.0,)}

        def network(fn):
            def step(x, a):
                with tf.GradientTape() as tape:
                    tape.watch([x, a])
                    out = fn(x, {"a": a}, 0.5, power=2)
                    loss = tf.reduce_sum(out["y"]) + tf.reduce_sum(out["z"][0])
                return out, tape.gradient(loss, [x, a, *ws])

            return tf.function(step) if graph else step

        a = tf.constant(np.linspace(0.5, 1, 64), tf.float32)
        part = optckpt.budgeted("80%", config=QUICK)(fn)
        got = network(part)(X, a)
        same(got, network(tf.function(fn))(X, a))
        assert set(got[0]) == {"y", "n", "z"}

    def test_a_mask_is_drawn_once(self, graph):
        ws = weights(6)
        masks = tf.Variable(tf.zeros_like(X))
        count = tf.Variable(0)

        def fn(x):
            count.assign_add(1)
            for w in ws[:3]:
                x = tf.tanh(x @ w)
            mask = tf.cast(tf.random.uniform(x.shape) > 0.5, tf.float32)
            masks.assign(mask)
            x = x * mask
            for w in ws[3:]:
                x = tf.sin(x @ w) * x
            return x

        def fixed(x):
            for w in ws[:3]:
                x = tf.tanh(x @ w)
            x = x * masks
            for w in ws[3:]:
                x = tf.sin(x @ w) * x
            return x

        block = optckpt.budgeted("75%", config=QUICK)(fn)
        got = gradients_of(block, X, ws, graph)
        same(got, gradients_of(tf.function(fixed), X, ws, graph))
        assert count.numpy() == 1

    def test_dropout_and_moving_averages_of_keras(self, graph):
        def make():
            keras.utils.set_random_seed(3)
            block = keras.Sequential([keras.Input((64,))])
            for _ in range(4):
                block.add(keras.layers.Dense(64, activation="tanh"))
                block.add(keras.layers.BatchNormalization())
                block.add(keras.layers.Dropout(0.2))
            return block

        plain, mine = make(), make()
        sources = [v.value for v in plain.trainable_variables]
        part = optckpt.budgeted("80%", config=QUICK)(lambda x: mine(x, training=True))
        for _ in range(2):
            same(
                gradients_of(part, X, [v.value for v in mine.trainable_variables], graph),
                gradients_of(lambda x: plain(x, training=True), X, sources, True),
            )
            same([v.value for v in mine.variables], [v.value for v in plain.variables])

    def test_embedding(self, graph):
        table = tf.Variable(tf.random.stateless_normal((50, 64), (1, 2)))
        ws = weights(4)
        ids = tf.constant(np.arange(4096) % 50)

        def network(fn):
            def step(ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(fn(ids))
                return loss, tape.gradient(loss, [table, *ws])

            return (tf.function(step) if graph else step)(ids)

        def fn(ids):
            return stack(tf.gather(table, ids), ws)

        loss, grads = network(optckpt.budgeted("90%", config=QUICK)(fn))
        assert isinstance(grads[0], tf.IndexedSlices)
        same((loss, grads), network(tf.function(fn)))


@pytest.mark.fresh_process
class TestMemory:
    def test_what_it_keeps_and_needs(self):
        ws = weights(12)
        plans = []

        def fn(x):
            return stack(x, ws)

        def measured(block):
            """Bytes kept between forward and backward pass, and peak, beside what is there."""
            info = tf.config.experimental.get_memory_info
            kept = peak = 0
            for _ in range(2):
                start = info("CPU:0")["current"]
                with tf.GradientTape() as tape:
                    y = block(X)
                kept = info("CPU:0")["current"] - start
                tf.config.experimental.reset_memory_stats("CPU:0")
                tape.gradient(y, ws, output_gradients=y)
                peak = info("CPU:0")["peak"] - start
                del y, tape
            return kept, peak

        part = optckpt.budgeted("50%", config=QUICK, on_plan=plans.append)(fn)
        kept, peak = measured(part)
        plain_kept, _ = measured(tf.function(fn))
        (plan,) = plans
        assert kept < plain_kept / 2
        # The budget counts the argument as well, which is there before.
        assert peak + X.shape[0] * X.shape[1] * 4 <= plan.budget

    def test_a_budget_that_needs_few_tensors_kept_in_between(self):
        """The solver alone keeps too many for it, and proves that no schedule needs much less."""
        ws = weights(20)
        plans = []
        quick = Config.model_validate(
            {"costs": {"model": "flops"}, "solver": {"gap": 0.05, "time_limit": 1.0}}
        )
        block = optckpt.budgeted("30%", config=quick, on_plan=plans.append)(lambda x: stack(x, ws))
        same(
            gradients_of(block, X, ws, False),
            gradients_of(tf.function(lambda x: stack(x, ws)), X, ws, False),
        )
        assert plans[0].predicted_peak <= plans[0].budget

    def test_one_plan_per_signature(self):
        ws = weights(4)
        plans = []
        block = optckpt.budgeted("90%", config=QUICK, on_plan=plans.append)(
            lambda x, n: stack(x, ws[: int(n * 2)])
        )
        for args in ((X, 1), (X, 1), (X[:2048], 1), (X, 1.0), (X, 2), (X.numpy(), 2)):
            block(*args)
        assert len(plans) == 4

    def test_in_a_step_with_a_budget(self):
        ws = weights(8)
        plans = []
        block = optckpt.budgeted("80%", config=QUICK)(lambda x: stack(x, ws[:4]))

        def step(fn, gradients):
            return lambda x: gradients(tf.reduce_mean(stack(fn(x), ws[4:])), ws)

        def mine(ys, xs):
            return optckpt.gradients(ys, xs, budget="90%", config=QUICK, on_plan=plans.append)

        got = tf.function(step(block, mine))(X)
        same(got, tf.function(step(lambda x: stack(x, ws[:4]), tf.gradients))(X))
        assert len(plans) == 1


class TestKeras:
    def test_call_of_a_layer_in_a_model_of_any_batch_size(self):
        plans = []

        def model(decorate):
            class Block(keras.layers.Layer):
                def build(self, shape):
                    self.dense = [keras.layers.Dense(64, activation="gelu") for _ in range(6)]
                    for layer in self.dense:
                        layer.build(shape)

                def call(self, x):
                    for layer in self.dense:
                        x = layer(x)
                    return x

            Block.call = decorate(Block.call)
            keras.utils.set_random_seed(0)
            made = keras.Sequential([keras.Input((64,)), Block(), keras.layers.Dense(1)])
            made.compile("sgd", "mse")
            return made

        plain = model(lambda call: call)
        mine = model(optckpt.budgeted("80%", config=QUICK, on_plan=plans.append))
        assert mine.output_shape == plain.output_shape == (None, 1)
        assert not plans
        y = X[:, :1]
        for m in (plain, mine):
            m.fit(tf.data.Dataset.from_tensors((X, y)), verbose=0)
        assert plans
        assert all(repeats(plan) > 0 for plan in plans)
        same([v.value for v in mine.variables], [v.value for v in plain.variables])


class TestUnknownSizes:
    """A part in a function of any batch size; see also `TestKeras`."""

    ROWS, WIDTH = X.shape

    @pytest.mark.parametrize("said", ["call", "elements", "inputs", "batch", "config"])
    def test_planned_at_the_sizes_of_the_step(self, said):
        sizes = {"batch": {"batch": self.ROWS}, "config": {"inputs": {"x": [self.ROWS, 64]}}}
        config = QUICK.model_copy(update={"sizes": QUICK.sizes.model_validate(sizes.get(said, {}))})
        at = {
            "elements": lambda: optckpt.sizes.at([self.ROWS, 64]),
            "inputs": lambda: optckpt.sizes.at(inputs={"x": [self.ROWS, 64]}),
        }.get(said, contextlib.nullcontext)
        ws = weights(6)
        plans = []

        # The result is of another size than the argument.
        def network(x):
            y = stack(x, ws)
            return tf.concat([y, y[:, :32]], 1)

        def step(fn):
            def run(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(fn(x) ** 2)
                return loss, tape.gradient(loss, ws)

            return tf.function(run, input_signature=[tf.TensorSpec([None, 64], name="x")])

        part = optckpt.budgeted("80%", config=config, on_plan=plans.append)(network)
        mine, plain = step(part), step(tf.function(network))
        first = X if said == "call" else X[:100]
        with at():
            same(mine(first), plain(first))
        for rows in (X, X[:7]):
            same(mine(rows), plain(rows))
        known = []
        tf.function(
            optckpt.budgeted("80%", config=QUICK, on_plan=known.append)(network)
        ).get_concrete_function(X)
        assert repeats(plans[0]) > 0
        assert plans[0].plain_peak == known[0].plain_peak


class TestRefusals:
    def test_arguments(self):
        with pytest.raises(BudgetError, match="lots"):
            optckpt.budgeted("lots")

    def test_no_tensors(self):
        block = optckpt.budgeted("80%", config=QUICK)(lambda x: (x, "text"))
        with pytest.raises(CaptureError, match=r"must return tensors.*returned a str"):
            block(X)
        with pytest.raises(CaptureError, match=r"takes tensors.*RaggedTensor"):
            block(tf.ragged.constant([[1.0], [2.0, 3.0]]))

    def test_tensor_of_the_function_around_it(self):
        @tf.function
        def step(x):
            y = tf.sin(x)
            block = optckpt.budgeted("80%", config=QUICK)(lambda x: x * y)
            return tf.gradients(block(x), x)

        with pytest.raises(CaptureError, match=r"to which no gradient would flow: pass it as"):
            step(X)

    def test_budget_that_cannot_be_met(self):
        ws = weights(2)
        block = optckpt.budgeted(1000, config=QUICK)(lambda x: stack(x, ws))
        with pytest.raises(InfeasibleBudgetError, match=r"no schedule fits its budget of 1000 B"):
            block(X)
