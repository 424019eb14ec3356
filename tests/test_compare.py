"""Comparing strategies: predictions, real runs in processes of their own, one table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from optckpt.compare import PLAIN, Row, _same, _time_in_turns, _with_gaps, compare
from optckpt.config import Config, parse_config
from optckpt.errors import OptckptError
from optckpt.frontends.synthetic import chain, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.planner import make_plan
from optckpt.schedule import Plan, Schedule
from optckpt.step_process import StepError, StepProcess

TINY = """\
budget: 70%
model:
  name: resnet_cifar10
  blocks_per_stage: 2
  batch_size: 16
solver:
  time_limit: 5
compare:
  strategies: [store_all, sqrt_n, optimal]
  warmup: 1
  repeats: 3
"""


def optckpt(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "optckpt", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def measured(folder):
    """The table, and the object written, of a comparison that really ran."""
    result = optckpt("compare", "tiny.yaml", cwd=folder)
    assert result.returncode == 0, result.stderr
    data = json.loads((folder / "out/tiny/comparison.json").read_text(encoding="utf-8"))
    return result, data


def rows_of(data: dict) -> dict[str, dict]:
    return {row["strategy"]: row for row in data["rows"]}


def test_every_strategy_has_a_row(measured):
    _, data = measured
    assert [row["strategy"] for row in data["rows"]] == [PLAIN, "store_all", "sqrt_n", "optimal"]
    assert {row["strategy"]: row["reason"] for row in data["rows"] if row["reason"]} == {}
    assert data["model"]["blocks_per_stage"] == 2
    assert data["plain_seconds"] > 0
    assert not data["interrupted"]


def test_peaks_are_predicted_and_measured(measured):
    _, data = measured
    rows = rows_of(data)
    assert data["budget"] == round(0.7 * data["plain_peak"])
    for row in rows.values():
        assert row["measured_peak"] == pytest.approx(row["predicted_peak"], rel=0.15)
    assert rows["optimal"]["predicted_peak"] <= data["budget"]
    assert rows["optimal"]["measured_peak"] < rows[PLAIN]["measured_peak"]
    assert rows["store_all"]["budget_met"] is False
    assert rows["store_all"]["status"] == "over-budget"


def test_gradients_are_those_of_the_plain_step(measured):
    _, data = measured
    for name, row in rows_of(data).items():
        if name != PLAIN:
            assert row["gradients_equal"] is True, name
            assert row["gradient_difference"] == 0


def test_times_and_overheads(measured):
    _, data = measured
    rows = rows_of(data)
    assert rows[PLAIN]["time_ratio"] == 1.0
    for row in rows.values():
        assert row["time_ratio"] > 0
    assert rows["store_all"]["re_executions"] == 0
    assert rows["optimal"]["re_executions"] > 0
    assert 0 < rows["optimal"]["predicted_overhead"] <= rows["sqrt_n"]["predicted_overhead"]
    assert rows["optimal"]["gap"] >= 0
    assert rows["store_all"]["gap"] is None


def test_the_table_is_printed(measured):
    result, _ = measured
    assert "budget" in result.stdout
    for name in (PLAIN, "store_all", "sqrt_n", "optimal"):
        assert any(line.split()[:1] == [name] for line in result.stdout.splitlines()), name
    assert result.stderr == ""


def test_written_files_belong_together(measured, folder):
    out = folder / "out/tiny"
    image = matplotlib.image.imread(out / "memory.png")
    assert image.shape[0] > 500
    assert image.shape[1] > 900
    assert image[..., :3].std() > 0.05
    graph = TrainingGraph.load(out / "graph.json")
    for name in ("store_all", "sqrt_n", "optimal"):
        Plan.load(out / f"plan-{name}.json").check_graph(graph)


def test_json_without_measuring(folder, tmp_path):
    result = optckpt(
        "compare", "tiny.yaml", "--no-measure", "--json", "--budget", "80%",
        "--strategies", "speed,milp", "--out", str(tmp_path / "there"), "--time-limit", "2",
        cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    rows = rows_of(data)
    assert list(rows) == [PLAIN, "speed", "milp"]
    assert data["budget"] == round(0.8 * data["plain_peak"])
    assert data["plain_seconds"] is None
    assert rows["speed"]["measured_peak"] is None
    assert rows["speed"]["time_ratio"] is None
    assert rows["speed"]["budget_met"] == (rows["speed"]["predicted_peak"] <= data["budget"])
    # The graph is too large for the full formulation: the row says so, the others stand.
    assert rows["milp"]["reason"]
    assert rows["milp"]["predicted_peak"] is None
    assert (tmp_path / "there/memory.png").exists()


def test_budget_below_the_floor(folder):
    result = optckpt("compare", "tiny.yaml", "--no-measure", "--budget", "1MiB",
                     "--strategies", "optimal", cwd=folder)  # fmt: skip
    assert result.returncode == 2
    assert "no schedule fits the budget of 1.0 MiB" in result.stderr
    assert "Traceback" not in result.stderr
    assert "optimal" in result.stdout


def test_a_step_that_runs_out_of_memory_has_a_row(folder, tmp_path):
    result = optckpt(
        "compare", "tiny.yaml", "--strategies", "sqrt_n", "--json", "--out", str(tmp_path),
        cwd=folder, TF_MKL_ALLOC_MAX_BYTES="14000000",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(json.loads(result.stdout))
    assert rows[PLAIN]["reason"].startswith("out of memory")
    assert rows[PLAIN]["measured_peak"] is None
    assert rows["sqrt_n"]["reason"] is None
    assert 0 < rows["sqrt_n"]["measured_peak"] < 14_000_000
    assert rows["sqrt_n"]["budget_met"] is True
    for row in rows.values():
        assert row["time_ratio"] is None
        assert row["gradients_equal"] is None


def test_interruption_prints_what_was_planned(folder, tmp_path):
    work = tmp_path / "tmp"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "optckpt", "compare", "tiny.yaml", "--strategies", "sqrt_n",
         "--json", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(work)},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    # The plan lies in the working folder as soon as measuring begins, which takes seconds.
    while not list(work.glob("*/sqrt_n.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "optckpt: error: interrupted; what was found so far is printed\n"
    data = json.loads(out)
    assert data["interrupted"] is True
    assert rows_of(data)["sqrt_n"]["predicted_peak"] > 0
    assert list(work.iterdir()) == []


# --- Parts -----------------------------------------------------------------------------------


def test_unknown_strategies_are_refused_before_anything_runs():
    with pytest.raises(OptckptError, match="unknown strategy 'best'"):
        compare(Config(), strategies=["best"])


def test_same_compares_every_bit(tmp_path):
    a = {"x": np.array([1.0, -2.0], np.float32), "y": np.array([3], np.int32)}
    b = {**a, "x": np.array([1.0, -2.5], np.float32)}
    np.savez(tmp_path / "a.npz", **a)
    np.savez(tmp_path / "b.npz", **b)
    np.savez(tmp_path / "c.npz", x=a["x"])
    assert _same(tmp_path / "a.npz", tmp_path / "a.npz") == (True, 0.0)
    assert _same(tmp_path / "a.npz", tmp_path / "b.npz") == (False, 0.25)
    assert _same(tmp_path / "a.npz", tmp_path / "c.npz")[0] is False


def test_timing_alternates_and_takes_ratios_within_a_round():
    calls: list[str] = []

    class Fake:
        def __init__(self, name: str, seconds: list[float]) -> None:
            self.name, self.seconds = name, iter(seconds)

        def ask(self, do: str, steps: int) -> dict[str, float]:
            assert (do, steps) == ("duration", 1)
            calls.append(self.name)
            return {"seconds": next(self.seconds)}

    plain, other = Fake("p", [9, 1, 2, 4]), Fake("o", [9, 1.5, 4, 4])
    plain_times: list[float] = []
    settings = parse_config({"compare": {"repeats": 3}})
    assert _time_in_turns(plain, other, settings, plain_times) == [1.5, 2.0, 1.0]
    assert plain_times == [1, 2, 4]
    assert "".join(calls) == "pooppoop"


def test_gaps_refer_to_the_best_bound():
    graph = residual_chain(8)
    plan = make_plan(graph, "60%", "sqrt_n")
    tight = Plan(**{**fields_of(plan), "certificate": with_bound(plan, plan.overhead / 2)})
    rows = [Row("sqrt_n", "feasible"), Row("optimal", "optimal"), Row("speed", "failed")]
    done = _with_gaps(rows, {"sqrt_n": plan, "optimal": tight}, graph)
    assert [row.gap for row in done] == [plan.overhead / 2, plan.overhead / 2, None]


def test_a_bound_for_forward_repeats_says_nothing_about_backward_ones():
    graph = chain(8, repeatable_backward=True)
    plan = make_plan(graph, "60%", "sqrt_n")
    last = len(graph.operations) - 2
    both = replace(plan, schedule=Schedule((*plan.schedule.executions, last)))
    bound = replace(with_bound(plan, plan.overhead / 2), repeats="forward")
    rows = [Row("sqrt_n", "feasible"), Row("both", "feasible"), Row("optimal", "optimal")]
    plans = {"sqrt_n": plan, "both": both, "optimal": replace(plan, certificate=bound)}
    done = _with_gaps(rows, plans, graph)
    assert [row.gap for row in done] == [plan.overhead / 2, plan.overhead, plan.overhead / 2]
    free = replace(bound, repeats="all")
    done = _with_gaps(rows, {**plans, "optimal": replace(plan, certificate=free)}, graph)
    assert [row.gap for row in done] == [plan.overhead / 2] * 3


def fields_of(plan: Plan) -> dict:
    return {name: getattr(plan, name) for name in Plan.__slots__}


def with_bound(plan: Plan, bound: float):
    return replace(plan.certificate, bound=bound, valid_for="base order")


def test_a_dead_process_says_what_it_died_of():
    with StepProcess() as process:
        process._process.kill()
        with pytest.raises(StepError, match="killed"):
            process.ask("load", config={})


def test_a_process_reports_mistakes_in_words():
    with StepProcess() as process, pytest.raises(StepError, match="unknown key"):
        process.ask("load", config={"bugdet": 3})


def test_two_runs_of_one_step_agree_in_every_bit(tmp_path):
    # The embedding's gradient names tokens more than once.
    model = {"name": "gpt", "batch_size": 2, "blocks": 1, "width": 16, "heads": 2, "tokens": 32,
             "vocabulary": 8, "dropout": 0.1}  # fmt: skip
    config = parse_config({"model": model}).model_dump(mode="json")
    with StepProcess() as process:
        for name in ("first", "second"):
            process.ask("load", config=config)
            process.ask("build", plan=None)
            process.ask("gradients", path=str(tmp_path / f"{name}.npz"))
    assert _same(tmp_path / "first.npz", tmp_path / "second.npz") == (True, 0.0)
    with np.load(tmp_path / "first.npz") as arrays:
        assert arrays["0/loss"] != arrays["1/loss"]
        assert all(np.isfinite(arrays[name]).all() for name in arrays.files)
