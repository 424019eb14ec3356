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
REPLICAS = [
    {"way": "plain"},
    {"way": "gradients", "budget": "70%"},
    {"way": "whole", "budget": "70%"},
    {"way": "fit-plain"},
    {"way": "fit-keras", "budget": "75%"},
]
WORKERS = [
    {"way": "plain-each"},
    {"way": "whole-each", "budget": "70%"},
    {"way": "fit-plain"},
    {"way": "fit-keras", "budget": "75%"},
]


def plain_of(runs: list[dict[str, str]], way: str) -> int:
    """The number of the run to compare with."""
    if way.startswith("fit"):
        return number(runs, "fit-plain")
    return number(runs, "plain-each" if way.endswith("-each") else "plain")


def number(runs: list[dict[str, str]], way: str) -> int:
    return [run["way"] for run in runs].index(way)


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
    return outcomes([start({"strategy": "mirrored", "runs": REPLICAS}, out, {})])[0]


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
        spec = {"strategy": "workers", "runs": WORKERS}
        processes.append(start(spec, folder / f"out{index}", environment))
    return outcomes(processes)


def assert_equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


replica_ways = pytest.mark.parametrize("way", ["gradients", "whole", "fit-keras"])
worker_ways = pytest.mark.parametrize("way", ["whole-each", "fit-keras"])


@replica_ways
def test_replicas_train_as_without_a_budget(mirrored, way):
    found = mirrored.arrays(number(REPLICAS, way))
    assert_equal(found, mirrored.arrays(plain_of(REPLICAS, way)))
    assert found["losses"][-1] < found["losses"][0]


@replica_ways
def test_replicas_share_one_plan_that_is_solved_once(mirrored, way):
    report = mirrored.reports[number(REPLICAS, way)]
    assert report["solves"] == 1
    assert report["sources"] == ["solved", "cache"]
    assert report["schedules"][0] == report["schedules"][1]
    assert report["clones"]["CPU:0"] == report["clones"]["CPU:1"] > 0
    assert report["misplaced"] == []


@replica_ways
def test_collectives_of_replicas_are_not_repeated(mirrored, way):
    collectives = mirrored.reports[number(REPLICAS, way)]["collectives"]
    assert collectives == mirrored.reports[plain_of(REPLICAS, way)]["collectives"]
    assert len(collectives) == 2


@worker_ways
def test_workers_train_as_without_a_budget(workers, way):
    # Moving averages are each worker's own.
    for worker in workers:
        assert_equal(worker.arrays(number(WORKERS, way)), worker.arrays(plain_of(WORKERS, way)))
    chief, other = (worker.arrays(number(WORKERS, way))["losses"] for worker in workers)
    np.testing.assert_array_equal(chief, other)


@worker_ways
def test_workers_take_the_plan_of_the_chief(workers, way):
    chief, other = (worker.reports[number(WORKERS, way)] for worker in workers)
    assert (chief["solves"], other["solves"]) == (1, 0)
    assert chief["sources"] == ["solved"]
    assert other["sources"] == ["cache"]
    assert chief["schedules"] == other["schedules"]
    assert chief["clones"] == other["clones"]
    assert chief["clones"]["CPU:0"] > 0
    assert chief["misplaced"] == other["misplaced"] == []


@worker_ways
def test_collectives_of_workers_are_not_repeated(workers, way):
    chief, other = (worker.reports[number(WORKERS, way)]["collectives"] for worker in workers)
    assert chief == other == workers[0].reports[plain_of(WORKERS, way)]["collectives"]
    assert len(chief) > (8 if way.endswith("-each") else 0)


def test_no_worker_complains(workers):
    for worker in workers:
        assert "plans for itself" not in worker.errors
        assert "of its own" not in worker.errors


def test_replicas_and_workers_train_alike(mirrored, workers):
    """Two replicas in one process and one in each of two sum up the same gradients."""
    left = mirrored.arrays(number(REPLICAS, "fit-keras"))["losses"]
    right = workers[0].arrays(number(WORKERS, "fit-keras"))["losses"]
    np.testing.assert_allclose(left, right, rtol=1e-5)
