"""What the command line trains: one training step, of a reference network or of the user's own.

A function of the user's own (`model: {function: "module:function"}` in a configuration) returns

- a compiled `keras.Model` with known inputs: its `train_step` on a synthetic batch, made as its
  inputs, outputs and loss ask for;
- `(model, batch)`: its `train_step` on this batch: x, (x, y) or (x, y, sample_weight);
- `(step, inputs)`: `step(*inputs)` takes gradients and does with them what a step does.

Each is a whole step: optimizer slots, updates and metrics are within the budget. Of a reference
network the step ends with its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from optckpt import call, models
from optckpt.batch import synthetic_batch
from optckpt.config import Config
from optckpt.eager import own_tensors
from optckpt.errors import CaptureError, OptckptError
from optckpt.frontends.tensorflow import Capture
from optckpt.models.layers import Step
from optckpt.models.params import UserModel
from optckpt.step import capture_gradients, seen_step, whole_step
from optckpt.user_code import made_by

LEARNING_RATE = 1e-3
"""Of what `record` does with gradients that nothing else is done with."""


class Workload(Protocol):
    """One training step, always on the same batch."""

    name: str
    inputs: tuple[Any, ...]
    """What the step is called with: tensors, in structures."""

    def traced(self, plan: str | Path | None, settings: Config) -> Callable[..., Any]:
        """A tf.function of the step, traced: along the plan in this file, or plain (None)."""
        ...

    def captured(self, settings: Config) -> Capture:
        """The plain step, traced and captured."""
        ...

    def record(self, function: Callable[..., Any], steps: int) -> dict[str, Any]:
        """Take steps with what `traced` returned: name -> array of results and of final state."""
        ...


def load(settings: Config) -> Workload:
    """Make what `settings.model` says: variables, and one batch. Equal in every process.

    Raises:
        OptckptError: if there is no such function, it fails, or it returns something else.
    """
    params = settings.model
    if not isinstance(params, UserModel):
        return GradientsOfNetwork(models.build(params))
    return _of_user(params)


class GradientsOfNetwork:
    """Loss and gradients of a reference network."""

    def __init__(self, network: Step) -> None:
        self.name = network.name
        self.inputs = network.inputs
        self._network = network

    def traced(self, plan: str | Path | None, settings: Config) -> Callable[..., Any]:
        """See `Workload`."""
        if plan is None:
            return self._traced(tf.gradients)
        return self._traced(functools.partial(call.gradients, plan=plan, config=settings))

    def captured(self, settings: Config) -> Capture:
        """See `Workload`."""
        seen: list[Capture] = []

        def compute(ys: Any, xs: Any) -> Any:
            result = tf.gradients(ys, xs)
            seen.append(capture_gradients(ys, result, settings))
            return result

        self._traced(compute)
        return seen[0]

    def record(self, function: Callable[..., Any], steps: int) -> dict[str, Any]:
        """Losses and gradients of steps of gradient descent, and the moving averages."""
        network = self._network
        kept: dict[str, Any] = {}
        for step in range(steps):
            loss, gradients = function(*network.inputs)
            kept[f"{step}/loss"] = loss.numpy()
            for i, (variable, value) in enumerate(zip(network.variables, gradients, strict=True)):
                if value is None:
                    continue
                for j, part in enumerate(tf.nest.flatten(value, expand_composites=True)):
                    kept[f"{step}/gradient{i}.{j}"] = part.numpy()
                if isinstance(value, tf.IndexedSlices):
                    # TensorFlow's scatter adds rows of one index in no fixed order.
                    dense = np.zeros(variable.shape, variable.dtype.as_numpy_dtype)
                    np.add.at(dense, value.indices.numpy(), value.values.numpy())
                    value = dense
                variable.assign_sub(LEARNING_RATE * value)
        for i, variable in enumerate(network.state):
            kept[f"state{i}"] = variable.numpy()
        return kept

    def _traced(self, compute: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        network = self._network

        def step(*inputs: Any) -> Any:
            loss = network.loss(*inputs)
            return loss, compute(loss, list(network.variables))

        function = tf.function(step, autograph=False)
        function.get_concrete_function(*network.inputs)
        return function  # type: ignore[no-any-return]


class StepOfUser:
    """A whole step of the user's own."""

    def __init__(self, name: str, step: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self._step = step
        self._variables: Sequence[tf.Variable] = ()

    def traced(self, plan: str | Path | None, settings: Config) -> Callable[..., Any]:
        """See `Workload`."""
        if plan is None:
            return self._traced(nullcontext)
        return self._traced(lambda: whole_step(plan=plan, config=settings))

    def captured(self, settings: Config) -> Capture:
        """See `Workload`."""
        seen: list[Capture] = []
        self._traced(lambda: seen_step(settings, seen.append))
        if not seen:
            raise CaptureError(
                f"{self.name} takes no gradients, and there is nothing to plan: its step is to use "
                "tf.GradientTape or tf.gradients"
            )
        return seen[-1]

    def record(self, function: Callable[..., Any], steps: int) -> dict[str, Any]:
        """The results of some steps, and all variables that they use, at the end."""
        kept: dict[str, Any] = {}
        for step in range(steps):
            result = function(*self.inputs)
            for i, part in enumerate(tf.nest.flatten(result, expand_composites=True)):
                if tf.is_tensor(part):
                    kept[f"{step}/result{i}"] = part.numpy()
        for i, variable in enumerate(self._variables):
            kept[f"variable{i}"] = variable.numpy()
        return kept

    def _traced(self, context: Callable[[], Any]) -> Callable[..., Any]:
        def step(*inputs: Any) -> Any:
            with context() as planned:
                result = self._step(*inputs)
                if planned is not None:
                    planned.keep(own_tensors(result))
            return result

        function = tf.function(step, autograph=False)
        variables = function.get_concrete_function(*self.inputs).variables
        # TensorFlow has them in no order; they are numbered as they are created.
        self._variables = sorted(variables, key=lambda v: int(v._unique_id.rpartition("_")[2]))
        return function  # type: ignore[no-any-return]


def _of_user(params: UserModel) -> StepOfUser:
    import keras

    keras.utils.set_random_seed(params.seed)
    made, where = made_by(params), params.function
    if isinstance(made, keras.Model):
        return _of_model(made, synthetic_batch(made, params.batch_size, params.seed, where), where)
    if isinstance(made, tuple | list) and len(made) == 2:
        first, second = made
        if isinstance(first, keras.Model):
            return _of_model(first, second, where)
        if callable(first):
            inputs = second if isinstance(second, tuple | list) else (second,)
            convert = tf.__internal__.autograph.tf_convert
            status = tf.__internal__.autograph.control_status_ctx()
            step = convert(first, status, convert_by_default=True)
            return StepOfUser(params.name, step, _on_device(tuple(inputs)))
    raise OptckptError(
        f"{where} is to return a compiled keras.Model, (model, batch) or (step, inputs), but "
        f"returned {_described(made)}"
    )


def _of_model(model: Any, batch: Any, where: str) -> StepOfUser:
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise OptckptError(
            f"{where} returns a model that is not compiled: call model.compile(optimizer, loss)"
        )
    batch = _on_device(tuple(batch) if isinstance(batch, tuple | list) else (batch,))
    if not model.built:
        model(batch[0])
    if not getattr(model.optimizer, "built", True):
        model.optimizer.build(model.trainable_variables)
    return StepOfUser(model.name, model.train_step, (batch,))


def _on_device(structure: Any) -> Any:
    """The same values in tensors that the device's allocator has given; arrays may be Python's."""

    def copied(value: Any) -> Any:
        if value is None or isinstance(value, tf.Variable):
            return value
        tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
        return tf.nest.map_structure(
            lambda t: tf.raw_ops.DeepCopy(x=t), tensor, expand_composites=True
        )

    return tf.nest.map_structure(copied, structure)


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(v).__name__ for v in value)})"
    return type(value).__name__
