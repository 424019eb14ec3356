"""The tape: tf.GradientTape whose gradients are computed within a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from optckpt.arguments import check_tensors
from optckpt.budget import Budget
from optckpt.config import Config
from optckpt.errors import CaptureError
from optckpt.frontends.tf_traced import as_traced
from optckpt.request import Checkpoints, Request
from optckpt.schedule import Plan
from optckpt.solvers.registry import Strategy
from optckpt.step import plan_gradients
from optckpt.xla import refuse_xla


class GradientTape(tf.GradientTape):  # type: ignore[misc]
    """`tf.GradientTape`, inside a tf.function, whose gradients are computed within `budget` bytes.

    Each call of `gradient` is planned as it is made, like a call of `optckpt.gradients`; a second
    one over the same forward pass (`persistent=True`) is planned on top of the first. Of nested
    tapes, the one whose gradients are those of the step is to be this one: it plans all that its
    gradients depend on, the inner tape's gradients included. Within `optckpt.whole_step` it plans
    nothing of its own.

    Args:
        budget: peak bytes on the device during the step, resident bytes included, up to the
            gradients; see `optckpt.gradients`.
        persistent, watch_accessed_variables: as for `tf.GradientTape`.
        max_overhead, strategy, checkpoints, config, plan, on_plan: as for `optckpt.gradients`.

    Raises:
        CaptureError: in eager mode, where XLA compiles in a way that cannot be planned, and by
            `jacobian` and `batch_jacobian`.
        BudgetError, PlanError, ConfigError: as `optckpt.gradients`.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __init__(
        self,
        budget: Budget | int | float | str | None = None,
        *,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        max_overhead: float | None = None,
        strategy: str | Strategy | None = None,
        checkpoints: Checkpoints | None = None,
        config: Config | str | Path | None = None,
        plan: Plan | str | Path | None = None,
        on_plan: Callable[[Plan], None] | None = None,
    ) -> None:
        self._request = Request.of(
            budget,
            max_overhead=max_overhead,
            strategy=strategy,
            checkpoints=checkpoints,
            config=config,
            plan=plan,
            on_plan=on_plan,
        )
        _refuse_eager()
        refuse_xla()
        super().__init__(persistent, watch_accessed_variables)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """What `tf.GradientTape.gradient` returns, computed within the budget.

        Raises:
            CaptureError, InfeasibleBudgetError, OverBudgetError, PlanError: as
                `optckpt.gradients`.
        """
        _refuse_eager()
        refuse_xla()
        check_tensors(target, "target")
        check_tensors(sources, "sources")
        with as_traced(tf.compat.v1.get_default_graph()):
            result = super().gradient(target, sources, output_gradients, unconnected_gradients)
        plan_gradients(target, result, self._request)
        return result

    def jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises CaptureError: see `optckpt.GradientTape`."""
        raise _no_jacobian("jacobian")

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises CaptureError: see `optckpt.GradientTape`."""
        raise _no_jacobian("batch_jacobian")


def _refuse_eager() -> None:
    if tf.executing_eagerly():
        raise CaptureError(
            "optckpt.GradientTape rewrites a graph and there is none in eager mode: use it inside "
            "a function decorated with @tf.function, or use optckpt.value_and_gradients"
        )


def _no_jacobian(name: str) -> CaptureError:
    return CaptureError(
        f"optckpt.GradientTape.{name} is not planned, because TensorFlow vectorises its backward "
        "pass after it is traced: take it with tf.GradientTape (its memory is then not limited), "
        "or use optckpt.GradientTape.gradient for each component"
    )
