"""A step that dies of a real out-of-memory error trains under a budget, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

STEPS = 20
SCRIPT = """
import json, sys
import keras
import tensorflow as tf
import optckpt
from optckpt.models import build
from optckpt.config import Config

model, way, budget = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
off = {"cache": False}
config = Config.model_validate({"model": model, "plans": off, "costs": off})
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
step = build(config.model)
variables = list(step.variables)
adam = keras.optimizers.Adam(1e-3)
if way == "whole_step":
    adam.build(variables)

def train():
    loss = step.loss(*step.inputs)
    if way == "whole_step":
        adam.apply_gradients(zip(tf.gradients(loss, variables), variables))
    else:
        take = tf.gradients
        if budget:
            take = lambda y, xs: optckpt.gradients(y, xs, budget=budget, config=config)
        for v, g in zip(variables, take(loss, variables)):
            v.assign_sub(0.01 * g)
    return loss

@tf.function
def trained():
    if budget and way == "whole_step":
        with optckpt.whole_step(budget, config=config) as scope:
            loss = train()
            scope.keep(loss)
        return loss
    return train()

losses = [float(trained()) for _ in range(%d)]
peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
again = 0
if budget:
    executions = optckpt.last_plan().schedule.executions
    again = len(executions) - len(set(executions))
print(json.dumps({"losses": losses, "peak": peak, "again": again}))
"""

RESNET = {"name": "resnet_cifar10", "blocks_per_stage": 3, "batch_size": 32}
UNET = {"name": "unet", "batch_size": 8, "width": 16}
KILLED = (-11, 139)
"""Exit codes of a process that the allocator's error has killed."""


def train(
    model: dict[str, object], way: str, budget: int | None, limit: int | None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_MKL_ALLOC_MAX_BYTES", None)
    if limit is not None:
        environment["TF_MKL_ALLOC_MAX_BYTES"] = str(limit)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT % STEPS, json.dumps(model), way, json.dumps(budget)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def result(run: subprocess.CompletedProcess[str]) -> dict:
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "way", "share"),
    [(RESNET, "gradients", 0.6), (RESNET, "whole_step", 0.6), (UNET, "whole_step", 0.85)],
    ids=["resnet", "resnet_adam", "unet_adam"],
)
def test_real_out_of_memory(model: dict[str, object], way: str, share: float) -> None:
    unlimited = result(train(model, way, None, None))
    limit = int(unlimited["peak"] * share)
    plain = train(model, way, None, limit)
    assert plain.returncode != 0
    assert "ResourceExhausted" in plain.stderr or plain.returncode in KILLED
    # The allocator needs some room beyond the peak for its own granularity.
    budgeted = result(train(model, way, int(limit * 0.9), limit))
    assert budgeted["losses"] == unlimited["losses"]
    assert budgeted["peak"] <= limit
    assert budgeted["again"] > 0
    assert len(set(budgeted["losses"])) == STEPS
