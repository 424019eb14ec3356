"""Steps on several devices: budgets, plans and clones per device, nothing else changed.

What trains runs in a process of its own (`tests.device_steps`), which has two logical CPUs. These
share an allocator, so that what is tested of memory is what the simulator says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.budget import Budget, DeviceBudgets, device_name, parse_budget
from optckpt.config import Config, parse_config
from optckpt.errors import BudgetError, ConfigError
from optckpt.request import Request
from tests.device_steps import LAYERS, ROWS, WIDTH

CASES: dict[str, dict[str, Any]] = {
    "plain": {"way": "plain"},
    "plain-twice": {"way": "plain-twice"},
    "gradients": {"way": "gradients", "budget": "75%"},
    "whole": {"way": "whole", "budget": "75%"},
    "per device": {"way": "gradients", "budget": {"CPU:0": "9MiB", "cpu:1": "70%"}},
    "one without": {"way": "whole", "budget": {"CPU:0": None, "CPU:1": "70%"}},
    "twice": {"way": "gradients-twice", "budget": "80%"},
    "one missing": {"way": "gradients", "budget": {"CPU:0": "9MiB"}},
    "one too many": {"way": "gradients", "budget": {"CPU:0": 0.9, "CPU:1": 0.9, "GPU:3": 0.9}},
    "impossible": {"way": "whole", "budget": {"CPU:0": 0.9, "CPU:1": "1MiB"}},
}
TRAINED = ["gradients", "whole", "per device", "one without", "twice"]
ACTIVATION, VARIABLE = ROWS * WIDTH * 4, WIDTH * WIDTH * 4


class Outcomes:
    def __init__(self, path: Path) -> None:
        names = list(CASES)
        self.reports = dict(
            zip(names, json.loads(path.with_suffix(".json").read_text()), strict=True)
        )
        with np.load(path.with_suffix(".npz")) as file:
            self._arrays = dict(file)

    def arrays(self, name: str) -> list[np.ndarray]:
        prefix = f"{list(CASES).index(name)}/"
        return [value for key, value in self._arrays.items() if key.startswith(prefix)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    out = tmp_path_factory.mktemp("devices") / "out"
    command = [
        sys.executable,
        "-m",
        "tests.device_steps",
        json.dumps(list(CASES.values())),
        str(out),
    ]
    result = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return Outcomes(out)


@pytest.mark.parametrize("name", TRAINED)
def test_trains_as_without_a_budget(outcomes, name):
    plain = outcomes.arrays("plain-twice" if name == "twice" else "plain")
    found = outcomes.arrays(name)
    assert len(plain) == len(found) > 2 * LAYERS
    for left, right in zip(found, plain, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", TRAINED)
def test_clones_stay_on_their_device(outcomes, name):
    report = outcomes.reports[name]
    assert report["misplaced"] == []
    devices = {"CPU:1"} if name == "one without" else {"CPU:0", "CPU:1"}
    assert set(report["clones"]) == devices


@pytest.mark.parametrize("name", TRAINED)
def test_each_device_has_a_plan_within_its_budget(outcomes, name):
    report = outcomes.reports[name]
    assert set(report["plans"]) == {"CPU:0", "CPU:1"}
    for plan in report["plans"].values():
        if plan["budget"] is not None:
            assert plan["floor"] <= plan["predicted"] <= plan["budget"]


def test_peaks_are_those_of_one_device(outcomes):
    """Where the backward pass of a device begins, it holds its variables, its activations and the
    gradients of the last layer's sums and variable. Moreover CPU:0 holds its input and the multiple
    of it, CPU:1 what has come from CPU:0 and the gradient of the sum, which is a constant."""
    plans = outcomes.reports["whole"]["plans"]
    for plan in plans.values():
        assert plan["plain"] == (LAYERS + 3) * ACTIVATION + (LAYERS + 1) * VARIABLE
        assert plan["budget"] == round(0.75 * plan["plain"])


def test_budgets_of_their_own(outcomes):
    plans = outcomes.reports["per device"]["plans"]
    assert plans["CPU:0"]["budget"] == 9 << 20
    assert plans["CPU:1"]["budget"] == round(0.7 * plans["CPU:1"]["plain"])


@pytest.mark.parametrize("name", TRAINED)
def test_the_last_plan_is_that_of_the_main_device(outcomes, name):
    report = outcomes.reports[name]
    assert report["main"] in report["plans"]
    assert report["told"] == (2 if name == "twice" else 1)
    assert report["told_main"]


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("one missing", "BudgetError", ["says nothing of device CPU:1", "to CPU:0"]),
        ("one too many", "BudgetError", ["names device GPU:3", "runs on", "CPU:0", "CPU:1"]),
        ("impossible", "InfeasibleBudgetError", ["device CPU:1: no schedule fits", "1.0 MiB"]),
    ],
)
def test_errors_name_the_device(outcomes, name, kind, parts):
    report = outcomes.reports[name]
    assert report["error"] == kind
    for part in parts:
        assert part in report["message"]


@pytest.mark.parametrize(
    "name",
    ["GPU:1", "gpu:1", "/gpu:1", "/device:GPU:1", "/job:worker/replica:0/task:0/device:GPU:1"],
)
def test_names_of_devices(name):
    assert device_name(name) == "/device:GPU:1"


@pytest.mark.parametrize("name", ["GPU", "1", "", "GPU:x", 0, None])
def test_names_of_nothing(name):
    with pytest.raises(BudgetError, match="is not the name of a device"):
        device_name(name)


def test_budgets_are_read():
    found = parse_budget({"CPU:0": "100MB", "/device:cpu:1": "60%", "GPU:0": None})
    assert isinstance(found, DeviceBudgets)
    assert found.on("/device:CPU:0") == Budget(bytes=10**8)
    assert found.on("/device:CPU:1") == Budget(fraction=0.6)
    assert found.on("/device:GPU:0") is None
    assert parse_budget(found) is found
    assert parse_budget("60%") == Budget(fraction=0.6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "names no device"),
        ({"CPU:0": 1, "cpu:0": 2}, "names device CPU:0 twice"),
        ({"CPU:0": "much"}, "cannot read the budget 'much'"),
        ({"fast one": 1}, "'fast one' is not the name of a device"),
    ],
)
def test_budgets_that_cannot_be_read(value, text):
    with pytest.raises(BudgetError, match=text):
        parse_budget(value)
    with pytest.raises(ConfigError, match=text):
        parse_config({"budget": value})


def test_budgets_in_a_configuration():
    config = Config.model_validate({"budget": {"CPU:0": "1GiB", "CPU:1": 0.5}})
    request = Request.of(config=config)
    assert request.budget_on("/device:CPU:1") == Budget(fraction=0.5)
    with pytest.raises(BudgetError, match="says nothing of device GPU:0"):
        request.budget_on("/device:GPU:0")


def test_a_step_on_one_device_takes_a_mapping_as_well():
    w = tf.Variable(tf.ones([256, 256]))
    config = Config.model_validate({"costs": {"model": "unit"}, "plans": {"cache": False}})

    @tf.function
    def step(x, budget):
        loss = tf.reduce_sum(tf.tanh(x @ w))
        return optckpt.gradients(loss, [w], budget=budget, config=config)

    step.get_concrete_function(tf.TensorSpec([512, 256]), {"CPU:0": "1GiB"})
    assert optckpt.last_plans()["CPU:0"] is optckpt.last_plan()
    with pytest.raises(BudgetError, match="names device CPU:1, but the step does nothing there"):
        step.get_concrete_function(tf.TensorSpec([512, 256]), {"CPU:0": "1GiB", "CPU:1": 0.9})
