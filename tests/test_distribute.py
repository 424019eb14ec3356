"""Steps under distribution strategies: one plan for all replicas and workers, nothing else changed.

What trains runs in processes of its own (`tests.distributed_steps`).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optckpt import distribute
from optckpt.budget import Budget
from optckpt.distribute import Workers
from optckpt.errors import InfeasibleBudgetError
from optckpt.frontends.synthetic import residual_chain
from optckpt.graph import TrainingGraph
from optckpt.plan_cache import PlanCache
from optckpt.reuse import Problem, plan_once
from optckpt.solvers.registry import SolveOptions

ROOT = Path(__file__).resolve().parent.parent
REPLICAS = [
    {"way": "plain"},
    {"way": "gradients", "budget": "70%"},
    {"way": "whole", "budget": "70%"},
    {"way": "fit-plain"},
    {"way": "fit-keras", "budget": "75%"},
    {"way": "fit-partial-plain"},
    {"way": "fit-partial", "budget": "75%"},
]
WORKERS = [
    {"way": "plain-each"},
    {"way": "whole-each", "budget": "70%"},
    {"way": "fit-plain"},
    {"way": "fit-keras", "budget": "75%"},
]


def plain_of(runs: list[dict[str, str]], way: str) -> int:
    """The number of the run to compare with."""
    if way.startswith("fit-partial"):
        return number(runs, "fit-partial-plain")
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


replica_ways = pytest.mark.parametrize("way", ["gradients", "whole", "fit-keras", "fit-partial"])
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


# --- What is agreed upon, and what happens where nothing is -------------------------------------


class Store:
    """A key-value store like that of the coordination service, for workers of one process."""

    def __init__(self, monkeypatch) -> None:
        self.values: dict[str, str] = {}
        monkeypatch.setattr(distribute, "_put", self.put)
        monkeypatch.setattr(distribute, "_get", lambda key, seconds: self.values.get(key))

    def put(self, key: str, value: str) -> bool:
        self.values.setdefault(key, value)
        return True


@pytest.fixture
def store(monkeypatch) -> Store:
    return Store(monkeypatch)


CHIEF, OTHER = Workers(is_chief=True), Workers(is_chief=False)
GRAPH = residual_chain(5)


def problem(graph: TrainingGraph, budget: str = "70%", **surroundings: str) -> Problem:
    return Problem(
        graph=graph,
        budget=Budget.parse(budget),
        strategy="optimal",
        options=SolveOptions(time_limit=5.0, gap=0.02, threads=1),
        margin=0.0,
        allocator=None,
        plain_graph=graph,
        max_overhead=None,
        reorder=False,
        repeat="all",
        surroundings=surroundings,
    )


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_chiefs_plan_is_taken_on_other_hardware(store, caplog):
    first = plan_once(problem(GRAPH, hardware="fast"), PlanCache(None), CHIEF)
    slower = GRAPH.with_costs([2 * op.seconds + 1e-3 for op in GRAPH.operations])
    second = plan_once(problem(slower, hardware="slow"), PlanCache(None), OTHER)
    assert second.schedule == first.schedule
    assert second.source == "cache, other costs"
    assert not warnings(caplog)


def test_a_retrace_asks_nobody(store):
    cache = PlanCache(None)
    plan_once(problem(GRAPH), PlanCache(None), CHIEF)
    plan_once(problem(GRAPH), cache, OTHER)
    store.values.clear()
    assert plan_once(problem(GRAPH), cache, OTHER).source == "cache"


def test_a_share_leaves_as_much_as_the_chief_has(store, caplog):
    """More of a worker's memory is in use: of a share of its plain peak less would be left."""
    first = plan_once(problem(GRAPH), PlanCache(None), CHIEF)
    more = replace(GRAPH, resident=GRAPH.resident + first.budget // 4)
    second = plan_once(problem(more), PlanCache(None), OTHER)
    assert second.schedule == first.schedule
    assert second.budget == first.budget + first.budget // 4
    assert not warnings(caplog)


def test_what_does_not_fit_here_is_not_taken(store, caplog):
    first = plan_once(problem(GRAPH), PlanCache(None), CHIEF)
    budget = str(first.budget)
    plan_once(problem(GRAPH, budget), PlanCache(None), CHIEF)
    more = replace(GRAPH, resident=GRAPH.resident + first.budget // 8)
    second = plan_once(problem(more, budget), PlanCache(None), OTHER)
    assert second.source == "solved"
    assert second.live_peak <= first.budget
    assert "this worker has one of its own: it now needs" in warnings(caplog)[0]


def test_a_chief_that_does_not_come_is_not_waited_for_without_end(store, caplog):
    assert plan_once(problem(GRAPH), PlanCache(None), OTHER).source == "solved"
    assert "the chief has not come to plan this step" in warnings(caplog)[0]


def test_a_chief_without_a_plan_says_so(store, caplog):
    for worker in (CHIEF, OTHER):
        with pytest.raises(InfeasibleBudgetError):
            plan_once(problem(GRAPH, "1 B"), PlanCache(None), worker)
    assert "the chief has no plan for this step" in warnings(caplog)[0]


@pytest.mark.parametrize("text", ["!", "bm90IGNvbXByZXNzZWQ="])
def test_what_cannot_be_read_is_not_taken(store, caplog, text):
    plan_once(problem(GRAPH), PlanCache(None), CHIEF)
    for key in store.values:
        if key.endswith("/plan"):
            store.values[key] = text
    assert plan_once(problem(GRAPH), PlanCache(None), OTHER).source == "solved"
    assert "cannot be read" in warnings(caplog)[0]


def test_there_are_no_workers_without_a_strategy():
    assert distribute.workers() is None
