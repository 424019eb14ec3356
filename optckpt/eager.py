"""Training steps from eager code: value and gradients of a Python function, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from optckpt.arguments import shown
from optckpt.budget import AnyBudget, Budget
from optckpt.calibration import PlannedStep
from optckpt.config import Calibrate, Config
from optckpt.errors import CaptureError, OptckptError
from optckpt.request import Checkpoints, Request, Shapes, budget_beside, calibrated
from optckpt.schedule import Plan
from optckpt.solvers.registry import Strategy
from optckpt.step import whole_step


def value_and_gradients(
    fn: Callable[..., Any],
    variables: Any,
    budget: Budget | int | float | str | None = None,
    *,
    optimizer: Any = None,
    update: bool = True,
    return_gradients: bool | None = None,
    has_aux: bool = False,
    calibrate: Calibrate | None = None,
    autograph: bool = True,
    max_overhead: float | None = None,
    strategy: str | Strategy | None = None,
    checkpoints: Checkpoints | None = None,
    config: Config | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> TrainingStep:
    """A training step for eager code: what `fn` returns, and its gradients, within `budget` bytes.

    Returns a function `step(*args, **kwargs) -> (value, gradients)` that calls `fn` with these
    arguments in a tf.function of its own. That is traced and planned once per signature (shapes
    and dtypes of tensors and arrays, values of everything else); pass as tensors the numbers that
    change from step to step.

    What the budget covers: variables, arguments, the forward and backward pass, and `value`,
    `aux` and the gradients that are returned. With an `optimizer` the whole step: its slots are
    created before planning, and the update is part of what is planned. Without one, what you do
    with the gradients comes on top, slots that are created later included; give the optimizer and
    `update=False` if you apply the gradients yourself, and its slots count from the beginning.

    Args:
        fn: returns the value: a tensor, or a structure of tensors of whose sum the gradients are
            taken. Of a tf.function, the Python function in it is planned.
        variables: a list, dict or nested structure of `tf.Variable`s or `keras.Variable`s.
        budget: peak bytes on the device during the step; see `optckpt.gradients`.
        optimizer: of Keras (its loss scaling is honoured), or anything with
            `apply_gradients(pairs)`; it updates the variables in each step.
        update: False: the optimizer only has its slots created.
        return_gradients: None: if there is no update. Otherwise None is returned in their place.
            The gradients of a scaled loss are returned as they are, scaled.
        has_aux: whether `fn` returns `(value, aux)`, and the step `((value, aux), gradients)`;
            `aux` is any structure of tensors.
        calibrate: measure the first steps of each signature and plan again if the peak is above
            the budget; "seen": only once a step is seen above it; False: only warn then. See
            `optckpt.calibration`. None: as the configuration says.
        autograph: whether `fn` may use Python's `if` and `while` on tensors.
        max_overhead, strategy, checkpoints, config, plan, on_plan: as for `optckpt.gradients`.

    Raises:
        OptckptError: if an argument is not what it should be (BudgetError, PlanError, ConfigError
            where they apply). The step raises what `optckpt.gradients` raises, when it is traced,
            and CaptureError where there is no eager mode.
    """
    request = Request.of(
        budget,
        max_overhead=max_overhead,
        strategy=strategy,
        checkpoints=checkpoints,
        config=config,
        plan=plan,
        on_plan=on_plan,
    )
    _check(fn, variables, optimizer)
    updates = optimizer is not None and update
    options = {
        "max_overhead": max_overhead,
        "strategy": strategy,
        "checkpoints": checkpoints,
        "config": request.settings,
        "plan": request.plan,
    }
    return TrainingStep(
        _python_function(fn, autograph),
        variables,
        optimizer,
        request,
        options,
        update=updates,
        return_gradients=not updates if return_gradients is None else return_gradients,
        has_aux=has_aux,
        calibrate=calibrated(calibrate, request),
    )


class TrainingStep:
    """What `value_and_gradients` returns: call it like the function it was made of."""

    def __init__(
        self,
        fn: Callable[..., Any],
        variables: Any,
        optimizer: Any,
        request: Request,
        options: dict[str, Any],
        *,
        update: bool,
        return_gradients: bool,
        has_aux: bool,
        calibrate: Calibrate,
    ) -> None:
        self._fn = fn
        self._variables = variables
        self._optimizer = optimizer
        self._request = request
        self._options = options
        self._update = update
        self._return_gradients = return_gradients
        self._has_aux = has_aux
        self._calibrate = calibrate
        self._steps: dict[str, PlannedStep] = {}
        self._shapes: list[tuple[Shapes, PlannedStep]] = []
        self._last: PlannedStep | None = None

    @property
    def plans(self) -> dict[str, Plan]:
        """The plan of each signature seen so far, in the order in which they were first seen."""
        return {key: step.plan for key, step in self._steps.items() if step.plan is not None}

    @property
    def last_plan(self) -> Plan:
        """The plan of the latest step. Raises OptckptError if there is none."""
        if self._last is None or self._last.plan is None:
            raise OptckptError("there is no plan yet: take a step first")
        return self._last.plan

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take a step: `(value, gradients)`, or `((value, aux), gradients)`."""
        if not tf.executing_eagerly():
            raise CaptureError(
                "a step of optckpt.value_and_gradients is for eager code: inside a tf.function use "
                "optckpt.gradients, optckpt.GradientTape or optckpt.whole_step"
            )
        if tf.config.functions_run_eagerly():
            raise CaptureError(
                "tf.config.run_functions_eagerly(True) is on, and there is no graph to plan: "
                "switch it off for a step of optckpt.value_and_gradients"
            )
        key = _signature(args, kwargs)
        step = self._steps.get(key)
        if step is None:
            self._build_slots()
            shapes = _shapes((args, kwargs))
            step = self._steps[key] = self._planned(shapes)
            self._shapes.append((shapes, step))
        self._last = step
        result: tuple[Any, Any] = step(*args, **kwargs)
        return result

    def _build_slots(self) -> None:
        """Create the optimizer's variables, so that they are there when the step is planned."""
        if getattr(self._optimizer, "built", True) is False:
            self._optimizer.build(tf.nest.flatten(self._variables))

    def _planned(self, shapes: Shapes) -> PlannedStep:
        def make(planned: PlannedStep, budget: Budget | None) -> Callable[..., Any]:
            allowed: AnyBudget | None = budget
            if allowed is None:
                known = ((s, step.plan) for s, step in self._shapes)
                plans = ((s, plan) for s, plan in known if plan is not None)
                allowed = budget_beside(self._request.budget, shapes, plans)
            # TensorFlow takes functions of the same code for one that is traced again and again.
            step = partial(self._trace, planned, allowed)
            return tf.function(step, autograph=False)  # type: ignore[no-any-return]

        return PlannedStep(make, self._calibrate, self._request.on_plan)

    def _trace(
        self, planned: PlannedStep, budget: AnyBudget | None, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        variables = tf.nest.flatten(self._variables)
        with whole_step(budget, on_plan=planned.planned, **self._options) as step:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([_of_tensorflow(v) for v in variables])
                output = self._fn(*args, **kwargs)
                value = _value_of(output) if self._has_aux else output
                _check_value(value)
                loss = value
                scale = getattr(self._optimizer, "scale_loss", None)
                if self._update and scale is not None:
                    loss = tf.nest.map_structure(scale, value)
            gradients = tape.gradient(loss, variables)
            step.keep(own_tensors(output))
            if self._update:
                self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
            if self._return_gradients:
                step.keep(own_tensors(gradients))
        if not self._return_gradients:
            return output, None
        return output, tf.nest.pack_sequence_as(self._variables, gradients)


def _shapes(structure: Any) -> Shapes:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return tuple(tuple(t.shape) for t in leaves if hasattr(t, "shape"))


def own_tensors(structure: Any) -> list[tf.Tensor]:
    """The tensors of the graph that is being traced, in a structure of anything."""
    graph = tf.compat.v1.get_default_graph()
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in leaves if getattr(t, "graph", None) is graph]


def _check(fn: Any, variables: Any, optimizer: Any) -> None:
    if not callable(fn):
        raise OptckptError(f"fn must be a function that returns the loss, got {type(fn).__name__}")
    flat = tf.nest.flatten(variables)
    if not flat:
        raise OptckptError(
            "variables is empty: build the model (call it once on a batch) before "
            "optckpt.value_and_gradients"
        )
    for v in flat:
        if not (hasattr(v, "handle") and hasattr(v, "assign")):
            raise OptckptError(
                "variables takes tf.Variables or keras.Variables, in a list, dict or nested "
                f"structure, got {type(v).__name__}"
            )
    if isinstance(optimizer, type):
        raise OptckptError(
            f"optimizer= takes an optimizer, got the class {optimizer.__name__}: make one of it, "
            f"{optimizer.__name__}(...)"
        )
    if optimizer is not None and not hasattr(optimizer, "apply_gradients"):
        raise OptckptError(
            "optimizer= takes a Keras optimizer, or an object with apply_gradients, got "
            f"{type(optimizer).__name__}"
        )


def _python_function(fn: Any, autograph: bool) -> Callable[..., Any]:
    """The function to trace: its operations must be in the step's own graph to be planned."""
    if getattr(fn, "_jit_compile", None):
        raise CaptureError(
            f"function {getattr(fn, '__name__', '?')!r} is compiled by XLA (jit_compile=True), "
            "which undoes recomputation: give optckpt.value_and_gradients the plain function"
        )
    inner: Callable[..., Any] = getattr(fn, "python_function", fn)
    if not autograph:
        return inner
    convert = tf.__internal__.autograph.tf_convert
    status = tf.__internal__.autograph.control_status_ctx()
    converted: Callable[..., Any] = convert(inner, status, convert_by_default=True)
    return converted


def _of_tensorflow(variable: Any) -> tf.Variable:
    """The tf.Variable that a keras.Variable has as its value."""
    return variable if callable(variable.value) else variable.value


def _value_of(output: Any) -> Any:
    if not isinstance(output, tuple) or len(output) != 2:
        raise OptckptError(
            f"has_aux=True: fn must return (value, aux), but returned {type(output).__name__}"
        )
    return output[0]


def _check_value(value: Any) -> None:
    for leaf in tf.nest.flatten(value):
        if not tf.is_tensor(leaf):
            raise OptckptError(
                "fn must return the loss as a tensor, or a structure of tensors, but returned "
                f"{shown(leaf)}: has it a return statement, and is the loss computed by TensorFlow?"
            )


def _signature(args: Any, kwargs: Any) -> str:
    """What a step is traced for, for people: "(float32[32, 10], int32[32]), training=True"."""
    shown: list[str] = [_describe(a) for a in args]
    shown += [f"{name}={_describe(kwargs[name])}" for name in sorted(kwargs)]
    return ", ".join(shown)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_describe, value)) + ")"
    if hasattr(value, "dtype") and hasattr(value, "shape") and not hasattr(value, "_type_spec"):
        dtype = tf.as_dtype(value.dtype).name
        return f"{dtype}{list(value.shape)}"
    if tf.is_tensor(value):
        return repr(tf.type_spec_from_value(value))
    return repr(value)
