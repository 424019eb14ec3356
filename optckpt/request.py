"""What a caller asks of a plan: arguments and configuration, checked before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from optckpt.arguments import shown
from optckpt.budget import AnyBudget, Budget, DeviceBudgets, check_price, parse_budget
from optckpt.config import Calibrate, Config, find_config
from optckpt.errors import OptckptError, PlanError
from optckpt.schedule import Plan
from optckpt.solvers.registry import Strategy, find

Checkpoints = Literal["memory", "speed", "collection"] | Sequence[Any]


@dataclass(frozen=True, eq=False)
class Request:
    """What a plan is to be made for."""

    settings: Config
    budget: Budget | DeviceBudgets | None
    max_overhead: float | None
    strategy: str | Strategy
    checkpoints: Checkpoints | None
    plan: Plan | None
    """To be applied instead of making one."""
    on_plan: Callable[[Plan], None] | None

    @classmethod
    def of(
        cls,
        budget: AnyBudget | None = None,
        *,
        max_overhead: float | None = None,
        strategy: str | Strategy | None = None,
        checkpoints: Checkpoints | None = None,
        config: Config | str | Path | None = None,
        plan: Plan | str | Path | None = None,
        on_plan: Callable[[Plan], None] | None = None,
    ) -> Request:
        """The request of these arguments, which mean what they mean for `optckpt.gradients`.

        Raises:
            OptckptError: if one of them is not what it should be; of its subclasses ConfigError,
                BudgetError and PlanError (also for a plan beside arguments for making one) where
                they apply.
        """
        settings = find_config(config)
        if plan is not None:
            _check_alone(
                budget=budget, max_overhead=max_overhead, strategy=strategy, checkpoints=checkpoints
            )
        if checkpoints is None and strategy is None:
            checkpoints = settings.checkpoints
        default = settings.strategy if strategy is None else strategy
        chosen = _checkpoint_strategy(checkpoints) or default
        find(chosen)
        if on_plan is not None and not callable(on_plan):
            raise OptckptError(
                f"on_plan= takes a function to be called with the plan, got {shown(on_plan)}"
            )
        check_price(budget, max_overhead)
        if budget is None and max_overhead is None and plan is None:
            budget = settings.budget
        if isinstance(plan, str | Path):
            plan = Plan.load(plan)
        elif plan is not None and not isinstance(plan, Plan):
            raise PlanError(f"plan= takes a Plan or the path of one, got {type(plan).__name__}")
        return cls(
            settings=settings,
            budget=None if budget is None else parse_budget(budget),
            max_overhead=max_overhead,
            strategy=chosen,
            checkpoints=checkpoints,
            plan=plan,
            on_plan=on_plan,
        )

    def budget_on(self, device: str) -> Budget | None:
        """The budget of a device. Raises BudgetError if there are others, but none for it."""
        return self.budget.on(device) if isinstance(self.budget, DeviceBudgets) else self.budget


Shapes = tuple[tuple[int | None, ...], ...]
"""Of the tensors that a step is called with."""


def covers(larger: Shapes, shapes: Shapes) -> bool:
    """Whether no size in `shapes` is above that in `larger`; unknown ones compare with nothing."""
    return len(larger) == len(shapes) and all(
        len(a) == len(b)
        and all(x is not None and y is not None and x >= y for x, y in zip(a, b, strict=True))
        for a, b in zip(larger, shapes, strict=True)
    )


def budget_beside(
    asked: Budget | DeviceBudgets | None, shapes: Shapes, planned: Iterable[tuple[Shapes, Plan]]
) -> Budget | DeviceBudgets | None:
    """The budget of a step that is called with `shapes`, where others are planned already.

    What is asked for, but that a share of the plain step's peak stands for as many bytes as it came
    to with larger batches: of a small one a share would leave less than the variables need.
    """
    if not isinstance(asked, Budget) or asked.fraction is None or not shapes:
        return asked
    larger = [p.budget for known, p in planned if p.budget and covers(known, shapes)]
    return Budget(bytes=max(larger)) if larger else asked


def calibrated(calibrate: Calibrate | None, request: Request) -> Calibrate:
    """Whether a step is to be calibrated: as the argument says, or else the configuration.

    Raises:
        OptckptError: if the argument is none of these, or it is True and several devices have
            budgets or a plan is given.
    """
    if not (calibrate is None or isinstance(calibrate, bool) or calibrate == "seen"):
        raise OptckptError(
            f"calibrate= takes True, False, 'seen' or None (as the configuration says), got "
            f"{shown(calibrate)}"
        )
    wanted = request.settings.memory.calibrate if calibrate is None else calibrate
    if calibrate is True and request.plan is not None:
        raise OptckptError(
            "calibrate=True makes a new plan where the step exceeds its budget, plan= is applied "
            "as it is: leave out one of them"
        )
    several = isinstance(request.budget, DeviceBudgets) and len(request.budget.by_device) > 1
    if request.plan is not None or (wanted == "seen" and several):
        return False
    if wanted and several:
        raise OptckptError(
            "calibrate= measures one device, and the budget names several: give one budget, or "
            "calibrate=False and a larger memory.margin"
        )
    return wanted


def _check_alone(**given: Any) -> None:
    """Raise PlanError for an argument that says what plan to make, beside one that is made."""
    for name, value in given.items():
        if value is not None:
            raise PlanError(
                f"plan= applies a plan as it was made, with its own budget, and {name}= asks for "
                f"one to be made: leave out {name}= or plan="
            )


def _checkpoint_strategy(checkpoints: Checkpoints | None) -> str | None:
    if checkpoints is None:
        return None
    if isinstance(checkpoints, str):
        known = {"memory": "sqrt_n", "speed": "speed", "collection": "explicit"}
        if checkpoints not in known:
            raise OptckptError(
                f"unknown checkpoints={checkpoints!r}: give 'memory', 'speed', 'collection' or a "
                "list of tensors"
            )
        return known[checkpoints]
    if isinstance(checkpoints, tf.Tensor | tf.Variable) or not isinstance(checkpoints, Iterable):
        raise OptckptError(
            "checkpoints= takes 'memory', 'speed', 'collection' or a list of tensors, got "
            f"{type(checkpoints).__name__}"
        )
    return "explicit"
