"""optckpt: the optimal checkpoint scheduler for TensorFlow 2.

`optckpt.gradients(ys, xs, budget=...)` computes what `tf.gradients` computes within a budget of
bytes. TensorFlow and numpy are imported with the first use of a name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optckpt.budget import Budget
from optckpt.errors import BudgetError, InfeasibleBudgetError, OptckptError, OverBudgetError
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Certificate, Plan, Schedule
from optckpt.simulate import Simulation, simulate

if TYPE_CHECKING:
    from optckpt import keras, sizes
    from optckpt.call import (
        gradients,
        gradients_collection,
        gradients_memory,
        gradients_speed,
        patch,
    )
    from optckpt.eager import value_and_gradients
    from optckpt.part import budgeted
    from optckpt.pipeline import last_plan, last_plans
    from optckpt.planner import make_plan
    from optckpt.step import whole_step
    from optckpt.tape import GradientTape

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "Buffer",
    "Certificate",
    "GradientTape",
    "InfeasibleBudgetError",
    "Operation",
    "OptckptError",
    "OverBudgetError",
    "Plan",
    "Schedule",
    "Simulation",
    "TrainingGraph",
    "budgeted",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "keras",
    "last_plan",
    "last_plans",
    "make_plan",
    "patch",
    "simulate",
    "sizes",
    "value_and_gradients",
    "whole_step",
]

# What is imported here has to be light: the command line answers Ctrl-C only after it.
_LATE = {
    "GradientTape": "tape",
    "budgeted": "part",
    "gradients": "call",
    "gradients_collection": "call",
    "gradients_memory": "call",
    "gradients_speed": "call",
    "last_plan": "pipeline",
    "last_plans": "pipeline",
    "make_plan": "planner",
    "patch": "call",
    "value_and_gradients": "eager",
    "whole_step": "step",
}
"""Name -> the module that has it, imported with its first use."""
_MODULES = ("keras", "sizes")
"""Modules that are names of their own."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _LATE:
        raise AttributeError(f"module 'optckpt' has no attribute {name!r}")
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"optckpt.{name}")
    value = getattr(importlib.import_module(f"optckpt.{_LATE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
