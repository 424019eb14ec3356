"""What every model of the zoo goes through: five plain steps, five within a budget, no difference.

A row is a function that builds a model and its training step for a `Way`, plain or budgeted. Both
runs must leave the same outputs and the same state in every bit; the budgeted one must stay within
its budget by the allocator's own figures, execute operations again where the row says so, and cause
no warning.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_process import PeakError
from tf_support import counted

import optckpt
from optckpt.config import Config, MemoryConfig
from optckpt.errors import InfeasibleBudgetError
from optckpt.frontends.tf_ops import MARK
from optckpt.schedule import Plan

STEPS = 5
DEVICE = "CPU:0"
QUICK = Config.model_validate(
    {
        "costs": {"model": "flops"},
        # Of a few MiB, a chunk that threads have cut otherwise is more than 3 %.
        "memory": {"margin": 0.08},
        "solver": {"time_limit": 8.0, "gap": 0.2, "threads": 1},
        "plans": {"cache": False},
    }
)
WAYS = (
    "gradients",
    "GradientTape",
    "whole_step",
    "value_and_gradients",
    "keras.apply",
    "keras.compile",
    "budgeted",
    "patch",
)
"""The ways in that rows may name."""

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Trial:
    """A model and how it trains."""

    run: Callable[[Watch], list[Any]]
    """Takes `STEPS` steps, each between `Watch.begin` and `Watch.end`; returns their outputs."""
    state: Callable[[], Any]
    """A nested structure of all that the steps may have changed: variables, arrays, counts."""


def loop(step: Callable[..., Any], batches: Sequence[tuple[Any, ...]], state: Any = ()) -> Trial:
    """Training by `step(*batch) -> outputs`.

    `batches`: arrays, or functions that make other tensors; `state`: variables, or a function that
    gets them.
    """

    def run(watch: Watch) -> list[Any]:
        outputs = []
        for batch in itertools.islice(itertools.cycle(batches), STEPS):
            tensors = [_tensor(part) for part in batch]
            watch.begin()
            result = step(*tensors)
            watch.end()
            outputs.append(arrays(result))
            del result, tensors
        return outputs

    return Trial(run, state if callable(state) else lambda: state)


def _tensor(value: Any) -> Any:
    return value() if callable(value) else counted(value)


def fit(model: keras.Model, *data: Any, batch: int, **options: Any) -> Trial:
    """Training by `model.fit` on a data set of the batches of `data`: (x, y), (x, y, weights)."""
    dataset = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0])
    dataset = dataset.batch(batch, drop_remainder=True).repeat().take(STEPS * spe(model))
    # On a CPU the batch that is fetched in advance is on the device, from the second step on.
    once = tf.data.Options()
    once.experimental_optimization.inject_prefetch = False
    dataset = dataset.with_options(once)

    def run(watch: Watch) -> list[Any]:
        log = _Log(watch)
        model.fit(dataset, callbacks=[log], shuffle=False, verbose=0, **options)
        return [*log.outputs, arrays(tf.nest.flatten(model.history.history))]

    return Trial(run, lambda: everything_of(model))


def spe(model: keras.Model) -> int:
    """Steps that one execution of the training function takes."""
    return int(getattr(model, "steps_per_execution", 1) or 1)


def everything_of(model: keras.Model, optimizer: Any = None) -> list[Any]:
    """All variables of a model: weights, averages, seeds, metrics, the optimizer's slots."""
    optimizer = optimizer or getattr(model, "optimizer", None)
    metrics = getattr(model, "metrics_variables", [])
    return [*model.variables, *metrics, *(optimizer.variables if optimizer else [])]


class _Log(keras.callbacks.Callback):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.outputs: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._watch.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._watch.end()
        self.outputs.append(arrays(tf.nest.flatten(dict(sorted((logs or {}).items())))))


class Watch:
    """The allocator's peaks of training steps, but for the first, in which they are traced."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._steps = 0

    def begin(self) -> None:
        if self._steps:
            tf.config.experimental.reset_memory_stats(DEVICE)

    def end(self) -> None:
        if self._steps:
            tf.test.experimental.sync_devices()
            self.peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
        self._steps += 1


def arrays(structure: Any) -> Arrays:
    """Copies of what is in a nested structure of tensors, variables, numbers and Nones."""
    found = []
    for leaf in tf.nest.flatten(structure, expand_composites=True):
        value = leaf.value if isinstance(leaf, keras.Variable) else leaf
        found.append(np.array(value.numpy() if hasattr(value, "numpy") else value))
    return found


class Way:
    """How a row takes its gradients: as TensorFlow does."""

    def gradients(self, ys: Any, xs: Any, **options: Any) -> Any:
        return tf.gradients(ys, xs, **options)

    def tape(self, **options: Any) -> Any:
        return tf.GradientTape(**options)

    def whole_step(self) -> Any:
        return contextlib.nullcontext(_Unplanned())

    def patch(self) -> Any:
        return contextlib.nullcontext()

    def keras(self, model: keras.Model) -> keras.Model:
        return model

    def compile(self, model: keras.Model, *args: Any, **options: Any) -> keras.Model:
        model.compile(*args, **options)
        return model

    def budgeted(self, fn: Callable[..., Any], share: float) -> Callable[..., Any]:
        """`share`: the budget of the part, of what it needs itself."""
        del share
        return fn

    def value_and_gradients(
        self, fn: Callable[..., Any], variables: Any, optimizer: Any = None, has_aux: bool = False
    ) -> Callable[..., Any]:
        flat = tf.nest.flatten(variables)
        if optimizer is not None:
            optimizer.build(flat)

        @tf.function
        def step(*args: Any) -> Any:
            with tf.GradientTape() as tape:
                output = fn(*args)
                value = output[0] if has_aux else output
                loss = value if optimizer is None else optimizer.scale_loss(value)
            gradients = tape.gradient(loss, flat)
            if optimizer is None:
                return output, tf.nest.pack_sequence_as(variables, gradients)
            optimizer.apply_gradients(zip(gradients, flat, strict=True))
            return output, None

        return step


class _Unplanned:
    def keep(self, tensors: Any) -> None:
        del tensors


class Budgeted(Way):
    """How a row takes its gradients: within a budget."""

    def __init__(self, budget: int, margin: float | None = None) -> None:
        self.budget = budget
        self.plans: list[Plan] = []
        self.clones = 0
        """Operations that stand in the traced graphs once more."""
        memory = QUICK.memory if margin is None else MemoryConfig(margin=margin)
        config = QUICK.model_copy(update={"memory": memory})
        self._options = {"budget": budget, "config": config, "on_plan": self._planned}

    def _planned(self, plan: Plan) -> None:
        self.plans.append(plan)
        for op in tf.compat.v1.get_default_graph().get_operations():
            with contextlib.suppress(ValueError):
                self.clones += bool(op.get_attr(MARK))

    def gradients(self, ys: Any, xs: Any, **options: Any) -> Any:
        return optckpt.gradients(ys, xs, **self._options, **options)

    def tape(self, **options: Any) -> Any:
        return optckpt.GradientTape(**self._options, **options)

    def whole_step(self) -> Any:
        return optckpt.whole_step(**self._options)

    def patch(self) -> Any:
        return optckpt.patch(**self._options)

    def keras(self, model: keras.Model) -> keras.Model:
        return optckpt.keras.apply(model, **self._options)

    def compile(self, model: keras.Model, *args: Any, **options: Any) -> keras.Model:
        return optckpt.keras.compile(model, *args, **self._options, **options)

    def budgeted(self, fn: Callable[..., Any], share: float) -> Callable[..., Any]:
        return optckpt.budgeted(**{**self._options, "budget": share})(fn)

    def value_and_gradients(self, fn: Callable[..., Any], variables: Any, **options: Any) -> Any:
        return optckpt.value_and_gradients(fn, variables, **self._options, **options)


Build = Callable[[Way], Trial]


@dataclass(frozen=True)
class Row:
    """A model of the zoo."""

    name: str
    family: str
    way: str
    feature: str
    share: float
    """The budget: so much of what the plain run takes beyond what the process holds before it."""
    build: Build
    repeats: bool = True
    """Whether the budget can only be met by executing operations again."""
    plans: int = 1
    """How many plans are made for it."""
    margin: float | None = None
    """`memory.margin`, where the peak is known to be predicted too low; None: the default."""
    tolerance: float = 0.0
    """By how much numbers may differ from those of the plain run; 0: in no bit."""


@dataclass
class Family:
    """Rows of one kind."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def row(self, way: str, feature: str, share: float, **options: Any) -> Callable[[Build], Build]:
        """Decorator of a row's build function."""
        assert way in WAYS

        def add(build: Build) -> Build:
            name = build.__name__
            self.rows.append(Row(name, self.name, way, feature, share, build, **options))
            return build

        return add

    def test(self) -> Callable[[Row], None]:
        """The test of all rows, for pytest."""

        @pytest.mark.usefixtures("grappler_off")
        @pytest.mark.parametrize("row", self.rows, ids=lambda row: row.name)
        def test_trains_as_plain_within_its_budget(row: Row) -> None:
            check(row)

        return test_trains_as_plain_within_its_budget


def check(row: Row) -> Budgeted:
    """Run a row plain and budgeted and compare them; returns the budgeted way in."""
    before = _free_memory()
    outputs, state, peaks = _run(row, Way())
    # Nothing orders the plain step's operations, so that its peak differs from step to step.
    plain = min(peaks) - before
    way = Budgeted(_free_memory() + round(row.share * plain), row.margin)
    try:
        with _no_warnings():
            got_outputs, got_state, got_peaks = _run(row, way)
    except InfeasibleBudgetError as error:
        raise PeakError(f"the plain steps peaked at {peaks}: {error}") from error

    _assert_same("outputs", got_outputs, outputs, row.tolerance)
    _assert_same("state", got_state, state, row.tolerance)
    assert len(got_peaks) == len(peaks) >= STEPS - 1
    if any(p.calibrated for p in way.plans):
        raise PeakError(f"a step peaked above {way.budget} and was planned again: {got_peaks}")
    assert len(way.plans) == row.plans
    predicted = [p.predicted_peak for p in way.plans]
    if not 0 < max(*got_peaks, *predicted) <= way.budget:
        raise PeakError(f"{got_peaks}, predicted {predicted}; {way.budget} allowed, plain {peaks}")
    again = [len(p.schedule) - len(set(p.schedule.executions)) for p in way.plans]
    assert bool(way.clones) == any(again) == row.repeats
    if row.repeats:
        assert max(peaks) - before > way.budget - _free_memory(), "the plain step needs no plan"
    return way


def _run(row: Row, way: Way) -> tuple[list[Any], Arrays, list[int]]:
    keras.utils.set_random_seed(1)
    watch = Watch()
    trial = row.build(way)
    outputs = trial.run(watch)
    state = arrays(trial.state())
    keras.config.set_dtype_policy("float32")
    return outputs, state, watch.peaks


def _free_memory() -> int:
    """Free what earlier runs have left; returns the bytes that the device still holds."""
    keras.backend.clear_session()
    gc.collect()
    return int(tf.config.experimental.get_memory_info(DEVICE)["current"])


def _assert_same(what: str, got: list[Any], expected: list[Any], tolerance: float = 0.0) -> None:
    assert len(got) == len(expected) > 0
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if isinstance(b, list):
            _assert_same(f"{what} {i}", a, b, tolerance)
        else:
            assert a.dtype == b.dtype
            if tolerance:
                np.testing.assert_allclose(a, b, tolerance, tolerance, err_msg=f"{what} {i}")
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"{what} {i}")


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Python's warnings are errors in here; so are those that optckpt and TensorFlow log."""
    records = _Records()
    loggers = [logging.getLogger(name) for name in ("optckpt", "tensorflow", "absl")]
    for logger in loggers:
        logger.addHandler(records)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(records)
    if any("the allocator hands out whole chunks" in message for message in records.messages):
        raise PeakError(records.messages)
    assert not records.messages, records.messages


# --- Data and layers that rows share -------------------------------------------------------------


@functools.lru_cache
def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers that are the same in every run."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.lru_cache
def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Integers from 0 to `high` - 1 that are the same in every run."""
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def weight(*shape: int, seed: int = 0, dtype: str = "float32") -> tf.Variable:
    """A variable of moderate random numbers."""
    fan_in = int(np.prod(shape[:-1])) or 1
    # A product, as a variable made of an array would share its memory until it is assigned.
    return tf.Variable(tf.cast(tf.constant(normal(*shape, seed=seed)) * fan_in**-0.5, dtype))


def descend(variables: Sequence[Any], gradients: Sequence[Any], rate: float = 0.05) -> None:
    """A step of plain gradient descent."""
    for v, g in zip(variables, gradients, strict=True):
        if g is not None:
            v.assign_sub(tf.cast(rate, v.dtype) * tf.convert_to_tensor(g))
