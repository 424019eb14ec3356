import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import BudgetError, OptckptError, ScheduleError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.registry import Registry
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.brute_force import cheapest
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
    with pytest.raises(OptckptError, match=r"unknown thing 'lat'; did you mean 'late'\?"):
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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("checkpoints", [3, ("a",), (1.0,), (True,), iter((1,))]),
        ("progress", [7, "loud"]),
        ("start", [(0, 1), 3]),
    ],
)
def test_options_of_another_kind_are_named(name, values):
    for value in values:
        with pytest.raises(OptckptError, match=f"^{name} must be .*, got "):
            SolveOptions(**{name: value})


def test_checkpoints_in_any_collection():
    for kept in ((1, 2), [1, 2], {1, 2}, np.array([1, 2]), ()):
        assert SolveOptions(checkpoints=kept).checkpoints is kept


@pytest.mark.parametrize("budget", ["50%", float("nan"), float("inf"), 0.5, 3500.7, True, [5]])
def test_a_budget_here_is_in_bytes(budget):
    with pytest.raises(BudgetError, match=r"must be a whole number of bytes here, got .*resolve"):
        solve(GRAPH, budget, strategy(PLAIN))


@pytest.mark.parametrize("budget", [PEAK, float(PEAK), np.int64(PEAK), np.float64(PEAK), 10**30])
def test_whole_numbers_of_any_kind_are_budgets(budget):
    def check(graph, budget, options):
        assert type(budget) is int
        return strategy(PLAIN)(graph, budget, options)

    assert solve(GRAPH, budget, check).schedule == PLAIN


@pytest.mark.parametrize("wrong", [5, None, ["optimal"]])
def test_a_strategy_is_a_name_or_a_function(wrong):
    with pytest.raises(OptckptError, match=r"strategy= takes a name \(optimal, .*\) or a function"):
        solve(GRAPH, PEAK, wrong)


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


# --- Operation.repeat_before: nothing is repeated after what it reads was overwritten -------------


def limited_graph(seed, n):
    graph = synthetic.random_graph(seed, n, repeatable=0.9, repeatable_backward=0.5)
    return synthetic.with_random_limits(graph, seed, 0.6)


def check_under_limits(graph, budget, name, order="fixed"):
    """What any strategy may claim of a graph with limits, by exhaustive search in base order."""
    answer = solve(graph, budget, name, SolveOptions(time_limit=5.0, gap=0.0, order=order))
    certificate = answer.certificate
    best = None if order == "free" else cheapest(graph, budget)
    if certificate.status == "infeasible":
        assert best is None
        assert answer.schedule is None
        return certificate
    if answer.schedule is None:
        assert certificate.status == "stopped"
        return certificate
    result = simulate(graph, answer.schedule)
    assert (certificate.status == "over-budget") == (result.peak > budget)
    assert certificate.cost == pytest.approx(result.overhead, abs=1e-9)
    assert certificate.bound <= certificate.cost + 1e-9
    if order == "free" or result.peak > budget:
        return certificate
    assert best is not None
    tolerance = 1e-6 * graph.seconds
    if answer.schedule.in_base_order:
        assert result.extra_seconds >= best[0] - tolerance
    if "at most" not in certificate.valid_for:
        assert certificate.bound * graph.seconds <= best[0] + tolerance
    if certificate.status == "optimal" and certificate.valid_for == "base order":
        assert result.extra_seconds <= best[0] + tolerance
    return certificate


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.4, 1.0))
def test_the_optimal_strategy_under_limits(seed, share):
    graph = limited_graph(seed, 4 + seed % 4)
    plain = simulate(graph, Schedule.base(graph)).peak
    check_under_limits(graph, int(share * plain), "optimal", ("fixed", "free")[seed % 5 == 0])


QUICK = ["store_all", "sqrt_n", "chen_greedy", "speed", "knapsack", "lp_rounding", "milp"]


@pytest.mark.parametrize("name", QUICK)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), share=st.floats(0.4, 1.0))
def test_every_strategy_under_limits(name, seed, share):
    graph = limited_graph(seed, 4 + seed % 4)
    plain = simulate(graph, Schedule.base(graph)).peak
    check_under_limits(graph, int(share * plain), name)


def test_constraint_programming_under_limits():
    for seed in range(2):
        graph = limited_graph(seed, 6)
        plain = simulate(graph, Schedule.base(graph)).peak
        check_under_limits(graph, int(0.75 * plain), "retention")


def overwritten_layer(limit):
    """Four layers and their gradients; the first is overwritten as soon as `limit` has run."""
    ops = [Operation(f"f{i}", "F", 1.0, (i - 1,) * (i > 0), (i,)) for i in range(4)]
    for k, i in enumerate(reversed(range(4))):
        reads = (i, *((3 + k,) if k else ()))
        ops.append(Operation(f"g{i}", "B", 1.0, reads, (4 + k,), forward=False, repeatable=False))
    ops[0] = replace(ops[0], repeat_before=(limit,))
    sizes = (4,) * 4 + (1,) * 4
    return TrainingGraph(tuple(ops), tuple(Buffer(f"b{i}", s) for i, s in enumerate(sizes)), (7,))


def test_a_limit_that_costs_something_leaves_the_bound_of_the_graph_without():
    loose, strict = overwritten_layer(7), overwritten_layer(4)
    budget = 13
    free, bound = solve(loose, budget), solve(strict, budget)
    assert free.certificate.status == "optimal"
    best = cheapest(strict, budget)
    assert best is not None
    assert bound.schedule is not None
    assert simulate(strict, bound.schedule).peak <= budget
    assert bound.certificate.bound <= best[0] / strict.seconds + 1e-9
    assert bound.certificate.cost >= best[0] / strict.seconds - 1e-9
    assert bound.certificate.seconds >= 0


def test_a_strategy_that_repeats_late_is_asked_again_without_these_repeats():
    graph = overwritten_layer(4)
    asked = []

    def again(graph, budget, options):
        asked.append((graph, options))
        late = (0,) if graph.operations[0].repeatable else ()
        executions = (0, 1, 2, 3, 4, *late, 5, 6, 7)
        cost = len(late) / graph.seconds
        return Solution(
            Schedule(executions), Certificate("again", "optimal", cost, cost and 0.05, 2.0)
        )

    start = Schedule.base(graph)
    answer = solve(graph, None, again, SolveOptions(time_limit=10.0, start=start))
    assert answer.schedule == Schedule.base(graph)
    (first, options), (second, left) = asked
    assert first == graph.without_repeat_limits
    assert not second.operations[0].repeatable
    assert [op.repeat_before for op in second.operations] == [()] * 8
    assert (options.start, left.start) == (start, None)
    assert 2.0 <= left.time_limit <= 10.0
    # Bound and status are those of the round without limits; both rounds took their time.
    assert answer.certificate.bound == 0.05
    assert answer.certificate.seconds == 4.0
    assert answer.barred == (0,)


def test_no_answer_without_late_repeats_is_no_proof():
    """That no schedule fits if some operations are not repeated at all proves nothing."""
    graph = overwritten_layer(4)

    def strict(graph, budget, options):
        if graph.operations[0].repeatable:
            executions = (0, 1, 2, 3, 4, 0, 5, 6, 7)
            return Solution(Schedule(executions), Certificate("s", "optimal", 1 / 8, 1 / 8, 0.0))
        return Solution(None, Certificate("s", "infeasible", None, 0.0, 0.0))

    answer = solve(graph, None, strict)
    assert answer.schedule is None
    assert answer.certificate.status == "stopped"
    assert answer.certificate.bound == 1 / 8
    assert answer.barred == (0,)


def test_no_schedule_under_limits_though_there_is_one():
    """Two operations must be repeated, but not as late as is best without limits."""
    graph = synthetic.with_random_limits(synthetic.random_graph(7, 9, repeatable=1.0), 7, 0.7)
    assert cheapest(graph, 25) is not None
    answer = solve(graph, 25, "optimal", SolveOptions(time_limit=10.0, threads=1))
    if answer.schedule is None:
        assert answer.certificate.status == "stopped"
        assert answer.barred
        assert all(graph.operations[o].repeat_before for o in answer.barred)
    # Without limits in the way, nothing is barred.
    assert solve(graph.without_repeat_limits, 25, "optimal").barred == ()


@pytest.mark.parametrize("order", ["fixed", "free"])
def test_a_start_that_is_no_schedule_of_the_graph_is_passed_over(order):
    """As those are that were found for a graph in which more may be repeated."""
    graph = synthetic.chain(8)
    n = len(graph.operations)
    backward = next(o for o, op in enumerate(graph.operations) if not op.forward)
    last = n - 1
    starts = {
        "repeats what must not be": (*range(last), backward, last),
        "lacks an operation": tuple(range(last)),
        "reads what is not there": tuple(reversed(range(n))),
        "has operations that the graph has not": (*range(n), n),
    }
    operations = list(graph.operations)
    operations[backward] = replace(operations[backward], repeatable=False)
    graph = replace(graph, operations=tuple(operations))
    budget = int(0.7 * simulate(graph, Schedule.base(graph)).peak)
    options = SolveOptions(time_limit=5.0, order=order)
    alone = solve(graph, budget, "optimal", options)
    assert alone.schedule is not None
    for what, executions in starts.items():
        with pytest.raises(ScheduleError):
            simulate(graph, Schedule(executions))
        found = solve(graph, budget, "optimal", replace(options, start=Schedule(executions)))
        assert found.certificate.cost == pytest.approx(alone.certificate.cost, abs=1e-3), what


def test_a_start_in_another_order_is_passed_over_where_the_order_is_fixed():
    graph = synthetic.random_layered(24, seed=3)
    order = other_order(graph)
    seen = []

    def see(graph, budget, options):
        seen.append(options.start)
        return Solution(Schedule.base(graph), Certificate("see", "feasible", 0.0, 0.0, 0.0))

    for kind in ("fixed", "free"):
        solve(graph, None, see, SolveOptions(start=order, order=kind))
    assert seen == [None, order]


def other_order(graph: TrainingGraph) -> Schedule:
    """The base order with two neighbours exchanged that do not need one another."""
    base = list(range(len(graph.operations)))
    for k in base[:-1]:
        swapped = Schedule((*base[:k], k + 1, k, *base[k + 2 :]))
        try:
            simulate(graph, swapped)
        except ScheduleError:
            continue
        return swapped
    raise AssertionError("every operation needs the one before")


def last_first(graph, budget, options):
    """Repeats, at the very end, the last operation that may be repeated."""
    again = [o for o, op in enumerate(graph.operations) if op.repeatable][-1:]
    schedule = Schedule((*Schedule.base(graph).executions, *again))
    cost = simulate(graph, schedule).overhead
    return Solution(schedule, Certificate("late", "feasible", cost, 0.0, 0.0))


def test_rounds_end_and_share_the_time(monkeypatch):
    graph = synthetic.with_random_limits(synthetic.random_graph(3, 60, repeatable=1.0), 3, 0.9)
    limited = sum(op.repeatable and bool(op.repeat_before) for op in graph.operations)
    assert limited > 2 * registry.ROUNDS
    given_time = []
    clock = SimpleNamespace(perf_counter=lambda: sum(given_time))
    monkeypatch.setattr(registry, "time", clock)

    def watched(graph, budget, options):
        given_time.append(options.time_limit)
        return last_first(graph, budget, options)

    answer = solve(graph, None, watched, SolveOptions(time_limit=100.0))
    assert not registry._repeated_late(graph, answer.schedule)
    assert len(answer.barred) == limited
    assert 1 < len(given_time) <= registry.ROUNDS + 1
    assert given_time[0] == 80.0
    assert sum(given_time) <= 110.0


def test_no_round_after_an_interruption():
    graph = synthetic.with_random_limits(synthetic.random_graph(3, 60, repeatable=1.0), 3, 0.9)
    calls = []

    def interrupted(graph, budget, options):
        calls.append(1)
        raise registry.Interrupted(last_first(graph, budget, options))

    with pytest.raises(KeyboardInterrupt):
        solve(graph, None, interrupted)
    assert calls == [1]
