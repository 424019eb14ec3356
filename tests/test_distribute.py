"""Steps under distribution strategies: one plan for all replicas and workers, nothing else changed.

What trains runs in processes of its own (`tests.distributed_steps`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNS = [
    {"way": "plain"},
    {"way": "gradients", "budget": "70%"},
    {"way": "whole", "budget": "70%"},
    {"way": "plain-each"},
    {"way": "whole-each", "budget": "70%"},
    {"way": "fit-plain"},
    {"way": "fit-whole", "budget": "75%"},
]
BUDGETED = [i for i, run in enumerate(RUNS) if "budget" in run]
PLAIN = {1: 0, 2: 0, 4: 3, 6: 5}


class Outcome:
    """What one process has found: arrays and reports by the number of the run."""

    def __init__(self, path: Path, errors: str) -> None:
        self.errors = errors
        self.reports: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())
        with np.load(path.with_suffix(".npz")) as file:
            self._arrays = dict(file)

    def arrays(self, run: int) -> dict[str, np.ndarray]:
        prefix = f"{run}/"
        return {k.removeprefix(prefix): v for k, v in self._arrays.items() if k.startswith(prefix)}


def start(
    spec: dict[str, Any], out: Path, environment: dict[str, str]
) -> tuple[Path, subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.distributed_steps", json.dumps(spec), str(out)]
    return out, subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(processes: list[tuple[Path, subprocess.Popen[str]]]) -> list[Outcome]:
    found = []
    try:
        for out, process in processes:
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors[-3000:]
            found.append(Outcome(out, errors))
    finally:
        for _, process in processes:
            process.kill()
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory) -> Outcome:
    out = tmp_path_factory.mktemp("mirrored") / "out"
    return outcomes([start({"strategy": "mirrored", "runs": RUNS}, out, {})])[0]


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> list[Outcome]:
    folder = tmp_path_factory.mktemp("workers")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {
            "TF_CONFIG": json.dumps(task),
            # Two machines share no folder.
            "OPTCKPT_CACHE_DIR": str(folder / f"cache{index}"),
        }
        spec = {"strategy": "workers", "runs": RUNS}
        processes.append(start(spec, folder / f"out{index}", environment))
    return outcomes(processes)


def assert_equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("run", BUDGETED, ids=lambda i: RUNS[i]["way"])
def test_replicas_train_as_without_a_budget(mirrored, run):
    assert_equal(mirrored.arrays(run), mirrored.arrays(PLAIN[run]))
    losses = mirrored.arrays(run)["losses"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("run", BUDGETED, ids=lambda i: RUNS[i]["way"])
def test_replicas_share_one_plan_that_is_solved_once(mirrored, run):
    report = mirrored.reports[run]
    if RUNS[run]["way"] == "whole-each":
        # Means of single variables are taken on one of the devices: the steps differ.
        assert report["solves"] == 2
    else:
        assert report["solves"] == 1
        assert report["sources"] == ["solved", "cache"]
        assert report["schedules"][0] == report["schedules"][1]
    assert report["clones"]["CPU:0"] == report["clones"]["CPU:1"] > 0
    assert report["misplaced"] == []


@pytest.mark.parametrize("run", BUDGETED, ids=lambda i: RUNS[i]["way"])
def test_collectives_of_replicas_are_not_repeated(mirrored, run):
    collectives = mirrored.reports[run]["collectives"]
    assert collectives == mirrored.reports[PLAIN[run]]["collectives"]
    assert len(collectives) == (0 if RUNS[run]["way"] == "whole-each" else 2)


@pytest.mark.parametrize("run", BUDGETED, ids=lambda i: RUNS[i]["way"])
def test_workers_train_as_without_a_budget(workers, run):
    # Moving averages are each worker's own.
    for worker in workers:
        assert_equal(worker.arrays(run), worker.arrays(PLAIN[run]))
    chief, other = (worker.arrays(run)["losses"] for worker in workers)
    np.testing.assert_array_equal(chief, other)


@pytest.mark.parametrize("run", BUDGETED, ids=lambda i: RUNS[i]["way"])
def test_workers_take_the_plan_of_the_chief(workers, run):
    chief, other = (worker.reports[run] for worker in workers)
    assert (chief["solves"], other["solves"]) == (1, 0)
    assert chief["sources"] == ["solved"]
    assert other["sources"] == ["cache"]
    assert chief["schedules"] == other["schedules"]
    assert chief["clones"] == other["clones"]
    assert chief["clones"]["CPU:0"] > 0
    assert chief["collectives"] == other["collectives"]
    assert chief["collectives"] == workers[0].reports[PLAIN[run]]["collectives"]


def test_no_worker_complains(workers):
    for worker in workers:
        assert "plans for itself" not in worker.errors
        assert "of its own" not in worker.errors


def test_replicas_and_workers_train_alike(mirrored, workers):
    """Two replicas in one process and one in each of two sum up the same gradients."""
    for run in range(len(RUNS)):
        left, right = mirrored.arrays(run), workers[0].arrays(run)
        np.testing.assert_allclose(left["losses"], right["losses"], rtol=1e-5)
