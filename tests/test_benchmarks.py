"""The benchmark of the strategies, on tiny graphs: instances, budgets, resuming, the report."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from pathlib import Path

import pytest

from optckpt.errors import BudgetError, OptckptError
from optckpt.frontends import synthetic
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.floor import static_floor

FOLDER = Path(__file__).parent.parent / "benchmarks"


def script(name: str):
    """A module of the folder of benchmarks, which is no package."""
    known = f"benchmarks_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        sys.path.insert(0, str(FOLDER))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(FOLDER))
    return sys.modules[known]


instances = script("instances")
solvers = script("solvers")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command with its folders, and how many times it asked a strategy."""
    asked = []

    def watched(instance, limit, strategy, options):
        asked.append((instance.name, limit, strategy))
        return answer(instance, limit, strategy, options)

    answer = solvers.answer
    monkeypatch.setattr(solvers, "answer", watched)

    def call(*arguments):
        asked.clear()
        code = solvers.main(
            [*arguments, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "docs")]
        )
        return code, list(asked)

    return call


TINY = ("chain:6:size=1024", "--time-limit", "5", "--budgets", "+50%,90%")


class TestInstances:
    @pytest.mark.parametrize(
        ("text", "graph"),
        [
            ("chain:7", synthetic.chain(7)),
            ("chain:n=3:1024", None),
            ("chain:7:size=1024:seconds=1e-2", synthetic.chain(7, 1024, 0.01)),
            ("resnet:1:2:repeatable_backward=true", synthetic.resnet(
                1, 2, repeatable_backward=True)),
            ("random_layered:20:7", synthetic.random_layered(20, 7)),
            ("unet:1", synthetic.unet(1)),
        ],
    )  # fmt: skip
    def test_generators(self, tmp_path, text, graph):
        if graph is None:
            with pytest.raises(OptckptError, match="multiple values for argument 'n'"):
                instances.load(text, tmp_path)
        else:
            assert instances.load(text, tmp_path).graph == graph
            assert instances.load(text, tmp_path).name == text

    def test_files_are_called_by_their_names(self, tmp_path):
        synthetic.chain(3).save(tmp_path / "small.json")
        found = instances.load(str(tmp_path / "small.json"), tmp_path)
        assert (found.name, found.graph) == ("small", synthetic.chain(3))

    @pytest.mark.parametrize(
        "text", ["chains:7", "chain", "chain:x=1", "chain:a", "chain:0", "chain:3:depth=2",
                 "gpt:wide=3", "gpt:7", "none.json", ""],
    )  # fmt: skip
    def test_mistakes(self, tmp_path, text):
        with pytest.raises(OptckptError) as error:
            instances.load(text, tmp_path)
        assert "\n" not in str(error.value)

    def test_networks_come_from_the_cache(self, tmp_path, monkeypatch):
        asked = []

        class Process:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def ask(self, do, **arguments):
                asked.append((do, arguments))
                if do == "capture":
                    for path in (arguments["path"], arguments["plain_path"]):
                        synthetic.chain(4).save(path)

        monkeypatch.setattr(instances, "StepProcess", Process)
        found = instances.load("gpt:blocks=2,width=64", tmp_path)
        assert found.graph == synthetic.chain(4)
        assert asked[0][1]["config"]["model"]["blocks"] == 2
        assert [do for do, _ in asked] == ["load", "capture"]
        assert instances.load("gpt:width=64:blocks=2", tmp_path).graph == found.graph
        assert len(asked) == 2
        instances.load("gpt:blocks=3,width=64", tmp_path)
        assert len(asked) == 4
        assert len(list(tmp_path.iterdir())) == 2

    def test_keys_see_costs_but_not_names(self):
        graph = synthetic.chain(3)
        key = instances.Instance("a", graph).key
        assert instances.Instance("b", graph).key == key
        dear = graph.with_costs([2.0] * len(graph.operations))
        assert instances.Instance("a", dear).key != key

    def test_budgets(self):
        found = instances.Instance("a", synthetic.chain(9, 1000))
        peak = simulate(found.graph, Schedule.base(found.graph)).peak
        floor = static_floor(found.graph).bytes
        assert found.budget("+0.1%") >= floor
        assert found.budget("+25%") == floor + round(0.25 * (peak - floor))
        assert found.budget("80%") == round(0.8 * peak)
        assert found.budget("4kB") == 4000
        for text in ("", "+", "+3", "+4kB", "many"):
            with pytest.raises(BudgetError):
                found.budget(text)


def test_second_run_solves_nothing(run, tmp_path, capsys):
    strategies = [*solvers.known_strategies()]
    assert strategies[0] == "optimal"
    assert {"sqrt_n", "chen_greedy", "speed", "griewank", "store_all"} < set(strategies)
    assert "explicit" not in strategies
    code, asked = run(*TINY)
    assert code == 0
    assert len(asked) == len(set(asked)) == 2 * len(strategies)
    first = json.loads((tmp_path / "docs" / "solvers.json").read_text(encoding="utf-8"))
    lines = (tmp_path / "cache" / "results.jsonl").read_text(encoding="utf-8")
    assert "0 known" in capsys.readouterr().err

    assert run(*TINY) == (0, [])
    assert "0 solved" in capsys.readouterr().err
    again = json.loads((tmp_path / "docs" / "solvers.json").read_text(encoding="utf-8"))
    assert again == first
    assert (tmp_path / "cache" / "results.jsonl").read_text(encoding="utf-8") == lines

    # Another budget, option or strategy is another question.
    assert len(run(*TINY, "--budgets", "+50%,70%", "--strategies", "sqrt_n")[1]) == 1
    assert len(run(*TINY, "--gap", "0.5", "--strategies", "sqrt_n")[1]) == 2
    assert len(run(*TINY, "--fresh", "--strategies", "sqrt_n")[1]) == 2


def test_the_report(run, tmp_path):
    assert run(*TINY, "--strategies", "optimal,sqrt_n,milp")[0] == 0
    data = json.loads((tmp_path / "docs" / "solvers.json").read_text(encoding="utf-8"))
    graph = synthetic.chain(6, 1024)
    peak = simulate(graph, Schedule.base(graph)).peak
    assert [(r["share"], r["strategy"]) for r in data["results"]] == [
        (share, name) for share in ("+50%", "90%") for name in ("optimal", "sqrt_n", "milp")
    ]
    by_strategy = {r["strategy"]: r for r in data["results"] if r["share"] == "+50%"}
    best = by_strategy["optimal"]
    assert best["status"] == "optimal"
    assert best["peak"] <= best["budget"] < best["plain_peak"] == peak
    assert best["floor"] == static_floor(graph).bytes
    assert 0 < best["bound"] <= best["overhead"] + 1e-9
    assert 0 <= best["seconds_first"] <= best["seconds_best"] <= best["seconds"]
    assert by_strategy["milp"]["overhead"] == pytest.approx(best["overhead"], abs=2e-3)
    highest = max(r["bound"] for r in by_strategy.values())
    for r in by_strategy.values():
        if r["status"] in ("optimal", "feasible"):
            assert r["gap"] == pytest.approx(max(0.0, r["overhead"] - highest), abs=1e-9)
    text = (tmp_path / "docs" / "solvers.md").read_text(encoding="utf-8")
    assert sum(line.startswith("| chain:6:size=1024 | ") for line in text.splitlines()) == 7
    assert {"cores", "cpu", "memory", "python", "ortools"} <= data["machine"].keys()
    both = text + json.dumps(data)
    assert str(tmp_path) not in both
    assert platform.node() not in both


def test_half_a_line_is_left_out(run, tmp_path):
    arguments = (*TINY, "--strategies", "sqrt_n,store_all")
    assert len(run(*arguments)[1]) == 4
    file = tmp_path / "cache" / "results.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text(text[:-30], encoding="utf-8")
    assert len(run(*arguments)[1]) == 1
    assert run(*arguments)[1] == []
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[3] == text.splitlines()[3][:-29]
    assert json.loads(lines[4])["key"] == json.loads(text.splitlines()[3])["key"]


def test_refusals_are_answers_and_crashes_are_not(run, tmp_path, monkeypatch):
    def refuse(graph, budget, options):
        raise OptckptError("not this one")

    def crash(graph, budget, options):
        raise ZeroDivisionError

    monkeypatch.setattr(registry._strategies, "_registered", {})
    registry.register("refuse", refuse)
    registry.register("crash", crash)
    arguments = (*TINY, "--strategies", "refuse,crash,store_all")
    code, asked = run(*arguments)
    assert (code, len(asked)) == (1, 6)
    data = json.loads((tmp_path / "docs" / "solvers.json").read_text(encoding="utf-8"))
    assert [r["status"] for r in data["results"]] == ["refused", "over-budget"] * 2
    assert data["results"][0]["reason"] == "not this one"
    assert [name for _, _, name in run(*arguments)[1]] == ["crash", "crash"]


def test_interrupted_answers_are_not_kept(run, tmp_path, monkeypatch):
    interrupting = True

    def interrupted(graph, budget, options):
        if interrupting and budget is not None and graph == synthetic.chain(6, 1024):
            raise KeyboardInterrupt
        schedule = Schedule.base(graph)
        return Solution(schedule, Certificate("mine", "over-budget", 0.0, 0.0, 0.0))

    monkeypatch.setattr(registry._strategies, "_registered", {})
    registry.register("mine", interrupted)
    arguments = (*TINY, "--strategies", "store_all,mine")
    assert run(*arguments)[0] == 1
    assert len((tmp_path / "cache" / "results.jsonl").read_text("utf-8").splitlines()) == 1
    interrupting = False
    code, asked = run(*arguments)
    assert code == 0
    assert [name for _, _, name in asked] == ["mine", "store_all", "mine"]


@pytest.mark.parametrize(
    "arguments",
    [["chain:x=1"], [*TINY, "--budgets", "lots"], [*TINY, "--strategies", "best"],
     [*TINY, "--time-limit", "nan"]],
)  # fmt: skip
def test_mistakes_end_with_code_2(run, tmp_path, capsys, arguments):
    assert run(*arguments) == (2, [])
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "docs").exists()


def test_gaps_use_the_best_bound_that_holds():
    def record(strategy, overhead, bound, budget=10):
        return {"instance": "x", "budget": budget, "strategy": strategy, "status": "feasible",
                "overhead": overhead, "bound": bound}  # fmt: skip

    records = [
        record("in base order", 0.3, 0.2),
        record("heuristic", 0.5, 0.0),
        record("in another order", 0.1, 0.05),
        record("other budget", 0.4, 0.0, budget=20),
        {**record("too high", 0.4, 0.0), "status": "over-budget"},
        {"instance": "x", "budget": 10, "strategy": "r", "status": "refused", "reason": ""},
    ]
    gaps = [r["gap"] for r in solvers.with_gaps(records)]
    assert gaps == [pytest.approx(0.1), pytest.approx(0.3), pytest.approx(0.05), 0.4, None, None]
