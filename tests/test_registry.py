import sys

import numpy as np
import pytest

from optckpt.errors import OptckptError, ScheduleError
from optckpt.frontends import synthetic
from optckpt.registry import Registry
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.registry import SolveOptions, get, names, register, solve

GRAPH = synthetic.chain(4)
PLAIN = Schedule.base(GRAPH)
PEAK = simulate(GRAPH, PLAIN).peak


def strategy(schedule, status="feasible", cost=0.0):
    return lambda graph, budget, options: Solution(
        schedule, Certificate("mine", status, cost, 0.0, 0.0)
    )


@pytest.fixture(autouse=True)
def no_lasting_registration(monkeypatch):
    monkeypatch.setattr(registry._strategies, "_registered", {})


def test_built_in_names():
    assert {
        "optimal", "milp", "store_all", "sqrt_n", "chen_greedy", "speed", "griewank", "explicit",
        "retention", "lp_rounding", "rotor", "knapsack",
    } <= set(names())  # fmt: skip


def test_unknown_names_list_the_known_ones():
    with pytest.raises(OptckptError, match=r"'sqrtn'.*sqrt_n"):
        get("sqrtn")


def test_users_add_and_replace_strategies():
    mine = strategy(PLAIN)
    register("mine", mine)
    assert names()[-1] == "mine"
    assert get("mine") is mine
    assert solve(GRAPH, PEAK, "mine").schedule == PLAIN
    register("sqrt_n", mine)
    assert get("sqrt_n") is mine
    assert names().count("sqrt_n") == 1


@pytest.mark.parametrize("name", ["", 3, None])
def test_names_are_texts(name):
    with pytest.raises(OptckptError, match="the name of a strategy is a text, got"):
        register(name, strategy(PLAIN))


def test_built_in_ones_are_imported_when_first_used(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("thing = 7\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    things: Registry[int] = Registry("thing", {"late": "late_module:thing"})
    assert "late_module" not in sys.modules
    assert things.get("late") == 7
    things.register("other", 8)
    assert things.names() == ["late", "other"]
    assert Registry("thing", {}).names() == []
    with pytest.raises(OptckptError, match="unknown thing 'lat'; known: late, other"):
        things.get("lat")


def test_options_reach_the_strategy():
    def check(graph, budget, options):
        assert (graph, budget, options) == (GRAPH, 5 * PEAK, SolveOptions(seed=7))
        return strategy(PLAIN)(graph, budget, options)

    assert solve(GRAPH, 5 * PEAK, check, SolveOptions(seed=7)).schedule == PLAIN


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("time_limit", [0, -1, float("inf"), float("nan"), 1e300, True, "30", None, 10**400]),
        ("gap", [-1e-3, float("inf"), float("nan"), False, "1 %"]),
        ("seed", [-1, 1.0, float("nan"), True, 2**31, 10**400]),
        ("threads", [-1, 2.0, True]),
    ],
)
def test_options_out_of_range_are_named(name, values):
    for value in values:
        with pytest.raises(OptckptError, match=f"^{name} must be a .*, got "):
            SolveOptions(**{name: value})


def test_numbers_of_numpy_are_numbers():
    options = SolveOptions(time_limit=np.float32(2), gap=0, seed=np.int64(3), threads=np.int32(1))
    assert options == SolveOptions(time_limit=2.0, gap=0.0, seed=3, threads=1)
    with pytest.raises(OptckptError, match="gap must be"):
        SolveOptions(gap=np.float64("nan"))


def test_the_referee_refuses_a_false_peak():
    with pytest.raises(OptckptError, match=rf"claims to fit {PEAK - 1} bytes.*peaks at {PEAK}"):
        solve(GRAPH, PEAK - 1, strategy(PLAIN))
    assert solve(GRAPH, PEAK - 1, strategy(PLAIN, "over-budget")).schedule == PLAIN
    assert solve(GRAPH, None, strategy(PLAIN)).schedule == PLAIN


@pytest.mark.parametrize("cost", [0.1, None])
def test_the_referee_refuses_a_false_cost(cost):
    with pytest.raises(OptckptError, match="claims a cost"):
        solve(GRAPH, PEAK, strategy(PLAIN, cost=cost))


def test_the_referee_refuses_an_impossible_schedule():
    with pytest.raises(ScheduleError, match="step 0"):
        solve(GRAPH, PEAK, strategy(Schedule(PLAIN.executions[::-1])))


def test_no_schedule_is_an_answer():
    answer = solve(GRAPH, 1, strategy(None, "infeasible", None))
    assert answer.schedule is None
    assert answer.certificate.status == "infeasible"
