"""Keras: `fit` and `train_on_batch` of a model within a budget.

`apply(model, budget)`, or `compile(model, ..., budget=...)` in the place of `model.compile`, and
the model trains as before, each training step within the budget: forward and backward pass,
metrics, the optimizer's update, and resident bytes, the optimizer's slots among them. Evaluation
and prediction stay as they are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from optckpt import keras_sizes, sizes
from optckpt.budget import AnyBudget, Budget
from optckpt.calibration import PlannedStep
from optckpt.config import Calibrate, Config
from optckpt.eager import own_tensors
from optckpt.errors import CaptureError, OptckptError
from optckpt.request import (
    Checkpoints,
    Request,
    Shapes,
    budget_beside,
    calibrated,
    covers,
)
from optckpt.schedule import Plan
from optckpt.solvers.registry import Strategy
from optckpt.step import whole_step

logger = logging.getLogger(__name__)

_TRAINING = "_optckpt_training"
"""Attribute of a model that trains within a budget."""


def apply(
    model: Any,
    budget: Budget | int | float | str | None = None,
    *,
    calibrate: Calibrate | None = None,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    config: Config | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Any:
    """Let `model` train within `budget` bytes; returns the model.

    The model may be compiled before or after, and again; what it is compiled with is kept, but for
    `jit_compile`, which is off for training (XLA undoes recomputation; a notice is logged). A
    `train_step` of the model's own is planned like Keras', with all gradients it takes. What is
    saved, cloned or pickled of the model knows nothing of the budget.

    A step is planned when it is traced: for each batch size of `fit`, once. The last, smaller batch
    of an epoch follows the plan of the others; a batch larger than all before is planned anew. With
    `train_on_batch` each size is planned; a budget that is a share of the plain step's peak is, for
    batches smaller than one before, as many bytes as for that.
    Batches are fetched one by one, also with `steps_per_execution`. Under a distribution strategy
    this holds for `fit` on arrays; of a data set whose last batch may be smaller the largest size
    that a replica gets has to be declared there (`sizes.batch`, or `optckpt.sizes.at`), or the data
    set made with drop_remainder=True.

    Args:
        budget: peak bytes on the device during a training step; see `optckpt.gradients`. On a CPU,
            data in memory and prefetched batches are on the device, too.
        calibrate: measure the first steps of each epoch and plan again if the peak is above the
            budget; "seen": only once a step is seen above it; False: only warn then. See
            `optckpt.calibration`. None: as the configuration says.
        max_overhead, strategy, checkpoints, config, plan, on_plan: as for `optckpt.gradients`.

    Raises:
        OptckptError: if an argument is not what it should be, or Keras does not run on TensorFlow.
            Training raises what `optckpt.gradients` raises, when the step is traced, and
            CaptureError for a model that was compiled with `run_eagerly=True`.
    """
    if keras.backend.backend() != "tensorflow":
        raise OptckptError(
            f"optckpt.keras is for Keras on TensorFlow, and this Keras runs on "
            f"{keras.backend.backend()}: set the environment variable KERAS_BACKEND=tensorflow "
            "before Keras is imported"
        )
    _check_model(model)
    request = Request.of(
        budget,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        plan=plan,
        on_plan=on_plan,
    )
    options = {
        "max_overhead": max_overhead,
        "strategy": strategy,
        "checkpoints": checkpoints,
        "config": request.settings,
        "plan": request.plan,
    }
    wanted = calibrated(calibrate, request)
    remove(model)
    _Training(model, request, options, wanted).install()
    return model


def compile(
    model: Any,
    *args: Any,
    budget: Budget | int | float | str | None = None,
    calibrate: Calibrate | None = None,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    config: Config | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    **kwargs: Any,
) -> Any:
    """`model.compile(*args, **kwargs)`, and `apply` with the other arguments; returns the model.

    Raises:
        as `apply`, and CaptureError for `run_eagerly=True`.
    """
    apply(
        model,
        budget,
        calibrate=calibrate,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        plan=plan,
        on_plan=on_plan,
    )
    try:
        model.compile(*args, **kwargs)
        _refuse_eager(model)
    except BaseException:
        remove(model)
        raise
    _training(model).compiled_with_xla = kwargs.get("jit_compile")
    return model


def remove(model: Any) -> Any:
    """Let `model` train as Keras has it, without a budget; returns the model.

    Raises:
        OptckptError: if it is no keras.Model.
    """
    _check_model(model)
    training = model.__dict__.get(_TRAINING)
    if training is not None:
        training.uninstall()
    return model


def plan(model: Any) -> Plan:
    """The plan of the latest training step of `model`.

    Raises:
        OptckptError: if it has no budget, or has not been trained yet.
    """
    latest = _training(model).latest
    if latest is None or latest.plan is None:
        raise OptckptError(f"model {model.name!r} has no plan yet: train it on a batch first")
    return latest.plan


def plans(model: Any) -> dict[str, Plan]:
    """The plan of each signature with which `model` was trained since it was compiled.

    Raises:
        OptckptError: if it has no budget.
    """
    found = ((str(s), s.step.plan) for s in _training(model).steps)
    return {signature: plan for signature, plan in found if plan is not None}


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise OptckptError(f"a keras.Model is needed, got {type(model).__name__}")


def _training(model: Any) -> _Training:
    _check_model(model)
    training: _Training | None = model.__dict__.get(_TRAINING)
    if training is None:
        raise OptckptError(
            f"model {model.name!r} has no budget: give it one with optckpt.keras.apply or "
            "optckpt.keras.compile"
        )
    return training


def _refuse_eager(model: Any) -> None:
    if model.run_eagerly:
        raise CaptureError(
            f"model {model.name!r} is compiled with run_eagerly=True, and there is no graph to "
            "plan: compile it without"
        )
    if tf.config.functions_run_eagerly():
        raise CaptureError(
            "tf.config.run_functions_eagerly(True) is on, and there is no graph to plan: switch "
            f"it off to train model {model.name!r} within a budget"
        )


@dataclass(eq=False)
class _Signature:
    """What a training step was traced for."""

    spec: Any
    """TypeSpecs of the batch, perhaps with unknown sizes; None under a distribution strategy."""
    shapes: Shapes
    """Of the tensors of the batch that it was planned for; under a distribution strategy of a
    replica's, or () if its sizes are in the specs or unknown."""
    step: PlannedStep

    def covers(self, spec: Any, shapes: Shapes) -> bool:
        """Whether a batch of these sizes needs no more than what was planned."""
        return bool(self.spec == spec) and covers(self.shapes, shapes)

    def __str__(self) -> str:
        if self.spec is None:
            return " ".join(["distributed", *(str(list(s)) for s in self.shapes)])
        dtypes = [s.dtype.name for s in tf.nest.flatten(self.spec, True) if hasattr(s, "dtype")]
        return ", ".join(f"{d}{list(s)}" for d, s in zip(dtypes, self.shapes, strict=False))


class _Training:
    """The training of one model within a budget."""

    def __init__(
        self, model: Any, request: Request, options: dict[str, Any], calibrate: Calibrate
    ) -> None:
        self._model = model
        self._request = request
        self._options = options
        self._calibrate = calibrate
        self._iterator: weakref.ref[Any] | None = None
        """The latest one; a new one may come with other batches."""
        self.compiled_with_xla: Any = None
        """What `compile` was told of jit_compile, if it is known."""
        self.steps: list[_Signature] = []
        self.latest: PlannedStep | None = None
        self._said_unplanned = False

    # Keras asks the model for its training function whenever it begins to train. Set past Keras'
    # own bookkeeping of attributes, so that nothing of this is saved with the model.

    def install(self) -> None:
        object.__setattr__(self._model, _TRAINING, self)
        object.__setattr__(self._model, "make_train_function", self._make_train_function)
        self._model.train_function = None

    def uninstall(self) -> None:
        for name in (_TRAINING, "make_train_function"):
            object.__delattr__(self._model, name)
        self._model.train_function = None

    def _make_train_function(self, force: bool = False) -> Callable[[Any], Any]:
        model = self._model
        if model.train_function is None or force:
            _refuse_eager(model)
            self._notice_xla()
            self.steps.clear()
            self.latest = None
            model.train_function = self._train
        function: Callable[[Any], Any] = model.train_function
        return function

    def _notice_xla(self) -> None:
        model = self._model
        if not model.jit_compile:
            return
        chosen = self.compiled_with_xla is True or not model._resolve_auto_jit_compile()
        logger.log(
            logging.WARNING if chosen else logging.INFO,
            "model %r: jit_compile is off for training, because XLA would undo recomputation",
            model.name,
        )

    def _train(self, iterator: Any) -> Any:
        """Train on the next batch, or the next `steps_per_execution` batches."""
        _refuse_eager(self._model)
        self._build_slots()
        if isinstance(iterator, tf.distribute.DistributedIterator):
            replicas = self._model.distribute_strategy.num_replicas_in_sync
            shapes = keras_sizes.of_replicas(iterator, replicas, self._request.settings)
            with sizes.at(shapes) if shapes else nullcontext():
                return self._run(self._find(None, shapes, False), iterator)
        first = self._iterator is None or self._iterator() is not iterator
        self._iterator = weakref.ref(iterator)
        if first:
            # Batches are fetched otherwise than before, and what ran between the epochs has left
            # other chunks free.
            for signature in self.steps:
                signature.step.measure_again()
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if logs is None:
                    raise
                break
            batch = tf.nest.map_structure(_as_tensor, batch)
            spec = getattr(iterator, "element_spec", None)
            if spec is None:
                spec = tf.nest.map_structure(_spec_of, batch)
            logs = self._run(self._find(spec, _shapes(batch), first), batch)
            first = False
        return logs

    def _run(self, step: PlannedStep, data: Any) -> Any:
        self.latest = step
        logs = step(data)
        if step.plan is None and not self._said_unplanned:
            self._said_unplanned = True
            logger.warning(
                "model %r: its training step takes no gradients, so that nothing was planned",
                self._model.name,
            )
        return logs

    def _build_slots(self) -> None:
        """Create the optimizer's variables, so that they are there when the step is planned.

        A `train_step` of the model's own may never use this optimizer; what it creates itself is
        there when it is traced for the second time.
        """
        optimizer, model = self._model.optimizer, self._model
        if getattr(model.train_step, "__func__", None) is not keras.Model.train_step:
            return
        if model.built and getattr(optimizer, "built", True) is False and model.trainable_variables:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)

    def _find(self, spec: Any, shapes: Shapes, first: bool) -> PlannedStep:
        """The step for a batch; `first`: it is the first of an epoch, and so none of the rest."""
        covering = [s for s in self.steps if s.covers(spec, shapes)]
        declared = self._request.settings.sizes
        if first and not (declared.batch or declared.inputs):
            covering = [s for s in covering if s.shapes == shapes]
        if covering:
            return min(covering, key=lambda s: s.shapes).step
        found = PlannedStep(
            lambda planned, budget: self._function(planned, spec, shapes, budget),
            self._calibrate,
            self._request.on_plan,
            fetches=True,
        )
        self.steps.append(_Signature(spec, shapes, found))
        return found

    def _function(
        self, planned: PlannedStep, spec: Any, shapes: Shapes, budget: Budget | None
    ) -> Callable[[Any], Any]:
        """A training function of Keras' making whose step is planned for `budget`."""
        model = self._model
        plain_step = model.train_step

        def train_step(data: Any) -> Any:
            allowed: AnyBudget | None = budget
            if allowed is None:
                planned_before = ((s.shapes, s.step.plan) for s in self.steps)
                known = ((s, p) for s, p in planned_before if p is not None)
                allowed = budget_beside(self._request.budget, shapes, known)
            with whole_step(allowed, on_plan=planned.planned, **self._options) as step:
                logs = plain_step(data)
                step.keep(own_tensors(logs))
            return logs

        of_the_instance = model.__dict__.get("train_step")
        before = model.train_function, model.jit_compile
        object.__setattr__(model, "train_step", train_step)
        try:
            model.jit_compile = False
            type(model).make_train_function(model, force=True)
            function = model.train_function
        finally:
            model.train_function, model.jit_compile = before
            object.__delattr__(model, "train_step")
            if of_the_instance is not None:
                object.__setattr__(model, "train_step", of_the_instance)
        if spec is None:
            return function  # type: ignore[no-any-return]
        signature = [spec] if _is_unknown(spec) else None
        # TensorFlow takes functions of the same code for one that is traced again and again.
        one = partial(_on_one_batch, function)
        return tf.function(  # type: ignore[no-any-return]
            one, input_signature=signature, autograph=False
        )


def _on_one_batch(function: Callable[[Any], Any], data: Any) -> Any:
    return function([data])


def _as_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value) or isinstance(value, tf.experimental.Optional):
        return value
    return tf.convert_to_tensor(value)


def _spec_of(value: Any) -> Any:
    return None if value is None else tf.type_spec_from_value(value)


def _shapes(batch: Any) -> Shapes:
    leaves = tf.nest.flatten(batch, expand_composites=True)
    return tuple(tuple(t.shape) for t in leaves if hasattr(t, "shape"))


def _is_unknown(spec: Any) -> bool:
    """Whether a size is unknown in a structure of TypeSpecs."""
    return not all(
        s.shape.is_fully_defined()
        for s in tf.nest.flatten(spec, expand_composites=True)
        if hasattr(s, "shape")
    )
