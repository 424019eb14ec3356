"""Whole steps: the same numbers as without, within the budget, whatever the step does."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import PeakError
from random_steps import RandomStep
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util
from tf_support import (
    Scheduler,
    assert_same,
    counted,
    grappler_off,
    normal,
    random_order,
    random_schedule,
)

import optckpt
from optckpt.config import Config
from optckpt.errors import CaptureError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Plan, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, Strategy, solve
from optckpt.step import whole_step

SIDE = 320
"""All large tensors are square matrices of this size: allocators lose nothing in chunks of one."""
BYTES = 4 * SIDE * SIDE

Body = Callable[[tf.Tensor], list[tf.Tensor]]
Make = Callable[[], tuple[Body, Sequence[Any]]]
"""Makes a step `body(x) -> outputs` and what it trains: variables, optimizers, models, metrics."""


def config(updates: str = "early", order: str = "fixed") -> Config:
    return Config.model_validate(
        {
            "costs": {"model": "flops"},
            "memory": {"updates": updates},
            "plans": {"cache": False},
            "solver": {"time_limit": 1.0, "gap": 0.3, "order": order},
        }
    )


@dataclass
class Trained:
    outputs: list[np.ndarray] = field(default_factory=list)
    variables: list[np.ndarray] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    peak: int = 0
    """Largest peak that the allocator reports of the steps after the first."""


class Around:
    """Contexts of one trace: `with around() as step` is a whole step, or nothing."""

    def __init__(self, found: Trained, updates: str, options: dict[str, Any] | None) -> None:
        self.found, self.updates, self.options = found, updates, options

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Callable[[Any], None]]:
        if self.options is None:
            yield lambda tensors: None
            return
        options = {"config": config(self.updates), "on_plan": self.found.plans.append}
        with whole_step(**{**options, **self.options}) as step:
            yield step.keep


def flat_variables(trained: Sequence[Any]) -> list[tf.Variable]:
    found: list[tf.Variable] = []
    for item in trained:
        if isinstance(item, tf.Variable):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += flat_variables(item)
        elif isinstance(item, keras.Variable):
            found.append(item.value)
        else:
            found += flat_variables(list(item.variables))
    return found


def train(
    make: Callable[[Around], tuple[Body, Sequence[Any]]],
    options: dict[str, Any] | None = None,
    updates: str = "early",
    steps: int = 5,
) -> Trained:
    """Some steps from the same start; `options` of the whole step, None: plain."""
    gc.collect()
    keras.utils.set_random_seed(1)
    found = Trained()
    body, trained = make(Around(found, updates, options))
    function = tf.function(body, autograph=False)
    try:
        with grappler_off():
            for i in range(steps):
                x = counted(normal(SIDE, SIDE, seed=i))
                tf.config.experimental.reset_memory_stats("CPU:0")
                results = function(x)
                peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
                found.outputs += [t.numpy() for t in results]
                del results, x
                found.peak = max(found.peak, peak if i else 0)
        found.variables = [v.numpy() for v in flat_variables(trained)]
    finally:
        # Keras holds on to variables: their memory would be in the way of the next step.
        for v in flat_variables(trained):
            tf.raw_ops.AssignVariableOp(
                resource=v.handle, value=tf.zeros([1], v.dtype), validate_shape=False
            )
    return found


def whole(make: Make) -> Callable[[Around], tuple[Body, Sequence[Any]]]:
    """All of the body in one whole step."""

    def made(around: Around) -> tuple[Body, Sequence[Any]]:
        body, trained = make()

        def step(x: tf.Tensor) -> list[tf.Tensor]:
            with around() as keep:
                outputs = body(x)
                keep(outputs)
            return outputs

        return step, trained

    return made


def following(scheduler: Scheduler) -> Strategy:
    """A strategy that does not look at the budget."""

    def strategy(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
        schedule: Schedule = scheduler(graph)
        cost = simulate(graph, schedule).overhead
        return Solution(schedule, Certificate("given", "feasible", cost, 0.0, 0.0))

    return strategy


def half_way(graph: TrainingGraph) -> Schedule:
    """A schedule with a peak about half way between the floor and the plain step's, or at random
    if the heuristic finds none."""
    floor, plain = static_floor(graph).bytes, simulate(graph, Schedule.base(graph)).peak
    solution = solve(graph, (floor + plain) // 2, "chen_greedy")
    schedule = solution.schedule
    if schedule is None or len(schedule) == len(graph.operations):
        return random_schedule(0)(graph)
    return schedule


def check(make: Callable[[Around], tuple[Body, Sequence[Any]]], updates: str = "early") -> Trained:
    """The step with operations executed again is the same step; its peak is the predicted one."""
    plain = train(make)
    found = train(make, {"strategy": following(half_way)}, updates)
    assert_same(found.outputs, plain.outputs)
    assert_same(found.variables, plain.variables)
    assert len(plain.variables) > 0
    assert all(len(p.schedule) > len(set(p.schedule.executions)) for p in found.plans)
    predicted = max(plan.predicted_peak for plan in found.plans)
    # A large chunk that is cut otherwise than in any history is two matrices.
    if found.peak > 1.03 * predicted + 2 * BYTES:
        raise PeakError(f"{found.peak}, predicted {predicted}")
    return found


def check_budget(make: Callable[[Around], tuple[Body, Sequence[Any]]], share: float) -> None:
    """The step within a budget between floor and plain peak is the same step and keeps to it."""
    plain = train(make)
    traced = train(make, {"strategy": "store_all"}, steps=1)
    budget = max(int(p.floor + share * (p.plain_peak - p.floor)) for p in traced.plans)
    found = train(make, {"budget": budget})
    assert_same(found.outputs, plain.outputs)
    assert_same(found.variables, plain.variables)
    assert len(found.plans) == len(traced.plans) > 0
    assert all(plan.budget == budget >= plan.predicted_peak for plan in found.plans)
    if found.peak > budget:
        raise PeakError(f"{found.peak}, {budget} allowed")
    assert budget < plain.peak
    assert any(len(p.schedule) > len(set(p.schedule.executions)) for p in found.plans)


# --- Steps ----------------------------------------------------------------------------------------


def matrices(n: int = 4, seed: int = 0) -> list[tf.Variable]:
    return [tf.Variable(normal(SIDE, SIDE, seed=seed + i, scale=SIDE**-0.5)) for i in range(n)]


def layers(x: tf.Tensor, ws: Sequence[Any]) -> tf.Tensor:
    for w in ws:
        x = tf.tanh(x @ w) * 1.5
    return x


def loss_of(x: tf.Tensor, ws: Sequence[Any]) -> tf.Tensor:
    return tf.reduce_mean(tf.square(layers(x, ws)))


def update(ws: Sequence[tf.Variable], gradients: Sequence[Any], rate: float = 0.1) -> None:
    for w, g in zip(ws, gradients, strict=True):
        w.assign_sub(rate * g)


def descend(x: tf.Tensor, ws: Sequence[tf.Variable]) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(x, ws)
    update(ws, tape.gradient(loss, ws))
    return loss


def with_optimizer(make: Callable[[], Any]) -> Make:
    def made() -> tuple[Body, Sequence[Any]]:
        ws = [keras.Variable(normal(SIDE, SIDE, seed=i, scale=SIDE**-0.5)) for i in range(4)]
        optimizer = make()
        optimizer.build(ws)
        scale = getattr(optimizer, "scale_loss", lambda loss: loss)

        def step(x: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = loss_of(x, [tf.convert_to_tensor(w) for w in ws])
                scaled = scale(loss)
            gradients = tape.gradient(scaled, [w.value for w in ws])
            optimizer.apply_gradients(zip(gradients, ws, strict=True))
            return [loss]

        return step, [ws, optimizer]

    return made


O = keras.optimizers  # noqa: E741
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: O.Adam(O.schedules.CosineDecay(0.01, 9)),
    "weight decay": lambda: O.AdamW(0.01, weight_decay=0.1),
    "global norm": lambda: O.Adam(0.01, global_clipnorm=0.1),
    "norms": lambda: O.Adam(0.01, clipnorm=0.1),
    "averages": lambda: O.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: O.Adam(0.01, gradient_accumulation_steps=2),
    "adafactor": lambda: O.Adafactor(0.01),
    "lion": lambda: O.Lion(0.001),
    "loss scale": lambda: O.LossScaleOptimizer(O.Adam(0.01), 2.0**9, dynamic_growth_steps=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    check(whole(with_optimizer(OPTIMIZERS[name])))


def fused_adam() -> tuple[Body, Sequence[Any]]:
    ws = matrices()
    first, second = ([tf.Variable(tf.zeros_like(w)) for w in ws] for _ in range(2))
    powers = [tf.Variable(0.9), tf.Variable(0.99)]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        loss = loss_of(x, ws)
        for w, g, m, v in zip(ws, tf.gradients(loss, ws), first, second, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=w.handle, m=m.handle, v=v.handle, beta1_power=powers[0],
                beta2_power=powers[1], lr=0.01, beta1=0.9, beta2=0.99, epsilon=1e-7, grad=g,
            )  # fmt: skip
        powers[0].assign(powers[0] * 0.9)
        powers[1].assign(powers[1] * 0.99)
        return [loss]

    return step, [ws, first, second, powers]


def sparse_updates() -> tuple[Body, Sequence[Any]]:
    table, ws = tf.Variable(normal(SIDE, SIDE)), matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        ids = tf.cast(tf.abs(x[:, 0]) * 60, tf.int32)
        with tf.GradientTape() as tape:
            loss = loss_of(tf.gather(table, ids) + x, ws)
        rows, *gradients = tape.gradient(loss, [table, *ws])
        assert isinstance(rows, tf.IndexedSlices)
        table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        update(ws, gradients)
        return [loss]

    return step, [table, ws]


def keras_model() -> tuple[Body, Sequence[Any]]:
    """Moving averages, dropout, regularisation losses, metrics."""
    dense = keras.layers.Dense
    model = keras.Sequential(
        [
            dense(SIDE, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            dense(SIDE, activation="gelu"),
            keras.layers.Dropout(0.3, seed=3),
            dense(SIDE, activation="tanh"),
            keras.layers.Dropout(0.3, seed=4),
            dense(SIDE),
        ]
    )
    model.build((SIDE, SIDE))
    optimizer = O.Adam(0.01)
    optimizer.build(model.trainable_variables)
    metrics = [keras.metrics.Mean(), keras.metrics.RootMeanSquaredError()]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_mean(tf.square(y)) + sum(model.losses)
        weights = model.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        metrics[0].update_state(loss)
        metrics[1].update_state(x, y)
        return [loss, *(metric.result() for metric in metrics)]

    return step, [model, optimizer, metrics]


def adversarial() -> tuple[Body, Sequence[Any]]:
    """The generator's loss reads the discriminator's weights after their update."""
    g = [keras.Variable(w.numpy()) for w in matrices(3)]
    d = [keras.Variable(w.numpy()) for w in matrices(3, seed=9)]
    of_g, of_d = O.Adam(0.01), O.Adam(0.01)
    of_g.build(g)
    of_d.build(d)

    def read(variables: list[Any]) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(v) for v in variables]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            fake = tf.stop_gradient(layers(x, read(g)))
            of_fake = tf.reduce_mean(tf.nn.softplus(layers(fake, read(d))))
            first = of_fake + tf.reduce_mean(tf.nn.softplus(-layers(x * 0.5, read(d))))
        of_d.apply_gradients(zip(tape.gradient(first, [v.value for v in d]), d, strict=True))
        with tf.GradientTape() as tape:
            fooled = layers(layers(x, read(g)), read(d))
            second = tf.reduce_mean(tf.nn.softplus(-fooled))
        of_g.apply_gradients(zip(tape.gradient(second, [v.value for v in g]), g, strict=True))
        return [first, second]

    return step, [g, d, of_g, of_d]


def updated_in_between() -> tuple[Body, Sequence[Any]]:
    """One forward pass through g; d is updated before the second loss goes through it."""
    g, d = matrices(2), matrices(2, seed=9)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            fake = layers(x, g)
            first = tf.reduce_mean(tf.square(layers(fake, d)))
        update(d, tape.gradient(first, d))
        with tape:
            second = -tf.reduce_mean(tf.abs(layers(fake, d)))
        update(g, tape.gradient(second, g))
        return [first, second]

    return step, [g, d]


def gradient_penalty() -> tuple[Body, Sequence[Any]]:
    ws = matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = loss_of(x, ws)
            slope = inner.gradient(loss, x)
            loss += tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
        update(ws, outer.gradient(loss, ws))
        return [loss]

    return step, [ws]


def second_order() -> tuple[Body, Sequence[Any]]:
    ws = matrices(3)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        loss = loss_of(x, ws)
        first = tf.gradients(loss, ws)
        second = tf.gradients(tf.add_n([tf.reduce_sum(g * g) for g in first]), ws)
        update(ws, first)
        update(ws, second, 0.01)
        return [loss]

    return step, [ws]


def several_losses() -> tuple[Body, Sequence[Any]]:
    ws = matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            h = layers(x, ws[:3])
            first = tf.reduce_mean(h * h)
            second = tf.reduce_mean(tf.abs(layers(h, ws[3:])))
        of_first = tape.gradient(first, ws[:3])
        update(ws, tape.gradient(second, ws))
        update(ws[:3], of_first)
        return [first, second]

    return step, [ws]


def shared_layers() -> tuple[Body, Sequence[Any]]:
    """Weights used twice, and once more transposed."""
    ws = matrices(3)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            h = tf.matmul(layers(x, [*ws, *ws]), ws[0], transpose_b=True)
            loss = tf.reduce_mean(tf.square(h - x))
        update(ws, tape.gradient(loss, ws))
        return [loss]

    return step, [ws]


def read_again() -> tuple[Body, Sequence[Any]]:
    """Weights that are read before, and used again after their update; averages of them."""
    ws = matrices(3)
    averages = [tf.Variable(w) for w in ws]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        before = [w.read_value() for w in ws]
        loss = descend(x, ws)
        for a, w in zip(averages, ws, strict=True):
            a.assign(0.9 * a + 0.1 * w)
        moved = [tf.reduce_sum(tf.abs(w - b)) for w, b in zip(ws, before, strict=True)]
        return [loss, loss_of(x, ws), *moved]

    return step, [ws, averages]


def several_updates() -> tuple[Body, Sequence[Any]]:
    """A step to where it is worst, and from there (sharpness-aware minimisation)."""
    ws = matrices(3)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            first = loss_of(x, ws)
        climbs = [0.01 * tf.sign(g) for g in tape.gradient(first, ws)]
        for w, climb in zip(ws, climbs, strict=True):
            w.assign_add(climb)
        with tf.GradientTape() as tape:
            second = loss_of(x, ws)
        gradients = tape.gradient(second, ws)
        for w, climb in zip(ws, climbs, strict=True):
            w.assign_sub(climb)
        update(ws, gradients)
        return [first, second]

    return step, [ws]


def swapped() -> tuple[Body, Sequence[Any]]:
    """Variables whose new values are computed from each other's old ones."""
    a, b = matrices(2), matrices(2, seed=5)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(x, a + b)
        for v, w, g in zip(a, b, tape.gradient(loss, a), strict=True):
            old = v.read_value()
            v.assign(w - 0.1 * g)
            w.assign(old)
        return [loss]

    return step, [a, b]


def in_branches() -> tuple[Body, Sequence[Any]]:
    ws, count = matrices(), tf.Variable(0)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(x, ws)
        gradients = tape.gradient(loss, ws)
        count.assign_add(1)
        for w, g in zip(ws, gradients, strict=True):
            tf.cond(
                tf.reduce_sum(g) > 0,
                lambda w=w, g=g: w.assign_sub(0.1 * g).read_value()[0, 0],
                lambda w=w, g=g: w.assign_add(g).read_value()[0, 0],
            )
        return [loss, count.read_value()]

    return step, [ws, count]


def effects() -> tuple[Body, Sequence[Any]]:
    """Randomness with a state, assertions, Python functions, a memory of activations."""
    ws, bank = matrices(), tf.Variable(tf.zeros([SIDE, SIDE]))
    generator = tf.random.Generator.from_seed(3)
    seen: list[float] = []

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            h = layers(x + 0.1 * bank, ws[:2])
            bank.assign(0.5 * h)
            tf.debugging.assert_less(tf.reduce_max(h), 100.0)
            h = tf.nn.dropout(h * generator.uniform(h.shape) + bank, 0.3, seed=7)
            tf.py_function(lambda v: seen.append(float(v)), [tf.reduce_max(h)], [])
            bank.assign_add(h)
            loss = loss_of(h + generator.normal(h.shape), ws[2:])
        gradients = tape.gradient(loss, ws)
        for g in gradients:
            tf.debugging.assert_all_finite(g, "a gradient is no number")
        update(ws, gradients)
        total = tf.py_function(lambda: np.float32(sum(seen)), [], tf.float32)
        total.set_shape([])
        return [loss, total]

    return step, [ws, bank, generator.state]


STEPS: dict[str, Make] = {
    make.__name__: make
    for make in (
        fused_adam, sparse_updates, keras_model, adversarial, updated_in_between,
        gradient_penalty, second_order, several_losses, shared_layers, read_again,
        several_updates, swapped, in_branches, effects,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    check(whole(STEPS[name]))


@pytest.mark.parametrize("name", ["fused_adam", "read_again"])
def test_steps_with_all_updates_last(name: str) -> None:
    check(whole(STEPS[name]), updates="last")


def test_a_budget_is_kept_to() -> None:
    check_budget(whole(fused_adam), 0.5)


def test_early_updates_need_less_memory_and_change_nothing() -> None:
    """Twelve layers on a small batch: what counts are the gradients."""

    def make() -> tuple[Body, Sequence[Any]]:
        ws = matrices(12)
        return lambda x: [descend(x[:8], ws)], [ws]

    found = {u: train(whole(make), {"strategy": "store_all"}, u) for u in ("early", "last")}
    assert_same(found["early"].outputs, found["last"].outputs)
    assert_same(found["early"].variables, found["last"].variables)
    assert found["early"].peak < found["last"].peak - 8 * BYTES
    assert found["early"].peak <= found["early"].plans[0].predicted_peak
    assert found["early"].plans[0].live_peak < found["last"].plans[0].live_peak - 8 * BYTES


KERAS_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "clipped": lambda: keras.optimizers.Adam(1e-3, clipnorm=1.0),
    "decayed": lambda: keras.optimizers.AdamW(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", KERAS_OPTIMIZERS)
def test_optimizers_of_keras_update_early(name: str) -> None:
    """Neither do gradients wait for each other, nor is anything computed before they are there."""

    def make() -> tuple[Body, Sequence[Any]]:
        ws = matrices(12)
        optimizer = KERAS_OPTIMIZERS[name]()
        optimizer.build(ws)

        def step(x: tf.Tensor) -> list[tf.Tensor]:
            loss = loss_of(x[:8], ws)
            optimizer.apply_gradients(zip(tf.gradients(loss, ws), ws, strict=True))
            return [loss]

        return step, [ws, optimizer]

    found = {u: train(whole(make), {"strategy": "store_all"}, u) for u in ("early", "last")}
    assert_same(found["early"].outputs, found["last"].outputs)
    assert_same(found["early"].variables, found["last"].variables)
    early, last = (found[u].plans[0].live_peak for u in ("early", "last"))
    assert early < last - 8 * BYTES
    assert found["early"].peak < found["last"].peak - 6 * BYTES


# --- Several whole steps, and what is around them -------------------------------------------------

Placed = Callable[[Around], tuple[Body, Sequence[Any]]]


def two_in_a_row(around: Around) -> tuple[Body, Sequence[Any]]:
    """As Keras' steps_per_execution; both read what is computed before them."""
    ws, count = matrices(), tf.Variable(0.0)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        x = tf.nn.relu(x) * 2.0
        losses = []
        for _ in range(2):
            with around():
                losses.append(descend(x, ws))
                count.assign_add(1.0)
        return losses

    return step, [ws, count]


def on_one_forward_pass(around: Around) -> tuple[Body, Sequence[Any]]:
    """The second step begins at a tensor of the first."""
    ws = matrices(6)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with around() as keep:
            with tf.GradientTape() as tape:
                h = layers(x, ws[:3])
                first = tf.reduce_mean(h * h)
            update(ws[:3], tape.gradient(first, ws[:3]))
            keep(h)
        with around():
            second = descend(h, ws[3:])
        return [first, second]

    return step, [ws]


def in_a_loop(around: Around) -> tuple[Body, Sequence[Any]]:
    ws = matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def body(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            for _ in range(2):
                with around() as keep:
                    loss = descend(x * tf.cast(i + 1, tf.float32), ws)
                    keep(loss)
            return i + 1, loss

        return [tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]]

    return step, [ws]


def in_a_branch(around: Around) -> tuple[Body, Sequence[Any]]:
    ws = matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def branch() -> tf.Tensor:
            with around() as keep:
                loss = descend(x, ws)
                keep(loss)
            return loss

        return [tf.cond(tf.reduce_sum(x) < 1e9, branch, lambda: loss_of(x * 2.0, ws))]

    return step, [ws]


def nested(around: Around) -> tuple[Body, Sequence[Any]]:
    """The outer context holds, so that what comes after the inner one is planned, too."""
    ws = matrices()

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with around():
            with around() as keep, tf.GradientTape() as tape:
                loss = loss_of(x, ws)
                keep(loss)
            update(ws, tape.gradient(loss, ws))
        return [loss]

    return step, [ws]


def used_before_and_after(around: Around) -> tuple[Body, Sequence[Any]]:
    """Variables that are assigned before, read within, and assigned once more."""
    ws, bank, scale = matrices(), tf.Variable(tf.zeros([SIDE, SIDE])), tf.Variable(1.0)

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        bank.assign_add(x * 0.1)
        scale.assign(1.0 + 0.1 * tf.reduce_mean(tf.tanh(bank)))
        x = x + tf.tanh(bank)
        with around() as keep:
            with tf.GradientTape() as tape:
                h = layers(x, ws[:2])
                loss = loss_of(h, ws[2:]) * scale
            gradients = tape.gradient(loss, ws)
            update(ws, gradients)
            keep([h, gradients[0]])
        bank.assign(h)
        scale.assign_add(tf.reduce_sum(gradients[0]))
        return [loss, loss_of(x, ws), tf.reduce_sum(h)]

    return step, [ws, bank, scale]


def joined_gradients(around: Around) -> tuple[Body, Sequence[Any]]:
    """An IdentityN with a gradient of its own is no join to be bypassed."""
    ws = matrices(3)

    @tf.custom_gradient
    def doubled(*gradients: tf.Tensor) -> Any:
        return list(gradients), lambda *above: [2.0 * a for a in above]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with around():
            loss = loss_of(x, ws)
            first = doubled(*tf.gradients(loss, ws))
            norm = tf.add_n([tf.reduce_sum(g * g) for g in first])
            second = tf.gradients(norm, ws)
            update(ws, first)
            update(ws, second, 0.001)
        return [loss]

    return step, [ws]


PLACES: dict[str, Placed] = {
    make.__name__: make
    for make in (
        two_in_a_row, on_one_forward_pass, in_a_loop, in_a_branch, nested,
        used_before_and_after, joined_gradients,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_where_whole_steps_stand(name: str) -> None:
    count = {"two_in_a_row": 2, "on_one_forward_pass": 2, "in_a_loop": 2}.get(name, 1)
    assert len(check(PLACES[name]).plans) == count


def test_a_budget_of_several_steps_is_kept_to() -> None:
    check_budget(two_in_a_row, 0.6)


def test_between_other_gradients() -> None:
    """Planned gradients and plain ones before and after, with updates that nobody plans."""
    ws = matrices()

    def make(around: Around) -> tuple[Body, Sequence[Any]]:
        for w, start in zip(ws, matrices(), strict=True):
            w.assign(start)

        def call(loss: tf.Tensor) -> list[tf.Tensor]:
            if around.options is None:
                return tf.gradients(loss, ws)
            options = {"strategy": "sqrt_n", "config": config()}
            return optckpt.gradients(loss, ws, **options)

        def step(x: tf.Tensor) -> list[tf.Tensor]:
            losses = [loss_of(x, ws)]
            update(ws, call(losses[-1]))
            with around():
                losses.append(descend(x, ws))
            losses.append(loss_of(x, ws))
            update(ws, call(losses[-1]))
            losses.append(descend(x, ws))
            return losses

        return step, [tf.Variable(w) if around is None else w for w in ws]

    plain, values = [], []
    for options in (None, {"strategy": "sqrt_n"}):
        found = Trained()
        body, trained = make(Around(found, "early", options))
        function = tf.function(body, autograph=False)
        with grappler_off():
            outputs = [t.numpy() for i in range(3) for t in function(tf.constant(normal(64, SIDE)))]
        plain.append(outputs)
        values.append([v.numpy() for v in flat_variables(trained)])
    assert_same(*plain)
    assert_same(*values)


# --- Random steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    step = RandomStep(seed + 20, operations=4)
    plans: list[Plan] = []

    def trained(strategy: Strategy | str) -> list[np.ndarray]:
        settings = config(("early", "last")[seed % 2])
        return step.train(
            lambda: whole_step(strategy=strategy, config=settings, on_plan=plans.append), steps=2
        )

    with caplog.at_level(logging.DEBUG, "optckpt.frontends.tf_sums"):
        expected = trained("store_all")
    if "depends on timing" not in caplog.text:
        assert_same(step.train(contextlib.nullcontext, steps=2), expected)
    scheduler = (random_schedule(seed), random_order(seed))[seed // 2 % 2]
    assert_same(trained(following(scheduler)), expected)
    assert any(len(plan.schedule) > len(set(plan.schedule.executions)) for plan in plans)


# --- The context ----------------------------------------------------------------------------------


def is_as_before() -> bool:
    return (
        backprop.GradientTape.gradient.__module__ == "tensorflow.python.eager.backprop"
        and gradients_util._GradientsHelper.__module__ == "tensorflow.python.ops.gradients_util"
    )


def test_gradients_are_taken_as_before_when_the_context_has_ended() -> None:
    ws = matrices(2)
    inside: list[bool] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor, fails: bool) -> tf.Tensor:
        with whole_step(strategy="store_all", config=config()):
            inside.append(is_as_before())
            loss = descend(x, ws)
            if fails:
                raise ZeroDivisionError
        return loss

    assert is_as_before()
    x = tf.constant(normal(64, SIDE))
    with pytest.raises(ZeroDivisionError):
        step(x, True)
    assert is_as_before()
    step(x, False)
    assert is_as_before()
    assert inside == [False, False]


def test_threads_do_not_notice_each_other() -> None:
    """Four threads trace at the same time, every other one with a whole step."""
    ready = threading.Barrier(4)
    found: dict[int, list[Any]] = {}
    graphs: dict[int, tf.Graph] = {}
    plans: dict[int, list[Plan]] = {n: [] for n in range(4)}
    models = [matrices(3) for _ in range(4)]

    def run(n: int) -> None:
        ws = models[n]
        around = Around(Trained(plans=plans[n]), "early", {"strategy": "sqrt_n"})

        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            graphs[n] = tf.compat.v1.get_default_graph()
            ready.wait(30)
            with around() if n % 2 else contextlib.nullcontext():
                loss = loss_of(x, ws)
                ready.wait(30)
                gradients = tf.gradients(loss, ws) if n < 2 else None
                if gradients is None:
                    with tf.GradientTape() as tape:
                        loss = loss_of(x, ws)
                    gradients = tape.gradient(loss, ws)
                ready.wait(30)
                update(ws, gradients)
            return [loss]

        with grappler_off():
            found[n] = [t.numpy() for t in step(tf.constant(normal(SIDE, SIDE)))]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_as_before()
    for n in (0, 2):
        assert_same(found[n], found[n + 1])
        assert_same([v.numpy() for v in models[n]], [v.numpy() for v in models[n + 1]])
    assert [len(plans[n]) for n in range(4)] == [0, 1, 0, 1]
    clones = [sum("_again" in op.name for op in graphs[n].get_operations()) for n in range(4)]
    assert clones[0] == clones[2] == 0 < min(clones[1], clones[3])


def test_there_is_nothing_to_plan_in_eager_mode() -> None:
    text = r"whole_step plans a graph.*@tf\.function"
    with pytest.raises(CaptureError, match=text), whole_step("60%"):
        raise AssertionError("the context was entered")


def test_a_session_decides_itself_what_runs() -> None:
    text = r"v1 graph.*optckpt\.gradients"
    with tf.Graph().as_default(), pytest.raises(CaptureError, match=text), whole_step("60%"):
        raise AssertionError("the context was entered")


def test_gradients_in_a_loop_are_out_of_sight() -> None:
    ws = matrices(2)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, descend(x, ws)

        with whole_step("60%", config=config()):
            return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]

    with pytest.raises(CaptureError, match=r"gradients were taken in 'while_body.*whole_step in"):
        step(tf.constant(normal(64, SIDE)))
    assert is_as_before()


def test_a_step_without_gradients_is_said_to_be_unplanned(caplog: pytest.LogCaptureFixture) -> None:
    ws = matrices(2)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with whole_step("60%", config=config()):
            return loss_of(x, ws)

    with caplog.at_level(logging.WARNING, "optckpt.step"):
        step(tf.constant(normal(64, SIDE)))
    assert "no gradients were taken" in caplog.text


def test_forward_mode_is_refused_on_a_tape_and_said_to_need_more_in_a_whole_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ws = matrices(3)
    tangents = [tf.ones_like(w) for w in ws]

    def traced(x: tf.Tensor, whole: Any, tape: Callable[[], Any]) -> list[tf.Tensor]:
        with whole:
            with tf.autodiff.ForwardAccumulator(ws, tangents) as accumulator:
                with tape() as t:
                    loss = loss_of(x, ws)
                gradients = t.gradient(loss, ws)
            found = [accumulator.jvp(g) for g in gradients]
            for w, h in zip(ws, found, strict=True):
                w.assign_sub(h)
        return found

    def run(whole: Any, tape: Callable[[], Any]) -> None:
        step = tf.function(lambda x: traced(x, whole, tape), autograph=False)
        step.get_concrete_function(tf.TensorSpec((64, SIDE)))

    none = contextlib.nullcontext
    with pytest.raises(CaptureError, match=r"ForwardAccumulator.*put optckpt\.whole_step around"):
        run(none(), lambda: optckpt.GradientTape("90%", config=config()))
    with caplog.at_level(logging.WARNING, "optckpt.step"):
        run(whole_step(2**40, config=config()), tf.GradientTape)
    (record,) = [r for r in caplog.records if "ForwardAccumulator" in r.message]
    assert "more memory than predicted" in record.message
