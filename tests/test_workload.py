"""Models and steps of the user's own: what a function may return, and what is done with it."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from optckpt.batch import synthetic_batch
from optckpt.config import parse_config
from optckpt.errors import CaptureError, OptckptError
from optckpt.traced import plan_of, traced_of
from optckpt.workload import load

MODULE = """
import keras
import numpy as np
import tensorflow as tf

def net():
    inputs = keras.Input((64,))
    x = inputs
    for _ in range(6):
        x = keras.layers.Dense(64, "tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(10, "softmax", name="out")(x), name="net")

def model():
    made = net()
    made.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made

def with_batch(batch_size):
    made = net()
    made.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    return made, (rng.normal(size=(batch_size, 64)).astype("float32"), np.ones((batch_size, 10)))

def step(batch_size=8):
    weights = [tf.Variable(tf.random.normal((64, 64)) / 8) for _ in range(6)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.tanh(y @ w)
            loss = tf.reduce_mean(y * y)
            if loss > 100.0:
                loss *= 2.0
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return train, tf.random.normal((batch_size, 64))

def without_gradients():
    return lambda x: x + 1.0, tf.ones(3)

def uncompiled():
    return net()

def number():
    return 3
"""


@pytest.fixture
def function(tmp_path, monkeypatch):
    name = f"work_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda what: f"{name}:{what}"
    sys.modules.pop(name, None)


def settings_of(function: str, batch_size: int = 4096):
    return parse_config(
        {
            "model": {"function": function, "batch_size": batch_size},
            "costs": {"model": "flops"},
            "memory": {"margin": 0.0},
        }
    )


@pytest.mark.usefixtures("grappler_off")
@pytest.mark.parametrize("what", ["model", "with_batch", "step"])
def test_planned_steps_are_the_plain_ones(function, what, tmp_path):
    settings = settings_of(function(what))
    work = load(settings)
    found = work.captured(settings)
    answer = {
        "allocator": None, "device": found.device, "limit": 1 << 40,
        "trace_seconds": 0.0, "cost_seconds": 0.0,
    }  # fmt: skip
    graph = found.graph.with_costs([1.0] * len(found.graph.operations))
    traced = traced_of(answer, graph, found.plain(graph))
    plan = plan_of(traced, settings, None, max_overhead=0.1)
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    assert plan.live_peak < plan.plain_peak
    plan.save(tmp_path / "plan.json")
    records = []
    for file in (None, tmp_path / "plan.json"):
        work = load(settings)
        records.append(work.record(work.traced(file, settings), 2))
    plain, planned = records
    assert plain.keys() == planned.keys()
    assert sum(k.startswith("variable") for k in plain) > 6
    assert any(np.any(plain[k] != plain["0/result0"]) for k in plain if k.startswith("1/result"))
    for key in plain:
        np.testing.assert_array_equal(plain[key], planned[key])


def test_the_same_in_every_process(function):
    settings = settings_of(function("model"), batch_size=4)
    first, second = (load(settings).inputs[0] for _ in range(2))
    for a, b in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[0].shape == (4, 64)
    assert first[1].shape == (4,)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("uncompiled", "is not compiled: call model.compile"),
        ("number", r"is to return a compiled keras.Model, .* but returned int"),
    ],
)
def test_other_results_are_refused(function, what, message):
    with pytest.raises(OptckptError, match=message):
        load(settings_of(function(what)))


def test_a_step_without_gradients_is_refused(function):
    settings = settings_of(function("without_gradients"))
    with pytest.raises(CaptureError, match="without_gradients takes no gradients"):
        load(settings).captured(settings)


class TestBatch:
    def test_several_inputs_outputs_and_losses(self):
        image, ids = keras.Input((8, 8, 3), name="image"), keras.Input((5,), dtype="int32")
        x = keras.layers.Flatten()(image)
        y = keras.layers.Flatten()(keras.layers.Embedding(7, 4)(ids))
        both = keras.layers.Concatenate()([x, y])
        outputs = {
            "kind": keras.layers.Dense(3, "softmax", name="kind")(both),
            "size": keras.layers.Dense(2, name="size")(both),
        }
        model = keras.Model([image, ids], outputs)
        model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"})
        x, y = synthetic_batch(model, 4, 0, "m:f")
        assert [tuple(t.shape) for t in x] == [(4, 8, 8, 3), (4, 5)]
        assert x[1].dtype == tf.int32
        assert {k: tuple(v.shape) for k, v in y.items()} == {"kind": (4,), "size": (4, 2)}
        assert np.isfinite(model.train_on_batch(x, y)).all()

    def test_unknown_sizes_and_models_without_inputs_are_refused(self):
        inputs = keras.Input((None,), dtype="int32", name="words")
        x = keras.layers.LSTM(4)(keras.layers.Embedding(9, 4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        with pytest.raises(OptckptError, match=r"m:f .*'words' has the shape \[None, None\]"):
            synthetic_batch(model, 4, 0, "m:f")
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(OptckptError, match=r"inputs are not known.*\(model, batch\)"):
            synthetic_batch(model, 4, 0, "m:f")
