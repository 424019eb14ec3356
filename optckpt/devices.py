"""Steps on several devices: each device's memory is planned, one after the other.

What runs on other devices is part of each plan, at the place where it comes in the step, but needs
no memory there and is not executed again. A later plan sees the order that earlier ones have put
into the graph, so that the devices never wait for each other in a circle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from optckpt import pipeline
from optckpt.budget import DeviceBudgets, short_name
from optckpt.errors import BudgetError, OptckptError, PlanError
from optckpt.frontends.tensorflow import Capture
from optckpt.request import Request
from optckpt.schedule import Plan

logger = logging.getLogger("optckpt.devices")

CONSIDERABLE = 0.05
"""Part of the bytes that a step writes from which a device's memory is planned."""


def in_replica() -> bool:
    """Whether this thread builds the step of one replica of a distribution strategy."""
    return bool(tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context())


def apply_on_devices(
    captured: Callable[[str | None], Capture], request: Request, own: str | None = None
) -> Plan:
    """Plan the memory of each device with a considerable part of a step, and rewrite the graph.

    Args:
        captured: captures the step for a device ("/device:GPU:1"); for None, for that with the
            most bytes.
        own: of a replica: its device, the only one that is planned with it.

    Returns:
        The plan of the device with the most bytes.

    Raises:
        as `optckpt.pipeline.apply`, naming the device where there are several; BudgetError if
        there are budgets for some devices, but none for one of these, or for a device that does
        nothing in the step; PlanError if there are several devices, but one given plan.
    """
    found = captured(own)
    if own is not None:
        return pipeline.apply(found, request)
    others = [d for d, share in found.shares.items() if share >= CONSIDERABLE and d != found.device]
    _check_named(request, found)
    if not others:
        return pipeline.apply(found, request)
    if request.plan is not None:
        raise PlanError(
            f"the step runs on {', '.join(map(short_name, (found.device, *others)))}, and each "
            "device has a plan of its own: plan= cannot be given, the plan cache keeps them"
        )
    quiet = replace(request, on_plan=None)
    for device in (found.device, *others):
        # What is wrong with a budget is said before anything is rewritten.
        request.budget_on(device)
    plan = _apply(found, quiet)
    for device in others:
        _apply(captured(device), quiet)
    left = [d for d in found.shares if d not in (found.device, *others)]
    if left:
        logger.info(
            "not planned, because the step hardly uses them: %s", ", ".join(map(short_name, left))
        )
    pipeline.remember(plan, found.device)
    if request.on_plan is not None:
        request.on_plan(plan)
    return plan


def _apply(found: Capture, request: Request) -> Plan:
    try:
        return pipeline.apply(found, request)
    except OptckptError as e:
        e.args = (f"device {short_name(found.device)}: {e}", *e.args[1:])
        raise


def _check_named(request: Request, found: Capture) -> None:
    if not isinstance(request.budget, DeviceBudgets):
        return
    unused = [d for d in request.budget.by_device if d not in found.shares]
    if unused:
        raise BudgetError(
            f"budget= names device {short_name(unused[0])}, but the step does nothing there: it "
            f"runs on {', '.join(map(short_name, found.shares))}"
        )
