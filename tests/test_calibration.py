"""Calibration: a step that exceeds its budget is planned again for less."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt import calibration
from optckpt.config import Config
from optckpt.errors import BudgetError, OptckptError
from optckpt.schedule import Plan

pytestmark = pytest.mark.usefixtures("grappler_off")

SETTINGS = {
    "costs": {"model": "flops"},
    "memory": {"margin": 0.0},
    "solver": {"order": "fixed", "repeat": "forward"},
}
X = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
HIDDEN = 6 << 20


@pytest.fixture(autouse=True)
def _nothing_left():
    """Shares of the peak count what other tests have left in reference cycles."""
    gc.collect()


def weights(layers: int = 12) -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [tf.Variable(rng.normal(size=(64, 64)).astype(np.float32) / 8) for _ in range(layers)]


def hungry(x, ws, hidden=HIDDEN):
    """A network at whose end an operation needs memory that nothing in the graph tells of."""
    for w in ws:
        x = tf.tanh(x @ w) * 1.5

    def inside(x):
        return x + tf.ones([hidden // 4])[0] - 1.0

    y = tf.py_function(inside, [tf.reduce_mean(x * x)], tf.float32)
    y.set_shape(())
    return y


def peak() -> int:
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def step_of(ws, budget, hidden=HIDDEN, **options):
    return optckpt.value_and_gradients(
        lambda x: hungry(x, ws, hidden),
        ws,
        budget,
        config=Config.model_validate(SETTINGS),
        **options,
    )


def test_without_it_the_budget_is_exceeded_and_a_warning_says_so_once(caplog):
    step = step_of(weights(), "80%", calibrate=False)
    x = tf.constant(X)
    step(x)
    for _ in range(2):
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(x)
        assert peak() > step.last_plan.budget
    assert step.last_plan.calibrated == ()
    (warning,) = (r.message for r in caplog.records if r.name == "optckpt.calibration")
    assert "above its budget of" in warning
    assert "calibrate=True" in warning
    # Nothing fetches batches here.
    assert "in advance" not in warning


def test_planned_again_when_seen_above_the_budget(caplog):
    step = step_of(weights(), "80%")
    x = tf.constant(X)
    step(x)
    assert step.last_plan.calibrated == ()
    first, target = peak(), step.last_plan.target
    for _ in range(3):
        step(x)
    plan = step.last_plan
    assert plan.calibrated[0] == first > plan.budget
    assert plan.target < target
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    assert 0 < peak() <= plan.budget
    messages = [r.message for r in caplog.records if r.name == "optckpt.calibration"]
    assert len(messages) == 1
    assert "it is planned again" in messages[0]


@pytest.mark.parametrize("calibrate", [True, False, "seen"])
def test_what_several_devices_use_together_is_not_taken_for_one(monkeypatch, caplog, calibrate):
    monkeypatch.setattr(calibration, "memory_info", lambda _: None)
    step = step_of(weights(), "80%", calibrate=calibrate)
    for _ in range(3):
        step(tf.constant(X))
    assert peak() > step.last_plan.budget
    assert step.last_plan.calibrated == ()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("calibrate", [True, "seen"])
def test_a_worker_does_not_plan_again_by_itself(monkeypatch, caplog, calibrate):
    monkeypatch.setattr(calibration, "is_worker", lambda: True)
    step = step_of(weights(), "80%", calibrate=calibrate)
    for _ in range(3):
        step(tf.constant(X))
    assert peak() > step.last_plan.budget
    assert step.last_plan.calibrated == ()
    messages = [r.message for r in caplog.records if r.name == "optckpt.calibration"]
    assert len(messages) == 1
    assert ("of several workers none is" if calibrate is True else "above its") in messages[0]


def test_statistics_are_the_callers_until_then():
    step = step_of(weights(), "90%", hidden=4)
    x = tf.constant(X)
    step(x)
    large = tf.ones([64 << 20])
    del large
    highest = peak()
    for _ in range(3):
        step(x)
    assert peak() == highest


@pytest.mark.parametrize("within", [False, True])
def test_a_step_with_random_numbers_of_its_own_is_only_warned_of(caplog, within):
    ws = weights()

    def noisy(x):
        return x + tf.random.uniform([])

    if within:
        inner = noisy

        def noisy(x):
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(x)), [0, x])[1]

    step = optckpt.value_and_gradients(
        lambda x: noisy(hungry(x, ws)), ws, "80%", config=Config.model_validate(SETTINGS)
    )
    x = tf.constant(X)
    for _ in range(3):
        step(x)
    assert step.last_plan.calibrated == ()
    (warning,) = (r.message for r in caplog.records if r.name == "optckpt.calibration")
    assert "calibrate=True" in warning


def test_a_plan_that_is_given_is_not_made_again(caplog):
    ws = weights()
    x = tf.constant(X)
    made = step_of(ws, "80%", calibrate=False)
    made(x)
    step = optckpt.value_and_gradients(
        lambda x: hungry(x, ws), ws, plan=made.last_plan, config=Config.model_validate(SETTINGS)
    )
    for _ in range(3):
        step(x)
    assert step.last_plan.schedule == made.last_plan.schedule
    assert "planned again" not in caplog.text
    with pytest.raises(OptckptError, match="leave out one of them"):
        optckpt.value_and_gradients(hungry, ws, plan=made.last_plan, calibrate=True)


def test_no_warning_of_peaks_that_the_step_did_not_reach(caplog):
    step = step_of(weights(), "90%", hidden=4)
    x = tf.constant(X)
    step(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    large = tf.ones([64 << 20])
    del large
    for _ in range(2):
        step(x)
    assert peak() > step.last_plan.budget
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_planned_again_with_what_was_learnt(caplog):
    ws = weights()
    x = tf.constant(X)
    step = step_of(ws, "80%", calibrate=True)
    seen = []
    with caplog.at_level(logging.INFO, "optckpt.calibration"):
        for _ in range(6):
            value, grads = step(x)
            seen.append((value.numpy(), [g.numpy() for g in grads]))
            del grads
    plan = step.last_plan
    assert plan == optckpt.last_plan()
    assert 1 <= len(plan.calibrated) <= 3
    assert min(plan.calibrated) > plan.budget >= plan.predicted_peak
    assert plan.target < plan.budget
    for other in seen[1:]:
        assert other[0] == seen[0][0]
        for a, b in zip(other[1], seen[0][1], strict=True):
            np.testing.assert_array_equal(a, b)
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    assert 0 < peak() <= plan.budget
    assert "planned again" in caplog.text
    assert Plan.from_json(plan.to_json()) == plan


def test_nothing_is_executed_twice():
    ws = weights()
    count = tf.Variable(0)

    def fn(x):
        count.assign_add(1)
        return hungry(x, ws)

    step = optckpt.value_and_gradients(
        fn, ws, "80%", config=Config.model_validate(SETTINGS), calibrate=True
    )
    x = tf.constant(X)
    for n in range(1, 6):
        step(x)
        assert count.numpy() == n
    assert step.last_plan.calibrated


def test_a_step_within_its_budget_is_left_alone():
    traces = []
    ws = weights()

    def fn(x):
        traces.append(0)
        for w in ws:
            x = tf.tanh(x @ w)
        return tf.reduce_mean(x * x)

    config = Config.model_validate({**SETTINGS, "memory": {"calibrate": True}})
    step = optckpt.value_and_gradients(fn, ws, "80%", config=config)
    x = tf.constant(X)
    for _ in range(4):
        step(x)
    assert len(traces) == 1
    assert step.last_plan.calibrated == ()


def test_what_cannot_be_met_keeps_the_best_plan_and_says_so(caplog):
    step = step_of(weights(), "60%", hidden=1 << 26, calibrate=True)
    x = tf.constant(X)
    with caplog.at_level(logging.WARNING, "optckpt.calibration"):
        for _ in range(6):
            step(x)
    assert "above its budget" in caplog.text
    assert caplog.text.count("raise the budget") == 1
    assert caplog.text.count("above its budget") == 1
    assert step.last_plan.calibrated


@pytest.mark.parametrize(
    ("why", "advice"),
    [
        (None, "; raise the budget or memory.margin"),
        ("no schedule fits; raise the budget or the time limit", ""),
    ],
)
def test_what_to_do_is_said_once(caplog, monkeypatch, why, advice):
    step = step_of(weights(), "80%", calibrate=True)
    monkeypatch.setattr(calibration, "REPLANS", 1 if why else 0)
    step(tf.constant(X))
    if why:

        def refuse(*_, **__):
            raise BudgetError(why)

        monkeypatch.setattr("optckpt.step.apply_on_devices", refuse)
        step(tf.constant(X))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.endswith((why or "in vain") + advice)


def test_other_tensors_that_came_meanwhile_are_not_counted_twice():
    ws = weights()
    ballast = []
    step = step_of(ws, "80%", hidden=4, calibrate=True)
    x = tf.constant(X)
    step(x)
    budget = step.last_plan.budget
    ballast.append(tf.zeros([3 << 18]))
    for _ in range(4):
        step(x)
    plan = step.last_plan
    assert plan.budget == budget
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    assert peak() <= plan.budget
    assert len(plan.calibrated) == 1
    # Had they been, the target would be lower by their size again.
    assert plan.target > budget - (3 << 20)
