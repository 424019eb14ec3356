"""The process that runs OR-Tools: answers, limits, failures, reuse."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optckpt.errors import OptckptError
from optckpt.solvers import engine
from optckpt.solvers.engine import INFINITY, MipModel, Solve, solve_mip


def knapsack(room: float) -> MipModel:
    """Worth 5, 4, 3 for sizes 4, 3, 2."""
    model = MipModel()
    columns = [model.add_column(cost=-worth) for worth in (5.0, 4.0, 3.0)]
    model.add_row(dict(zip(columns, (4.0, 3.0, 2.0), strict=True)), upper=room)
    return model


@pytest.mark.parametrize("name", ["highs", "scip"])
def test_answers(name: engine.Engine) -> None:
    result = solve_mip(knapsack(5), time_limit=10, engine=name)
    assert result.status == "optimal"
    assert result.values == pytest.approx([0, 1, 1])
    assert -7 - 1e-4 < result.bound <= -7
    impossible = knapsack(5)
    impossible.add_row({0: 1.0, 1: 1.0, 2: 1.0}, lower=3)
    assert solve_mip(impossible, time_limit=10, engine=name).status == "infeasible"


def test_hint_is_accepted() -> None:
    result = solve_mip(knapsack(5), time_limit=10, engine="scip", hint=[0.0, 1.0, 1.0])
    assert result.status == "optimal"


def test_a_limit_of_nodes_leaves_a_bound() -> None:
    rng = random.Random(1)
    model = MipModel()
    columns = [model.add_column(cost=-rng.uniform(10, 20)) for _ in range(60)]
    for _ in range(8):
        model.add_row({c: rng.uniform(10, 20) for c in columns}, upper=400.0)
    full = solve_mip(model, time_limit=20, gap=1.0)
    first, second = (solve_mip(model, time_limit=60, nodes=1) for _ in range(2))
    assert first.status == second.status != "optimal"
    assert -INFINITY < first.bound == second.bound <= full.bound + 1.0


def test_a_linear_program_out_of_time_has_no_values_that_break_its_rows() -> None:
    rng = random.Random(0)
    model = MipModel()
    for _ in range(1000):
        model.add_column(cost=rng.uniform(1, 2), upper=3.0)
    for _ in range(1000):
        model.add_row({c: rng.uniform(0.5, 2) for c in rng.sample(range(1000), 20)}, lower=5.0)
    for limit in (0.02, 0.1, 0.5):
        result = solve_mip(model, time_limit=limit, relax=True)
        activity = [0.0] * 1000
        for r, c, a in zip(model.row, model.column, model.value, strict=True):
            activity[r] += a * (result.values[c] if result.values else 3.0)
        assert min(activity) > 5 - 1e-6
        assert (result.status == "unknown") == (result.values is None)


def test_workers_are_used_again_and_cancelled() -> None:
    solve_mip(knapsack(5), time_limit=10)
    with engine._lock:
        idle = list(engine._idle)
    assert idle
    solve_mip(knapsack(4), time_limit=10)
    with engine._lock:
        assert engine._idle[-1] is idle[-1]
    run = Solve(knapsack(5), time_limit=10)
    run.cancel()
    run.cancel()
    assert idle[-1].process.poll() is not None
    assert solve_mip(knapsack(5), time_limit=10).status == "optimal"


def test_a_model_that_the_solver_rejects_is_an_error() -> None:
    model = knapsack(5)
    model.value[0] = float("nan")
    with pytest.raises(OptckptError, match="OR-Tools failed"):
        solve_mip(model, time_limit=10)
    assert solve_mip(knapsack(5), time_limit=10).status == "optimal"


def test_a_dead_worker_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine._lock:
        for worker in engine._idle:
            worker.kill()
        engine._idle.clear()
    monkeypatch.setattr(engine.sys, "executable", sys.executable + "-missing")
    with pytest.raises((OptckptError, FileNotFoundError)):
        solve_mip(knapsack(5), time_limit=10)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_worker_ends_with_its_parent() -> None:
    # A child of the parent's keeps the worker's input open: it is as if it were solving.
    script = (
        "import os, signal, time\n"
        "from optckpt.solvers import engine\n"
        "worker = engine._Worker().process.pid\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.close(1)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(worker, child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    worker, child = map(int, done.stdout.split())
    try:
        give_up = time.monotonic() + 30
        while is_running(worker) and time.monotonic() < give_up:
            time.sleep(0.1)
        assert not is_running(worker)
    finally:
        os.kill(child, signal.SIGKILL)


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_solvers_need_no_tensorflow_and_leave_no_process() -> None:
    script = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from optckpt.frontends.synthetic import chain\n"
        "from optckpt.solvers.registry import solve\n"
        "from optckpt.solvers import engine\n"
        "s = solve(chain(10), 12)\n"
        "assert 'ortools' not in sys.modules\n"
        "print(s.certificate.status, engine._idle[0].process.pid if engine._idle else '')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
