"""The errors that optckpt raises for a user's mistake or an impossible request.

Each message names the operation, tensor, key or file at fault and says what to do;
the command line prints the message alone and exits with code 2.
"""

from __future__ import annotations


class OptckptError(Exception):
    """Base of all errors raised on purpose by optckpt."""

    ag_pass_through = True
    """Tells AutoGraph to let the exception through as it is, type, message and attributes."""


class GraphError(OptckptError, ValueError):
    """A training graph that contradicts itself (a buffer with two producers, say)."""


class ScheduleError(OptckptError, ValueError):
    """A schedule that no executor could follow; names step, operation and buffer."""


class BudgetError(OptckptError, ValueError):
    """A budget that cannot be read, or that no schedule can meet."""


class InfeasibleBudgetError(BudgetError):
    """No schedule fits: `floor` (bytes) is a proven lower bound on every peak."""

    def __init__(self, message: str, *, floor: int | None = None) -> None:
        super().__init__(message)
        self.floor = floor


class OverBudgetError(BudgetError):
    """The chosen strategy reached `peak` bytes at best, above the budget."""

    def __init__(self, message: str, *, peak: int) -> None:
        super().__init__(message)
        self.peak = peak


class PlanError(OptckptError, ValueError):
    """A plan that cannot be read, or that was made for another graph."""


class ConfigError(OptckptError, ValueError):
    """A configuration file with a mistake; names file, line and key."""


class CaptureError(OptckptError, ValueError):
    """A TensorFlow graph that cannot be planned (unknown sizes, eager mode, XLA, ...)."""


class UnknownSizeError(CaptureError):
    """A graph with a large tensor whose size it does not tell."""


class RewriteError(OptckptError, RuntimeError):
    """The rewritten TensorFlow graph failed its self-check; the graph was left as it was."""


class CostError(OptckptError, RuntimeError):
    """An operation whose cost could not be measured."""
