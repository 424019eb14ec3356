"""A step that dies of a real out-of-memory error trains under a budget, with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEPS = 10
SCRIPT = """
import json, sys
import tensorflow as tf
import optckpt
from optckpt.models import build
from optckpt.config import Config

budget = sys.argv[1]
config = Config.model_validate(
    {"model": {"name": "resnet_cifar10", "blocks_per_stage": 3, "batch_size": 32}}
)
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
step = build(config.model)

@tf.function
def train():
    loss = step.loss(*step.inputs)
    if budget == "none":
        grads = tf.gradients(loss, step.variables)
    else:
        grads = optckpt.gradients(loss, step.variables, budget=int(budget))
    for v, g in zip(step.variables, grads):
        v.assign_sub(0.01 * g)
    return loss

losses = [float(train()) for _ in range(%d)]
peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
print(json.dumps({"losses": losses, "peak": peak}))
"""


def train(budget: int | None, limit: int | None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_MKL_ALLOC_MAX_BYTES", None)
    if limit is not None:
        environment["TF_MKL_ALLOC_MAX_BYTES"] = str(limit)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT % STEPS, "none" if budget is None else str(budget)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def result(run: subprocess.CompletedProcess) -> dict:
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_real_out_of_memory():
    unlimited = result(train(None, None))
    limit = int(unlimited["peak"] * 0.6)
    plain = train(None, limit)
    # The allocator's error is raised, or (rarely) the process is killed by it.
    assert plain.returncode != 0
    assert "ResourceExhausted" in plain.stderr or plain.returncode < 0
    # The allocator needs some room beyond the peak for its own granularity.
    budgeted = result(train(int(limit * 0.9), limit))
    assert budgeted["losses"] == unlimited["losses"]
    assert budgeted["peak"] <= limit
    assert len(set(budgeted["losses"])) == STEPS
