"""The installed command: objects, exit codes, messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import optckpt
from optckpt.frontends.synthetic import residual_chain
from optckpt.graph import TrainingGraph
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate

KEYS = [
    "strategy", "status", "budget", "plain_peak", "peak", "overhead", "bound", "gap",
    "seconds_first", "seconds", "executions",
]  # fmt: skip


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = Path(sysconfig.get_path("scripts")) / "optckpt"
    command = [str(script)] if script.exists() else [sys.executable, "-m", "optckpt"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    residual_chain(8).save(path)
    return path


def refused(result: subprocess.CompletedProcess[str], message: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("optckpt: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_version_and_help():
    assert run("--version").stdout == f"optckpt {optckpt.__version__}\n"
    result = run("--help")
    assert result.returncode == 0
    assert "solve" in result.stdout
    assert "compare" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["solve", "{graph}", "--budget", "60%", "--json"]]
)
def test_tensorflow_is_not_loaded(graph, arguments):
    code = (
        "import sys; sys.modules['tensorflow'] = None; sys.argv = ['optckpt', *sys.argv[1:]];"
        "from optckpt.cli import main; main()"
    )
    filled = [a.format(graph=graph) for a in arguments]
    result = subprocess.run(
        [sys.executable, "-c", code, *filled], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_solve_prints_one_object(graph):
    result = run("solve", graph, "--budget", "60%", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    plain = simulate(residual_chain(8), Schedule.base(residual_chain(8))).peak
    assert answer["strategy"] == "optimal"
    assert answer["status"] in ("optimal", "feasible")
    assert answer["plain_peak"] == plain
    assert answer["budget"] == round(0.6 * plain)
    assert answer["peak"] <= answer["budget"]
    assert 0 < answer["bound"] <= answer["overhead"] + 1e-9
    assert answer["gap"] == pytest.approx(answer["overhead"] - answer["bound"])
    assert answer["executions"] > len(residual_chain(8).operations)


def test_schedule_file_is_a_plan_with_names(graph, tmp_path):
    out = tmp_path / "schedule.json"
    result = run("solve", graph, "--budget", "60%", "--strategy", "sqrt_n", "--json",
                 "--schedule", out)  # fmt: skip
    answer = json.loads(result.stdout)
    plan = Plan.load(out)
    loaded = TrainingGraph.load(graph)
    plan.check_graph(loaded)
    judged = simulate(loaded, plan.schedule)
    assert judged.peak == answer["peak"] == plan.predicted_peak
    assert judged.overhead == pytest.approx(answer["overhead"])
    assert len(plan.schedule) == answer["executions"]
    names = json.loads(out.read_text(encoding="utf-8"))["names"]
    assert names == [loaded.operations[o].name for o in plan.schedule.executions]


def test_solve_prints_a_table(graph):
    result = run("solve", graph, "--budget", "60%", "--strategy", "sqrt_n")
    assert result.returncode == 0
    for word in ("status", "budget", "peak", "extra time", "gap", "executions"):
        assert word in result.stdout


def test_solve_reads_node_link_graphs(tmp_path):
    path = tmp_path / "link.json"
    nodes = [{"id": i, "cost_cpu": 1.0, "cost_ram": 4.0} for i in range(4)]
    links = [{"source": i, "target": i + 1} for i in range(3)]
    data = {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "links": links}
    path.write_text(json.dumps(data), encoding="utf-8")
    result = run("solve", path, "--budget", "100%", "--strategy", "store_all", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["executions"] == 4


def test_budget_equal_to_the_plain_peak_recomputes_nothing(graph):
    plain = simulate(residual_chain(8), Schedule.base(residual_chain(8))).peak
    answer = json.loads(run("solve", graph, "--budget", plain, "--json").stdout)
    assert answer["status"] == "optimal"
    assert answer["overhead"] == 0
    assert answer["executions"] == len(residual_chain(8).operations)


def test_infeasible_budget(graph):
    result = run("solve", graph, "--budget", "1KiB", "--json")
    refused(result, "no schedule fits the budget of 1.0 KiB (1024 bytes): every schedule needs")
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert answer["status"] == "infeasible"
    for key in ("peak", "overhead", "gap", "executions"):
        assert answer[key] is None


def test_heuristic_that_does_not_fit(graph):
    result = run("solve", graph, "--budget", "1KiB", "--strategy", "speed", "--json")
    refused(result, "strategy 'speed' does not fit the budget")
    assert json.loads(result.stdout)["status"] == "over-budget"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve", "none.json", "--budget", "60%"], "none.json"),
        (["solve", "{graph}", "--budget", "lots"], "cannot read the budget 'lots'"),
        (["solve", "{graph}", "--budget", "60%", "--strategy", "best"], "unknown strategy 'best'"),
        (["solve", "{graph}", "--budget", "60%", "--time-limit", "-1"], "--time-limit"),
        (["solve", "{graph}", "--budget", "60%", "--strategy", "sqrt_n", "--schedule",
          "no/such/folder/out.json"], "cannot write the schedule"),
        (["compare", "none.yaml"], "cannot read the configuration none.yaml"),
        (["compare", "bad.yaml"], "bad.yaml:2: solver.time_limt: unknown key; did you mean"),
        (["compare", "good.yaml", "--strategies", "optimal,best"], "unknown strategy 'best'"),
        (["compare", "good.yaml", "--strategies", ","], "--strategies names no strategy"),
        (["compare", "good.yaml", "--budget", "lots"], "cannot read the budget 'lots'"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line_and_exit_code_2(graph, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("solver:\n  time_limt: 3\n", encoding="utf-8")
    (tmp_path / "good.yaml").write_text("budget: 60%\n", encoding="utf-8")
    refused(run(*(a.format(graph=graph) for a in arguments), cwd=tmp_path), message)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "optckpt.training-graph", "version": 99}', '{"a": 1}']
)
def test_broken_graph_files(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8")
    refused(run("solve", path, "--budget", "60%"), "broken.json")


def test_missing_option_is_a_usage_error(graph):
    result = run("solve", graph)
    assert result.returncode == 2
    assert "--budget" in result.stderr


SLOW = """
import sys, time
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.solvers import registry
from optckpt.cli import main

def slow(graph, budget, options):
    options.progress(registry.Progress(0.5, None, 0.25))
    print("started", file=sys.stderr, flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if not HANDS_OVER:
            raise
    return Solution(Schedule.base(graph), Certificate("slow", "feasible", 0.0, 0.0, 1.0, 0.5))

registry.register("slow", slow)
sys.argv = ["optckpt", "solve", *sys.argv[1:], "--strategy", "slow", "--json"]
main()
"""


@pytest.mark.parametrize("hands_over", [True, False])
def test_interruption_prints_what_there_is(graph, hands_over):
    code = SLOW.replace("HANDS_OVER", str(hands_over))
    budget = "100%" if hands_over else "60%"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(graph), "--budget", budget],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "optckpt: error: interrupted; the best result so far is printed\n"
    answer = json.loads(out)
    assert list(answer) == KEYS
    if hands_over:
        assert answer["executions"] == len(residual_chain(8).operations)
    else:
        assert answer["status"] == "stopped"
        assert answer["bound"] == 0.25
        assert answer["executions"] is None
