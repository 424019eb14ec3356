"""The installed command: objects, exit codes, messages."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import optckpt
from optckpt.cli import main
from optckpt.compare import Comparison
from optckpt.errors import OptckptError
from optckpt.frontends import synthetic
from optckpt.frontends.synthetic import chain, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.schedule import Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor

KEYS = [
    "strategy", "order", "repeat", "status", "budget", "plain_peak", "peak", "overhead", "bound",
    "gap", "seconds_first", "seconds", "executions",
]  # fmt: skip


def run(
    *arguments: object, stdout: Any = subprocess.PIPE, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = Path(sysconfig.get_path("scripts")) / "optckpt"
    command = [str(script)] if script.exists() else [sys.executable, "-m", "optckpt"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=120,
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    residual_chain(8).save(path)
    return path


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """The command within this process, which starts sooner, in an empty folder."""

    def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["optckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), out, err)

    return run_here


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
    assert '"60%"' in run("solve", graph, "--budget", "60").stderr
    # Whoever writes a percentage means one, however few bytes it is.
    share = run("solve", graph, "--budget", "0.00001%")
    refused(share, "; raise the budget\n")
    assert "%" not in share.stderr
    assert "%" not in result.stderr


def test_limits_on_repeats_that_are_in_the_way(call, tmp_path):
    graph = synthetic.with_random_limits(synthetic.random_graph(1, 9, repeatable=1.0), 1, 0.7)
    graph.save(tmp_path / "limits.json")
    result = call("solve", "limits.json", "--budget", "20", "--json")
    refused(result, "did without executing 'op0' again: raise the budget\n")
    assert "--time-limit" not in result.stderr
    assert json.loads(result.stdout)["status"] == "stopped"


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
        *((["solve", "{graph}", "--budget", "60%", "--time-limit", seconds], "--time-limit must be")
          for seconds in ("-1", "0", "nan", "inf", "1e300", "abc", "")),
        (["compare", "good.yaml", "--time-limit", "abc"], "--time-limit must be"),
        (["solve", "{graph}", "--budget", "9" * 400], "cannot read the budget '999"),
        (["solve", ".", "--budget", "60%"], "cannot read the graph .: Is a directory"),
        (["solve", "{graph}", "--budget", "60%", "--schedule", "."],
         "cannot write the schedule .: it is a folder"),
        (["solve", "{graph}", "--budget", "60%", "--strategy", "optimla"],
         "unknown strategy 'optimla'; did you mean 'optimal'?"),
        (["solve", "{graph}", "--budget", "60%", "--schedule", "x" * 300],
         "File name too long"),
        (["compare", "."], "cannot read the configuration .: Is a directory"),
        (["compare", "none.yaml"], "none.yaml:1: compare.strategies: names no strategy; give one"),
        (["compare", "good.yaml", "--out", "good.yaml"], "cannot write into good.yaml: File ex"),
        (["compare", "good.yaml", "--out", "good.yaml/x"], "cannot write into good.yaml/x: Not a"),
        (["solve", "{graph}"], "Missing option '--budget'; see optckpt solve --help"),
        (["solve", "{graph}", "--budget", "60%", "--best"], "No such option: --best"),
        (["solve"], "Missing argument 'GRAPH'"),
        (["guess"], "No such command 'guess'; see optckpt --help"),
        (["solve", "{graph}", "--budget", "60%", "--strategy", "sqrt_n", "--schedule",
          "no/such/folder/out.json"], "cannot write the schedule"),
        (["compare", "gone.yaml"], "cannot read the configuration gone.yaml"),
        (["compare", "bad.yaml"], "bad.yaml:2: solver.time_limt: unknown key; did you mean"),
        (["compare", "good.yaml", "--strategies", "optimal,best"], "unknown strategy 'best'"),
        *(([*start, "explicit"], "strategy 'explicit' is for Python, where SolveOptions(checkp")
          for start in (["solve", "{graph}", "--budget", "60%", "--strategy"],
                        ["compare", "good.yaml", "--strategies"])),
        (["compare", "good.yaml", "--strategies", ","], "--strategies names no strategy"),
        (["compare", "good.yaml", "--budget", "lots"], "cannot read the budget 'lots'"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line_and_exit_code_2(call, graph, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("solver:\n  time_limt: 3\n", encoding="utf-8")
    (tmp_path / "good.yaml").write_text("budget: 60%\n", encoding="utf-8")
    (tmp_path / "none.yaml").write_text("compare: {strategies: []}\n", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    filled = [a.format(graph=graph) for a in arguments]
    result = call(*filled)
    refused(result, message)
    assert result.stdout == ""
    again = call(*filled, "--json")
    refused(again, message)
    answer = json.loads(again.stdout)
    assert list(answer) == ["error", "kind"]
    assert again.stderr == f"optckpt: error: {answer['error']}\n"
    assert answer["kind"].endswith("Error")
    assert sorted(tmp_path.iterdir()) == before


def test_a_mistake_is_told_once_as_json(call, graph, tmp_path):
    answer = json.loads(call("solve", tmp_path / "none.json", "--budget", "1", "--json").stdout)
    assert answer["kind"] == "GraphError"
    assert json.loads(call("compare", "none.yaml", "--json").stdout)["kind"] == "ConfigError"
    assert json.loads(call("solve", graph, "--budget", "?", "--json").stdout)["kind"] == (
        "BudgetError"
    )


def test_without_arguments_the_help_is_shown(call):
    result = call()
    assert (result.returncode, result.stderr) == (0, "")
    assert "compare" in result.stdout


def test_a_graph_is_not_replaced_by_its_schedule(call, graph):
    before = graph.read_bytes()
    for target in (graph, graph.parent / "." / graph.name):
        result = call("solve", graph, "--budget", "60%", "--schedule", target)
        refused(result, "it is the graph itself")
    assert graph.read_bytes() == before


def test_names_are_printed_as_they_are(call, tmp_path):
    path = tmp_path / "graph.json"
    replace(chain(3), name="[/a] [red]b[/red]").save(path)
    assert "[/a] [red]b[/red]: store_all" in call(
        "solve", path, "--budget", "100%", "--strategy", "store_all"
    ).stdout  # fmt: skip


def test_names_outside_the_encoding_are_escaped(tmp_path):
    path = tmp_path / "grä.json"
    replace(chain(3), name="grä\ud800").save(path)
    result = run("solve", path, "--budget", "100%", environment={"PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert r"gr\xe4\ud800: optimal" in result.stdout


def test_empty_graph(call, tmp_path):
    path = tmp_path / "empty.json"
    TrainingGraph((), ()).save(path)
    answer = json.loads(call("solve", path, "--budget", "60%", "--json").stdout)
    assert (answer["status"], answer["executions"], answer["peak"]) == ("optimal", 0, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_output_that_cannot_be_written(graph, extra):
    arguments = ["solve", graph, "--budget", "60%", "--strategy", "sqrt_n", *extra]
    with open("/dev/full", "w") as full:
        result = run(*arguments, stdout=full)
    assert result.returncode == 2
    assert result.stderr == "optckpt: error: No space left on device\n"


def test_a_reader_that_has_gone(graph, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        arguments = ["--budget", "60%", "--strategy", "sqrt_n", "--schedule", tmp_path / "s.json"]
        result = run("solve", graph, *arguments, stdout=gone)
    assert (result.returncode, result.stderr) == (1, "")
    assert Plan.load(tmp_path / "s.json").strategy == "sqrt_n"


class TestFolderOfCompare:
    """What is left in the folder; the comparison itself is replaced."""

    @pytest.fixture
    def comparison(self, monkeypatch):
        def replaced_by(outcome):
            monkeypatch.setattr("optckpt.compare.compare", outcome)

        return replaced_by

    def test_a_failed_run_leaves_none(self, call, comparison, tmp_path):
        def fail(*args, **kwargs):
            assert (tmp_path / "a" / "b").is_dir()
            raise OptckptError("too large")

        comparison(fail)
        refused(call("compare", "--out", "a/b"), "too large")
        assert list(tmp_path.iterdir()) == []

    def test_what_was_there_stays(self, call, comparison, tmp_path):
        def fail(*args, **kwargs):
            raise OptckptError("too large")

        (tmp_path / "a").mkdir()
        comparison(fail)
        refused(call("compare", "--out", "a/b"), "too large")
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
        assert list((tmp_path / "a").iterdir()) == []

    def test_interrupted(self, call, comparison, tmp_path):
        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        comparison(interrupt)
        result = call("compare", "--json")
        assert result.returncode == 130
        assert json.loads(result.stdout) == {"error": "interrupted", "kind": "KeyboardInterrupt"}
        assert list(tmp_path.iterdir()) == []

    def test_the_result_is_printed_even_if_it_cannot_be_written(
        self, call, comparison, tmp_path, monkeypatch
    ):
        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        comparison(lambda *args, **kwargs: Comparison({}, "cpu", 8, 9, 7, 3, None, 0.0, 0.0, ()))
        monkeypatch.setattr("optckpt.report.files.write_text", full)
        result = call("compare", "--out", "a", "--json")
        refused(result, "cannot write into a: No space left on device")
        assert json.loads(result.stdout)["budget"] == 8
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "optckpt.training-graph", "version": 99}', '{"a": 1}']
)
def test_broken_graph_files(call, tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8")
    refused(call("solve", path, "--budget", "60%"), "broken.json")


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
    answer = json.loads(out)
    assert list(answer) == KEYS
    if hands_over:
        assert answer["executions"] == len(residual_chain(8).operations)
        assert err == "optckpt: error: interrupted; the best result so far is printed\n"
    else:
        assert err == "optckpt: error: interrupted; no schedule was found yet\n"
        assert answer["status"] == "stopped"
        assert answer["bound"] == 0.25
        assert answer["executions"] is None
        # Of the clock, not of the last report, which may be long ago.
        assert 0 < answer["seconds"] != 0.5


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_while_it_starts(as_json):
    """As soon as the heavy imports begin, Ctrl-C is answered in one line."""
    code = """
import sys

class Pressed:
    def find_spec(name, path=None, target=None):
        if name == "numpy":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Pressed)
from optckpt.__main__ import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", code, *(["--json"] if as_json else [])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (130, "optckpt: error: interrupted\n")
    told = json.dumps({"error": "interrupted", "kind": "KeyboardInterrupt"}) + "\n"
    assert result.stdout == (told if as_json else "")


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_before_the_command_is_read(call, monkeypatch, as_json):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupt)
    result = call("solve", *(["--json"] if as_json else []))
    assert (result.returncode, result.stderr) == (130, "optckpt: error: interrupted\n")
    assert ("KeyboardInterrupt" in result.stdout) == as_json


def test_backward_operations_are_repeated_unless_it_is_forbidden(call, tmp_path):
    graph = chain(12, repeatable_backward=True)
    graph.save(tmp_path / "graph.json")
    arguments = ("solve", "graph.json", "--json", "--schedule", "plan.json", "--budget")
    answer = json.loads(call(*arguments, "50%").stdout)
    assert answer["repeat"] == "all"
    assert Plan.load(tmp_path / "plan.json").certificate.repeats == "all"
    answer = json.loads(call(*arguments, "50%", "--repeat", "forward").stdout)
    assert answer["repeat"] == "forward"
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.certificate.repeats == "forward"
    plan.check_graph(graph)
    simulate(graph.only_forward_repeats, plan.schedule)
    below = str(static_floor(graph).bytes - 1)
    result = call("solve", "graph.json", "--budget", below)
    assert "even if backward operations are repeated, every schedule needs" in result.stderr
    result = call("solve", "graph.json", "--budget", below, "--repeat", "forward")
    assert "every schedule that repeats forward operations alone needs" in result.stderr
    refused(call(*arguments, "50%", "--repeat", "twice"), "--repeat must be 'forward' or 'all'")
