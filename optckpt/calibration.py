"""Calibration: the peak of a real step, and a new plan if it is above the budget.

A plan promises what a model of the device's allocator predicts, less a margin (`memory.margin`).
What the model cannot know (how memory is cut up by what the process did before, what a kernel
needs inside) is learnt here: the first real steps are measured, and if one exceeds the budget, the
step is traced and planned again, for so much less. Every step that is measured is a step of the
training; none is executed twice, and no variable is touched.

Without calibration, a step is planned again, and calibrated from then on, when it is seen above its
budget in the statistics as they are. A step that draws random numbers by itself (by operations with
a state of their own, not Keras' seed generators) is left alone then: traced anew, it would
begin its sequence anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from optckpt import pipeline
from optckpt.budget import Budget, format_bytes
from optckpt.config import Calibrate
from optckpt.device import memory_info
from optckpt.distribute import is_worker
from optckpt.errors import BudgetError
from optckpt.frontends.tf_functions import function_graph, function_names
from optckpt.schedule import Plan

logger = logging.getLogger(__name__)

REPLANS = 3
"""How often a step is planned again at most."""
_STEPS = 2
"""So many steps in a row must be within the budget; the first finds fewer free chunks."""


class PlannedStep:
    """A function that is planned when it is traced; planned again as `calibrate` says.

    Called like the function. While it is calibrated, the device's memory statistics are reset
    before each step (`tf.config.experimental.reset_memory_stats`).
    """

    def __init__(
        self,
        make: Callable[[PlannedStep, Budget | None], Callable[..., Any]],
        calibrate: Calibrate,
        on_plan: Callable[[Plan], None] | None = None,
        *,
        fetches: bool = False,
    ) -> None:
        """`make`: gives a function not yet traced that, while it is, plans for this budget (None:
        the caller's own) and calls `planned` of the step. `fetches`: whether batches may be fetched
        in advance while it runs.
        """
        self._make = make
        self._on_plan = on_plan
        self._fetches = fetches
        self._function = make(self, None)
        self._device: str | None = None
        self._calibrate = calibrate
        """Whether it may still be planned again."""
        self._left = _STEPS if calibrate is True else 0
        """Steps to be measured."""
        self._plan: Plan | None = None
        self._budget: int | None = None
        """What the caller allows, in bytes."""
        self._in_use: int | None = None
        """Bytes on the device when the step was planned; None: not yet."""
        self._grown = 0
        """So many more before the present step. A new plan counts them by itself."""
        self._exceeded: tuple[int, ...] = ()
        """Peaks above the budget, in the order in which they were measured."""
        self._peak_before: int | None = None
        """The highest peak on the device before the present step; None: no longer of interest."""
        self._graph: tf.Graph | None = None
        """What was traced for steps that are not calibrated."""
        self._best: tuple[int, Plan, Callable[..., Any]] | None = None
        """Of the plans that exceeded the budget, the one with the lowest peak, and its peak."""

    @property
    def plan(self) -> Plan | None:
        """The plan that holds now; None before the first step."""
        return self._plan

    def measure_again(self) -> None:
        """Measure the next steps if it is calibrated at all: something else has used the device."""
        if self._calibrate is True:
            self._left = _STEPS

    def planned(self, plan: Plan) -> None:
        """Note the plan that has just been applied: of several devices, that of the main one."""
        device = next((d for d, p in pipeline.last_plans().items() if p is plan), None)
        if not self._exceeded:
            self._budget = plan.budget
        plan = replace(plan, budget=self._budget, calibrated=self._exceeded)
        self._device = device
        self._adopt(plan)
        if self._on_plan is not None:
            self._on_plan(plan)
        if self._calibrate and is_worker():
            # Traced again by one worker alone, its collectives would wait for the others' for ever.
            if self._calibrate is True:
                logger.warning("calibrate=True plans one process again; of several workers none is")
            self._settle()
            self._calibrate = False
        # Here, and not before the step, because measuring costs takes memory, too.
        self._in_use = self._reset()
        if self._calibrate is not True:
            self._peak_before = self._read_peak()
            self._graph = tf.compat.v1.get_default_graph()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        if not self._left:
            return self._watched(*args, **kwargs)
        self._grown = 0
        if self._in_use is not None:
            self._grown = max(0, self._reset() - self._in_use)
        try:
            result = self._function(*args, **kwargs)
        except BudgetError as e:
            # Raised while it is traced: nothing has been executed.
            if self._best is None:
                raise
            self._return_to_best(str(e), advised=True)
            return self._function(*args, **kwargs)
        if self._calibrate:
            self._learn()
        return result

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step that is not calibrated; if it is seen to exceed the budget, see to it, once.

        The statistics are the caller's, and are not reset: what is seen is a peak higher than all
        before it.
        """
        if self._peak_before is not None:
            self._peak_before = self._read_peak()
        result = self._function(*args, **kwargs)
        if self._peak_before is None or self._budget is None:
            return result
        peak = self._read_peak()
        if peak > max(self._peak_before, self._budget):
            self._peak_before = None
            if self._calibrate and not _draws_by_itself(self._graph):
                self._calibrate = True
                self._grown = 0
                self._learn(logging.WARNING)
                return result
            logger.warning(
                "a training step peaked at %s, above its budget of %s: calibrate=True plans again "
                "for what was measured, a larger memory.margin leaves more room%s",
                format_bytes(peak),
                format_bytes(self._budget),
                "; batches fetched in advance may be the cause"
                * (self._fetches and "CPU" in (self._device or "")),
            )
        return result

    def _learn(self, level: int = logging.INFO) -> None:
        """Compare the peak of the step that was just taken with the budget.

        `level`: of what is said if it is to be planned again.
        """
        plan, budget = self._plan, self._budget
        peak = self._peak()
        if plan is None or budget is None or not peak:
            self._settle()
            return
        if peak <= budget:
            self._left -= 1
            if not self._left:
                logger.info(
                    "calibrated: measured peak %s, budget %s, predicted %s; planned again %d times",
                    format_bytes(peak),
                    format_bytes(budget),
                    format_bytes(plan.predicted_peak),
                    len(self._exceeded),
                )
                self._settle()
            return
        if self._best is None or peak < self._best[0]:
            self._best = (peak, plan, self._function)
        self._exceeded += (peak,)
        if len(self._exceeded) > REPLANS:
            self._return_to_best(f"it was planned {REPLANS} times again in vain")
            return
        # As much less as the prediction was wrong by; less than before in any case.
        last = plan.target if plan.target is not None else budget
        wrong = max(0, peak - plan.predicted_peak - self._grown)
        wanted = min(budget - wrong, last - max(0, peak - budget - self._grown))
        if wanted <= 0:
            self._return_to_best("what it exceeds it by is more than the budget")
            return
        logger.log(
            level,
            "the step peaked at %s, above its budget of %s: it is planned again, for %s",
            format_bytes(peak),
            format_bytes(budget),
            format_bytes(wanted),
        )
        self._left = _STEPS
        self._in_use = None
        self._function = self._make(self, Budget(bytes=wanted))

    def _return_to_best(self, why: str, advised: bool = False) -> None:
        """`advised`: whether `why` says what to do already."""
        assert self._best is not None
        assert self._budget is not None
        peak, plan, self._function = self._best
        self._adopt(replace(plan, calibrated=self._exceeded))
        self._settle()
        self._calibrate = False
        logger.warning(
            "the step peaks at %s, above its budget of %s: %s%s",
            format_bytes(peak),
            format_bytes(self._budget),
            why,
            "" if advised else "; raise the budget or memory.margin",
        )

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        pipeline.remember(plan, self._device)

    def _settle(self) -> None:
        self._left = 0
        self._best = None

    def _reset(self) -> int:
        """Begin to look for a peak. Returns the bytes in use."""
        if not self._left or self._device is None:
            return 0
        memory = memory_info(self._device)
        if memory is None:
            logger.info("%s does not track its memory: no calibration", self._device)
            self._settle()
            self._calibrate = False
            return 0
        tf.config.experimental.reset_memory_stats(self._device)
        return memory["current"]

    def _peak(self) -> int:
        """Bytes; 0 if unknown."""
        tf.test.experimental.sync_devices()
        return self._read_peak()

    def _read_peak(self) -> int:
        """Bytes, of what the device has finished; 0 if unknown."""
        memory = None if self._device is None else memory_info(self._device)
        return 0 if memory is None else memory["peak"]


def _draws_by_itself(graph: tf.Graph) -> bool:
    """Whether operations of the graph, or of functions that it calls, draw random numbers from a
    state that only they have."""
    graphs = [graph]
    for level in graphs:
        for op in level.get_operations():
            if op._is_stateful and any(attr.name == "seed2" for attr in op.op_def.attr):
                return True
            inner = (function_graph(op, name) for name in function_names(op))
            graphs += [g for g in inner if g is not None and g not in graphs]
    return False
