"""Wrong arguments: one sentence that names the argument, what was given and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_support import normal

import optckpt
import optckpt.keras
from optckpt.budget import Budget, DeviceBudgets
from optckpt.config import Config
from optckpt.errors import BudgetError, CaptureError, ConfigError, OptckptError
from optckpt.schedule import Plan

pytestmark = pytest.mark.usefixtures("grappler_off")

QUICK = Config.model_validate(
    {"costs": {"model": "flops"}, "plans": {"cache": False}, "solver": {"time_limit": 1.0}}
)


class Setting:
    """A small network, and the ways in with which wrong arguments are tried."""

    def __init__(self) -> None:
        self.weight = tf.Variable(normal(16, 16))
        self.x = tf.constant(normal(8, 16))

    def loss(self, x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x @ self.weight) ** 2)

    def gradients(self, **options: Any) -> Any:
        """`optckpt.gradients`, with `ys` and `xs` among the options or as they should be."""

        def step(x: tf.Tensor) -> Any:
            given = {"ys": self.loss(x), "xs": self.weight, "budget": "90%", "config": QUICK}
            return optckpt.gradients(**{**given, **options})

        return tf.function(step, autograph=False).get_concrete_function(self.x)

    def tape(self, **options: Any) -> Any:
        def step(x: tf.Tensor) -> Any:
            with optckpt.GradientTape("90%", config=QUICK) as tape:
                loss = self.loss(x)
            return tape.gradient(**{"target": loss, "sources": self.weight, **options})

        return tf.function(step, autograph=False).get_concrete_function(self.x)

    def step(self, fn: Any = None, **options: Any) -> Any:
        options = {"budget": "90%", "config": QUICK, **options}
        return optckpt.value_and_gradients(fn or self.loss, [self.weight], **options)

    def model(self) -> keras.Model:
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model


def nothing(graph: Any, budget: Any, options: Any) -> None:
    """A strategy that forgets to answer."""


WRONG: list[tuple[str, Callable[[Setting], Any], type[OptckptError], str]] = [
    ("config", lambda s: s.gradients(config=3), ConfigError, "config= takes a Config.* got int"),
    (
        "on_plan",
        lambda s: s.gradients(on_plan=3),
        OptckptError,
        "on_plan= takes a function.* got 3",
    ),
    (
        "strategy without an answer",
        lambda s: s.gradients(strategy=nothing),
        OptckptError,
        "strategy 'nothing' returned a NoneType: a strategy returns a Solution",
    ),
    ("strategy ''", lambda s: s.gradients(strategy=""), OptckptError, "unknown strategy ''"),
    ("xs None", lambda s: s.gradients(xs=None), OptckptError, "xs takes tensors.* got None"),
    ("xs str", lambda s: s.gradients(xs="w"), OptckptError, "xs takes tensors.* got 'w'"),
    ("xs strs", lambda s: s.gradients(xs=["w"]), OptckptError, "xs takes tensors.* got 'w'"),
    ("ys None", lambda s: s.gradients(ys=None), OptckptError, "ys takes tensors.* got None"),
    ("ys str", lambda s: s.gradients(ys="loss"), OptckptError, "ys takes tensors.* got 'loss'"),
    ("ys objects", lambda s: s.gradients(ys=[len]), OptckptError, "ys takes tensors.* got a "),
    ("target", lambda s: s.tape(target=None), OptckptError, "target takes tensors.* got None"),
    ("sources", lambda s: s.tape(sources="w"), OptckptError, "sources takes tensors.* got 'w'"),
    (
        "fn returns None",
        lambda s: s.step(lambda x: None)(s.x),
        OptckptError,
        "fn must return the loss as a tensor.* returned None",
    ),
    (
        "fn returns a number",
        lambda s: s.step(lambda x: 1.5)(s.x),
        OptckptError,
        r"fn must return the loss as a tensor.* returned 1\.5",
    ),
    (
        "optimizer class",
        lambda s: s.step(optimizer=keras.optimizers.Adam),
        OptckptError,
        r"optimizer= takes an optimizer, got the class Adam: make one of it, Adam\(",
    ),
    ("calibrate", lambda s: s.step(calibrate="yes"), OptckptError, "calibrate= takes True.*'yes'"),
    (
        "calibrate several devices",
        lambda s: s.step(calibrate=True, budget={"GPU:0": "1GiB", "GPU:1": "1GiB"}),
        OptckptError,
        "calibrate= measures one device",
    ),
    ("no budget", lambda s: Budget(), BudgetError, "either bytes= or fraction="),
    ("two budgets", lambda s: Budget(5, 0.5), BudgetError, "either bytes= or fraction="),
    ("bytes < 0", lambda s: Budget(bytes=-4), BudgetError, r"bytes=-4\): give a whole number"),
    ("bytes 1.5", lambda s: Budget(bytes=1.5), BudgetError, r"bytes=1\.5\): give a whole"),
    ("nan", lambda s: Budget(fraction=float("nan")), BudgetError, r"fraction=nan\): give a share"),
    ("1.5", lambda s: Budget(fraction=1.5), BudgetError, r"fraction=1\.5\): give a share"),
    ("0", lambda s: Budget(fraction=0), BudgetError, r"fraction=0\): give a share"),
    ("plan", lambda s: optckpt.keras.plan(None), OptckptError, "keras.Model is needed, got None"),
    ("plans", lambda s: optckpt.keras.plans(3), OptckptError, "keras.Model is needed, got int"),
    ("remove", lambda s: optckpt.keras.remove(None), OptckptError, "is needed, got NoneType"),
    ("apply", lambda s: optckpt.keras.apply(3, "80%"), OptckptError, "is needed, got int"),
    (
        "compile",
        lambda s: optckpt.keras.compile(s.model(), "sgd", "mse", budget="abc"),
        BudgetError,
        "cannot read the budget 'abc'",
    ),
    (
        "apply of several devices",
        lambda s: optckpt.keras.apply(s.model(), {"CPU:0": 1, "CPU:1": 1}, calibrate=True),
        OptckptError,
        "calibrate= measures one device",
    ),
    (
        "budgeted without a budget",
        lambda s: optckpt.budgeted(s.loss),
        BudgetError,
        r'takes a budget and gives a decorator: write @optckpt\.budgeted\("200MiB"\)',
    ),
    (
        "budgeted without a function",
        lambda s: optckpt.budgeted("1MiB")(None),
        OptckptError,
        "decorates a function, got None",
    ),
    (
        "budgeted with a structure",
        lambda s: optckpt.budgeted("90%", config=QUICK)(s.loss)(tf.ragged.constant([[1.0]])),
        CaptureError,
        "its argument 'x' is a RaggedTensor: pass the tensors",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_wrong_arguments(
    call: Callable[[Setting], Any], error: type[OptckptError], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        call(Setting())
    message = str(caught.value)
    assert re.match(r"[^\n]{20,400}$", message), message


@pytest.mark.parametrize("amount", [np.int64(2**30), np.int32(2**30), np.uint64(2**30), 2.0**30])
def test_numbers_of_bytes(amount: Any) -> None:
    assert Budget.parse(amount) == Budget(bytes=2**30)


@pytest.mark.parametrize("share", [np.float32(0.5), np.float64(0.5), np.float16(0.5), 0.5])
def test_shares(share: Any) -> None:
    budget = Budget.parse(share)
    assert budget == Budget(fraction=0.5)
    assert type(budget.fraction) is float


@pytest.mark.parametrize("wrong", [np.array([1, 2]), np.bool_(True), np.float32("nan")])
def test_what_is_no_amount(wrong: Any) -> None:
    with pytest.raises(BudgetError, match="cannot read the budget"):
        Budget.parse(wrong)


def test_a_budget_for_one_device_may_be_calibrated() -> None:
    step = Setting().step(calibrate=True, budget=DeviceBudgets({"/device:CPU:0": Budget(2**30)}))
    assert step._calibrate


def test_a_variable_as_argument_of_a_part_is_used_like_one_from_outside() -> None:
    """Its gradient is there, and another variable is another trace."""
    plans: list[Plan] = []

    @optckpt.budgeted("100%", config=QUICK, on_plan=plans.append)
    def part(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
        return tf.tanh(x @ w)

    setting = Setting()
    other = keras.Variable(normal(16, 16))
    for w in (setting.weight, other, setting.weight):
        variable = w.value if isinstance(w, keras.Variable) else w
        with tf.GradientTape(persistent=True) as tape:
            y = part(setting.x, w)
            plain = tf.tanh(setting.x @ w)
        np.testing.assert_array_equal(y, plain)
        np.testing.assert_array_equal(tape.gradient(y, variable), tape.gradient(plain, variable))
    assert len(plans) == 2


def test_a_model_without_gradients_is_said_to_be_unplanned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Setting().model()
    model.trainable = False
    model.compile("sgd", "mse")
    optckpt.keras.apply(model, "80%", config=QUICK)
    x, y = normal(32, 16), normal(32, 1)
    with caplog.at_level(logging.WARNING, "optckpt"), pytest.warns(UserWarning, match="trainable"):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    said = [r for r in caplog.records if "takes no gradients" in r.message]
    assert len(said) == 1


def test_a_loop_without_a_known_end_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = tf.Variable(normal(320, 320) / 320)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, n: tf.Tensor) -> Any:
        y = tf.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, tf.tanh(y @ weight)), [0, x])[1]
        return optckpt.gradients(tf.reduce_sum(y), weight, budget="100%", config=QUICK)

    with caplog.at_level(logging.WARNING, "optckpt"):
        step.get_concrete_function(tf.TensorSpec((320, 320)), tf.TensorSpec((), tf.int32))
    assert len([r for r in caplog.records if "number of iterations is not known" in r.message]) == 1
