"""Steps on two logical CPUs, for tests: `python -m tests.device_steps CASES OUT`.

The first half of a network is on CPU:0, the second on CPU:1. CASES is a JSON list of
{"way", "budget"}; OUT.npz gets losses and variables of each, OUT.json what was planned, or the
error. All run without the graph optimiser, so that equal means equal in every bit.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import optckpt
from optckpt.config import Config

ROWS, WIDTH, LAYERS, STEPS = 1024, 256, 6, 3
CONFIG = Config.model_validate(
    {
        "costs": {"model": "flops"},
        "plans": {"cache": False},
        "memory": {"margin": 0.0},
        "solver": {"gap": 0.05, "time_limit": 10.0},
    }
)


def main() -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    cases, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    arrays: dict[str, np.ndarray] = {}
    reports = []
    for number, case in enumerate(cases):
        try:
            values, report = run(case["way"], case.get("budget"))
        except optckpt.OptckptError as e:
            reports.append({"error": type(e).__name__, "message": str(e)})
            continue
        reports.append(report)
        arrays.update({f"{number}/{i}": value for i, value in enumerate(values)})
    np.savez(out.with_suffix(".npz"), **arrays)
    out.with_suffix(".json").write_text(json.dumps(reports))


def run(way: str, budget: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """`way`: plain, gradients or whole; with "-twice" there are two losses, one after the other."""
    rng = np.random.default_rng(0)
    halves = []
    for d in range(2):
        with tf.device(f"CPU:{d}"):
            first = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
            halves.append([tf.Variable(value) for value in first])
    weights = [w for half in halves for w in half]
    plans: list[optckpt.Plan] = []
    options = {"config": CONFIG, "on_plan": plans.append}
    graph: Any = None

    def loss_of(x: Any, sign: float = 1.0) -> Any:
        with tf.device("CPU:0"):
            x = sign * x
        for d, half in enumerate(halves):
            with tf.device(f"CPU:{d}"):
                for w in half:
                    x = tf.tanh(x @ w)
        with tf.device("CPU:1"):
            return tf.reduce_sum(x)

    def update(gradients: Any) -> None:
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(0.001 * g)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        nonlocal graph
        graph = tf.compat.v1.get_default_graph()
        if way == "whole":
            with optckpt.whole_step(budget, **options) as whole:
                loss = loss_of(x)
                update(tf.gradients(loss, weights))
                whole.keep(loss)
            return loss
        if way.startswith("gradients"):
            loss = loss_of(x)
            update(optckpt.gradients(loss, weights, budget=budget, **options))
            if way == "gradients-twice":
                other = loss_of(x, -1.0)
                update(optckpt.gradients(other, weights, budget=budget, **options))
                loss += other
            return loss
        loss = loss_of(x)
        update(tf.gradients(loss, weights))
        if way == "plain-twice":
            other = loss_of(x, -1.0)
            update(tf.gradients(other, weights))
            loss += other
        return loss

    x = tf.constant(rng.normal(size=(ROWS, WIDTH)).astype(np.float32))
    losses = [step(x).numpy() for _ in range(STEPS)]
    again = [op for op in graph.get_operations() if "_again" in op.name]
    misplaced = [
        op.name
        for op in again
        if op.device
        != graph.get_operation_by_name(
            op.name.rpartition("optckpt/")[2].partition("_again")[0]
        ).device
    ]
    report: dict[str, Any] = {
        "clones": dict(Counter(op.device[-5:] for op in again)),
        "misplaced": misplaced,
        "told": len(plans),
    }
    if not way.startswith("plain"):
        found = optckpt.last_plans()
        report["main"] = next(d for d, plan in found.items() if plan is optckpt.last_plan())
        report["told_main"] = plans[-1] is optckpt.last_plan()
        report["plans"] = {
            device: {
                "budget": plan.budget,
                "plain": plan.plain_peak,
                "predicted": plan.predicted_peak,
                "floor": plan.floor,
            }
            for device, plan in found.items()
        }
    return [*map(np.asarray, losses), *(w.numpy() for w in weights)], report


if __name__ == "__main__":
    main()
