"""Keras: models train within a budget as they train without one."""

from __future__ import annotations

import gc
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, InfeasibleBudgetError, OptckptError

pytestmark = [
    pytest.mark.usefixtures("grappler_off"),
    pytest.mark.filterwarnings("ignore:.*shuffle=True.*"),
]

QUICK = Config.model_validate(
    {
        "costs": {"model": "flops"},
        "solver": {"order": "fixed", "repeat": "forward", "gap": 0.5, "time_limit": 5.0},
    }
)
BATCH = 4096
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2 * BATCH, 64)).astype(np.float32)
Y = RNG.normal(size=(2 * BATCH, 1)).astype(np.float32)


def data(*parts, batch=BATCH):
    """A data set whose batches have known sizes."""
    return tf.data.Dataset.from_tensor_slices(parts or (X, Y)).batch(batch, drop_remainder=True)


def layers(x, *, count=4, dropout=0.1):
    for _ in range(count):
        x = keras.layers.Dense(64, activation="tanh")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Dropout(dropout)(x)
    return x


def mlp(**options):
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(1)(layers(inputs, **options)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def state(model):
    found = [*model.weights, *model.optimizer.variables]
    return [v.numpy() for v in found]


class Peaks(keras.callbacks.Callback):
    """The highest peak of the allocator in a training step."""

    def __init__(self):
        super().__init__()
        self.highest = 0

    def on_train_batch_begin(self, batch, logs=None):
        tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        self.highest = max(self.highest, peak)


def repeats(plan) -> int:
    return len(plan.schedule) - len(set(plan.schedule.executions))


def made(make):
    keras.utils.set_random_seed(1)
    return make()


def fitted(make, fit, budget=None, **options):
    """History and state of a model after training, plain for no budget."""
    gc.collect()
    model = made(make)
    if budget is not None:
        assert optckpt.keras.apply(model, budget, config=QUICK, **options) is model
    keras.utils.set_random_seed(2)
    return model, fit(model).history, state(model)


def both(make=mlp, fit=None, budget="75%", **options):
    """Train plain and within a budget: the same losses, metrics, weights and slots, bit by bit."""
    fit = fit or (lambda model: model.fit(data(), epochs=2, verbose=0))
    _, history, expected = fitted(make, fit)
    model, got_history, got = fitted(make, fit, budget, **options)
    assert got_history == history
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    plan = optckpt.keras.plan(model)
    assert repeats(plan) > 0
    assert plan.predicted_peak <= plan.budget < plan.plain_peak
    return model


class TestFit:
    def test_same_training_within_the_budget(self):
        model = both()
        plan = optckpt.keras.plan(model)
        peaks = Peaks()
        model.fit(data(), epochs=2, verbose=0, callbacks=[peaks])
        assert optckpt.keras.plans(model) == {"float32[4096, 64], float32[4096, 1]": plan}
        assert 0 < peaks.highest <= plan.budget

    def test_steps_peak_as_predicted_with_batches_fetched_in_advance(self):
        layers = keras.layers
        blocks = [
            layer
            for _ in range(6)
            for layer in (layers.Conv2D(24, 3, padding="same"), layers.BatchNormalization())
        ]
        ends = keras.Input((48, 48, 3)), layers.GlobalAveragePooling2D(), layers.Dense(1)
        model = keras.Sequential([ends[0], *blocks, *ends[1:]])
        model.compile("adam", "mse")
        x = RNG.normal(size=(192, 48, 48, 3)).astype(np.float32)
        peaks = Peaks()
        optckpt.keras.apply(model, "60%", config=QUICK)
        model.fit(x, x[:, 0, 0, 0], batch_size=64, verbose=0, callbacks=[peaks])
        plan = optckpt.keras.plan(model)
        assert plan.overhead > 0
        assert peaks.highest <= plan.budget
        assert peaks.highest == pytest.approx(plan.predicted_peak, rel=0.03)

    def test_the_whole_step_is_planned_slots_included(self):
        def make():
            model = keras.Sequential([keras.Input((512,)), *[keras.layers.Dense(512)] * 0])
            for _ in range(4):
                model.add(keras.layers.Dense(512))
            model.compile("adam", "mse")
            return model

        model = made(make)
        optckpt.keras.apply(model, 1 << 30, config=QUICK)
        x = np.ones((32, 512), np.float32)
        model.fit(x, x, verbose=0)
        assert optckpt.keras.plan(model).floor >= 3 * 4 * 4 * 512 * 512

    def test_callbacks_validation_and_weights_of_classes(self, tmp_path):
        labels = (Y > 0).astype(np.int32)

        def make():
            inputs = keras.Input((64,))
            outputs = keras.layers.Dense(2)(layers(inputs))
            model = keras.Model(inputs, outputs)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
            return model

        def fit(model):
            return model.fit(
                data(X, labels),
                epochs=3,
                verbose=0,
                class_weight={0: 1.0, 1: 3.0},
                validation_data=(X[:100], labels[:100]),
                callbacks=[
                    keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
                    keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
                    keras.callbacks.EarlyStopping(patience=2),
                ],
            )

        both(make, fit)
        assert (tmp_path / "m.keras").exists()

    def test_sample_weights(self):
        w = RNG.uniform(size=(2 * BATCH,)).astype(np.float32)
        both(fit=lambda m: m.fit(data(X, Y, w), verbose=0))

    def test_several_inputs_and_losses_and_regularisation(self):
        def make():
            a, b = keras.Input((64,), name="a"), keras.Input((64,), name="b")
            x = layers(keras.layers.Concatenate()([a, b]))
            first = keras.layers.Dense(1, name="first", kernel_regularizer="l2")(x)
            second = keras.layers.Dense(4, name="second", activity_regularizer="l1")(x)
            model = keras.Model({"a": a, "b": b}, {"first": first, "second": second})
            model.compile(
                "adam",
                {"first": "mse", "second": "mae"},
                loss_weights={"first": 1.0, "second": 0.3},
                metrics={"second": ["mse"]},
            )
            return model

        targets = {"first": Y, "second": np.repeat(Y, 4, axis=1)}
        both(make, lambda m: m.fit(data({"a": X, "b": -X}, targets), epochs=2, verbose=0))

    def test_loss_added_by_a_layer(self):
        class Penalty(keras.layers.Layer):
            def call(self, x):
                self.add_loss(1e-3 * tf.reduce_sum(tf.square(x)))
                return x

        def make():
            inputs = keras.Input((64,))
            x = Penalty()(layers(inputs))
            model = keras.Model(inputs, keras.layers.Dense(1)(x))
            model.compile("adam", "mse")
            return model

        both(make)

    def test_mixed_precision(self):
        def make():
            keras.config.set_dtype_policy("mixed_float16")
            try:
                inputs = keras.Input((64,))
                outputs = keras.layers.Dense(1, dtype="float32")(layers(inputs, count=8))
                model = keras.Model(inputs, outputs)
                model.compile("adam", "mse")
            finally:
                keras.config.set_dtype_policy("float32")
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            return model

        both(make)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("SGD", {"gradient_accumulation_steps": 2, "momentum": 0.9}),
            ("Adam", {"global_clipnorm": 0.01}),
            ("AdamW", {"weight_decay": 0.1, "clipnorm": 0.1}),
            ("Adam", {"use_ema": True, "ema_overwrite_frequency": 2}),
        ],
    )
    def test_optimizers(self, name, options):
        def make():
            model = mlp()
            model.compile(getattr(keras.optimizers, name)(0.01, **options), "mse")
            return model

        both(make)

    def test_several_steps_per_execution(self):
        def make():
            model = mlp()
            model.compile("adam", "mse", steps_per_execution=3)
            return model

        x, y = np.tile(X, (2, 1)), np.tile(Y, (2, 1))
        both(make, lambda m: m.fit(data(x, y), epochs=2, verbose=0))

    def test_train_step_of_ones_own(self):
        class Own(keras.Model):
            def train_step(self, batch):
                x, y = batch
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
                return {"mine": loss}

        def make():
            inputs = keras.Input((64,))
            model = Own(inputs, keras.layers.Dense(1)(layers(inputs)))
            model.compile("adam")
            return model

        assert "train_step" not in both(make).__dict__

    def test_subclassed_model_that_is_built_by_its_first_batch(self):
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden = [keras.layers.Dense(64, activation="tanh") for _ in range(8)]
                self.drop = keras.layers.Dropout(0.1)
                self.out = keras.layers.Dense(1)

            def call(self, x, training=False):
                for layer in self.hidden:
                    x = self.drop(layer(x), training=training)
                return self.out(x)

        def make():
            model = Net()
            model.compile("adam", "mse", metrics=["mae"])
            return model

        plans = []
        both(make, on_plan=plans.append)
        # Not in the trace in which its variables are made.
        assert len(plans) == 1

    def test_frozen_layers_are_unfrozen_by_compiling_again(self):
        def fit(model):
            for layer in model.layers[:7]:
                layer.trainable = False
            model.compile("sgd", "mse")
            model.fit(data(), verbose=0)
            for layer in model.layers:
                layer.trainable = True
            model.compile("sgd", "mse")
            return model.fit(data(), verbose=0)

        plans = []
        both(fit=fit, on_plan=plans.append)
        assert len({p.fingerprint for p in plans}) == 2

    def test_nothing_to_train_is_said(self, caplog):
        model = mlp()
        model.trainable = False
        optckpt.keras.compile(model, "sgd", "mse", budget="75%", config=QUICK)
        with (
            caplog.at_level(logging.WARNING, "optckpt"),
            pytest.warns(UserWarning, match="trainable weights"),
        ):
            model.fit(data(), verbose=0)
        assert "takes no gradients, so that nothing was planned" in caplog.text


class TestSizes:
    """Keras traces its function for any batch size."""

    def test_last_smaller_batch_follows_the_plan_of_the_others(self):
        plans = []
        n = BATCH + BATCH // 2

        def fit(model):
            return model.fit(X[:n], Y[:n], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

        both(fit=fit, on_plan=plans.append)
        assert len(plans) == 1

    def test_another_batch_size_has_its_own_plan(self):
        plans = []

        def fit(model):
            model.fit(X, Y, batch_size=BATCH // 2, verbose=0)
            model.fit(X, Y, batch_size=BATCH, verbose=0)
            return model.fit(X, Y, batch_size=BATCH // 2, verbose=0)

        model = both(fit=fit, on_plan=plans.append)
        assert len(plans) == 2
        assert list(optckpt.keras.plans(model)) == [
            "float32[2048, 64], float32[2048, 1]",
            "float32[4096, 64], float32[4096, 1]",
        ]

    def test_a_larger_batch_than_all_before_is_planned_anew(self):
        plans = []

        def batches():
            for n in (BATCH // 2, BATCH // 4, BATCH, BATCH // 2):
                yield X[:n], Y[:n]

        spec = (tf.TensorSpec((None, 64)), tf.TensorSpec((None, 1)))

        def fit(model):
            source = tf.data.Dataset.from_generator(batches, output_signature=spec)
            # Where Keras runs out of data, parts of one more step have been executed already.
            source = source.apply(tf.data.experimental.assert_cardinality(4))
            return model.fit(source, epochs=2, verbose=0)

        both(fit=fit, on_plan=plans.append)
        assert len(plans) == 2

    def test_train_on_batch(self):
        def train(model, kinds):
            return [model.train_on_batch(X[:n], Y[:n], **k) for n, k in kinds]

        kinds = [
            (BATCH, {}),
            (BATCH, {"sample_weight": np.linspace(0, 1, BATCH)}),
            (BATCH // 2, {}),
            (BATCH, {}),
        ]
        expected = train(made(mlp), kinds)
        gc.collect()
        model = optckpt.keras.apply(made(mlp), "75%", config=QUICK)
        assert train(model, kinds) == expected
        assert len(optckpt.keras.plans(model)) == 3

    def test_a_share_is_as_many_bytes_for_a_smaller_batch(self):
        """Of a batch of two, hardly anything but the variables is in memory."""
        model = optckpt.keras.apply(made(mlp), "70%", config=QUICK)
        for n in (BATCH, BATCH // 2, 2):
            model.train_on_batch(X[:n], Y[:n])
        large, half, two = optckpt.keras.plans(model).values()
        assert large.budget == half.budget == two.budget < large.plain_peak
        assert two.plain_peak < two.budget


class TestModels:
    def test_saved_cloned_and_loaded_models_know_nothing_of_it(self, tmp_path):
        model = optckpt.keras.apply(made(mlp), "75%", config=QUICK)
        model.fit(data(), verbose=0)
        model.save(tmp_path / "m.keras")
        model.export(tmp_path / "served", verbose=False)
        loaded = keras.saving.load_model(tmp_path / "m.keras")
        for other in (loaded, keras.models.clone_model(model)):
            with pytest.raises(OptckptError, match="has no budget: give it one"):
                optckpt.keras.plan(other)
        for a, b in zip(loaded.weights, model.weights, strict=True):
            np.testing.assert_array_equal(a, b)
        loaded.fit(data(), verbose=0)
        model.fit(data(), verbose=0)
        served = tf.saved_model.load(str(tmp_path / "served"))
        assert served.serve(X[:3]).shape == (3, 1)

    def test_removed(self):
        model = made(mlp)
        model.fit(data(), verbose=0)
        before = set(model.__dict__)
        optckpt.keras.apply(model, "75%", config=QUICK)
        model.fit(data(), verbose=0)
        assert optckpt.keras.remove(model) is model
        assert set(model.__dict__) == before
        model.fit(data(), verbose=0)
        with pytest.raises(OptckptError, match="has no budget"):
            optckpt.keras.plan(model)
        optckpt.keras.remove(model)

    def test_another_budget_takes_the_place_of_the_first(self):
        model = optckpt.keras.apply(made(mlp), "90%", config=QUICK)
        model.fit(data(), verbose=0)
        first = optckpt.keras.plan(model)
        optckpt.keras.apply(model, "75%", config=QUICK)
        model.fit(data(), verbose=0)
        assert optckpt.keras.plan(model).budget < first.budget

    def test_compile_and_evaluate(self):
        model = made(mlp)
        again = optckpt.keras.compile(
            model, "sgd", loss="mae", metrics=["mse"], budget="75%", config=QUICK
        )
        assert again is model
        history = model.fit(data(), verbose=0).history
        assert set(history) == {"loss", "mse"}
        assert isinstance(model.optimizer, keras.optimizers.SGD)
        plain = made(mlp)
        plain.compile("sgd", "mae", metrics=["mse"])
        plain.fit(data(), verbose=0)
        assert model.evaluate(X, Y, verbose=0) == plain.evaluate(X, Y, verbose=0)
        np.testing.assert_array_equal(
            model.predict(X[:10], verbose=0), plain.predict(X[:10], verbose=0)
        )

    def test_calibrated(self):
        plans = []
        model = both(calibrate=True, on_plan=plans.append)
        assert optckpt.keras.plan(model) == plans[-1]

    def test_one_model_inside_another(self):
        def make():
            inner = mlp()
            outer_input = keras.Input((64,))
            model = keras.Model(outer_input, inner(keras.layers.Dense(64)(outer_input)))
            model.compile("adam", "mse")
            return model

        both(make)


class TestRefusals:
    def test_run_eagerly(self):
        model = mlp()
        with pytest.raises(CaptureError, match=r"run_eagerly=True.*compile it without"):
            optckpt.keras.compile(model, "sgd", "mse", run_eagerly=True, budget="80%")
        with pytest.raises(OptckptError, match="has no budget"):
            optckpt.keras.plan(model)
        optckpt.keras.apply(model, "75%", config=QUICK)
        model.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(CaptureError, match="run_eagerly=True"):
            model.fit(data(), verbose=0)
        model.compile("sgd", "mse")
        tf.config.run_functions_eagerly(True)
        try:
            with pytest.raises(CaptureError, match=r"run_functions_eagerly\(True\) is on"):
                model.fit(data(), verbose=0)
        finally:
            tf.config.run_functions_eagerly(False)

    def test_another_backend(self, monkeypatch):
        monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(OptckptError, match=r"runs on jax.*KERAS_BACKEND=tensorflow"):
            optckpt.keras.apply(keras.Sequential(), "80%")

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"budget": "lots"}, BudgetError, "lots"),
            ({"strategy": "nonsense"}, OptckptError, "unknown strategy"),
            ({"budget": 1, "max_overhead": 0.1}, BudgetError, "either a budget or max_overhead"),
        ],
    )
    def test_arguments(self, arguments, error, text):
        with pytest.raises(error, match=text):
            optckpt.keras.apply(keras.Sequential(), **arguments)

    def test_no_model(self):
        with pytest.raises(OptckptError, match=r"a keras\.Model is needed, got Dense"):
            optckpt.keras.apply(keras.layers.Dense(3), "80%")

    def test_no_plan_yet(self):
        model = optckpt.keras.apply(mlp(), "80%")
        with pytest.raises(OptckptError, match="has no plan yet: train it on a batch"):
            optckpt.keras.plan(model)
        assert optckpt.keras.plans(model) == {}

    def test_budget_that_cannot_be_met(self):
        model = optckpt.keras.apply(mlp(), 1000, config=QUICK)
        with pytest.raises(InfeasibleBudgetError, match="no schedule fits"):
            model.fit(data(), verbose=0)

    def test_xla_is_switched_off_with_a_notice(self, caplog):
        model = mlp()
        with caplog.at_level(logging.INFO, "optckpt.keras"):
            optckpt.keras.compile(model, "sgd", "mse", jit_compile=True, budget="75%", config=QUICK)
            model.fit(data(), verbose=0)
        (record,) = [r for r in caplog.records if "jit_compile is off" in r.message]
        assert record.levelno == logging.WARNING
        assert model.jit_compile is True

    def test_xla_that_nobody_asked_for_is_switched_off_quietly(self, caplog, monkeypatch):
        model = mlp()
        monkeypatch.setattr(type(model), "_resolve_auto_jit_compile", lambda self: True)
        with caplog.at_level(logging.INFO, "optckpt.keras"):
            optckpt.keras.compile(model, "sgd", "mse", budget="75%", config=QUICK)
            model.fit(data(), verbose=0)
        (record,) = [r for r in caplog.records if "jit_compile is off" in r.message]
        assert record.levelno == logging.INFO


def test_keras_is_imported_with_the_first_use_of_it():
    import subprocess
    import sys

    code = (
        "import sys, optckpt\n"
        "optckpt.gradients\n"
        "assert 'keras' in dir(optckpt)\n"
        "assert 'optckpt.keras' not in sys.modules\n"
        "optckpt.keras.apply\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
