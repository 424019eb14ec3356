"""The best schedule so far: what is taken, what is not, and that chains are known at once."""

from __future__ import annotations

import time

import pytest

from optckpt.frontends.synthetic import chain, resnet
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import incumbent as module
from optckpt.solvers.floor import static_floor
from optckpt.solvers.heuristics import griewank, sqrt_n
from optckpt.solvers.incumbent import Incumbent, known_schedule
from optckpt.solvers.local_search import anneal, to_arrays
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.solvers.sequence import profile


def incumbent(graph: TrainingGraph, share: float, reports: list[float]) -> Incumbent:
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = round(low + share * (high - low)) - graph.resident
    made: Incumbent

    def report() -> None:
        reports.append(made.cost)

    made = Incumbent(graph, preprocess(graph), budget, SolveOptions(), time.monotonic(), report)
    return made


def test_takes_what_fits_and_is_cheaper() -> None:
    reports: list[float] = []
    found = incumbent(resnet(2, 4), 0.5, reports)
    assert not found.offer(found.base)
    assert found.schedule() is None
    found.first_schedules()
    assert found.found
    assert found.seconds_first is not None
    assert reports == sorted(reports, reverse=True)
    schedule = found.schedule()
    assert schedule is not None
    result = simulate(found.graph, schedule)
    assert result.peak <= found.budget + found.graph.resident
    assert result.overhead == pytest.approx(found.cost)
    assert found.best is None or not found.offer(found.best)


def test_schedules_of_operations_become_sequences() -> None:
    reports: list[float] = []
    graph = resnet(2, 6)
    found = incumbent(graph, 0.6, reports)
    rule = sqrt_n(graph, None, SolveOptions()).schedule
    assert rule is not None
    result = simulate(graph, rule)
    if result.peak > found.budget + graph.resident:
        pytest.skip("the rule does not fit")
    found.offer_schedule(rule)
    assert found.found
    assert found.cost <= result.overhead + 1e-12


@pytest.mark.parametrize("graph", [resnet(3, 6), chain(60)])
def test_chains_at_low_budgets_have_a_schedule_at_once(graph: TrainingGraph) -> None:
    found = incumbent(graph, 0.1, [])
    found.offer_blocks()
    assert found.found


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_long_sequences_are_annealed_by_what_moves_change(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = resnet(2, 8)
    short = incumbent(graph, share, [])
    short.improve(short.base, 3000, hot=3.0)
    monkeypatch.setattr(module, "LONG", 1)
    found, again = incumbent(graph, share, []), incumbent(graph, share, [])
    for each in (found, again):
        for hot in (3.0, 0.3):
            each.improve(each.best or each.base, 3000, hot)
    schedule = found.schedule()
    assert schedule is not None
    assert schedule == again.schedule()
    assert schedule.in_base_order
    result = simulate(graph, schedule)
    assert result.peak <= found.budget + graph.resident
    assert result.overhead == pytest.approx(found.cost)
    assert found.cost <= 1.25 * short.cost


def test_spare_time_is_put_aside() -> None:
    found = incumbent(resnet(2, 6), 0.5, [])
    found.first_schedules()
    before = found.cost
    turns = iter([True, True, False, False])
    found.improve_while(lambda: next(turns, False), seed=1)
    assert found.cost == before
    found.take_spare()
    assert found.cost <= before


def test_what_is_known_without_search() -> None:
    graph = chain(300)
    binomial = griewank(graph, None, SolveOptions())
    assert binomial.schedule is not None
    budget = simulate(graph, binomial.schedule).peak
    known = known_schedule(graph, budget, SolveOptions())
    assert known is not None
    result = simulate(graph, known)
    assert result.peak <= budget
    assert result.overhead <= simulate(graph, binomial.schedule).overhead
    assert known_schedule(graph, static_floor(graph).bytes - 1, SolveOptions()) is None


def test_thousands_of_operations_are_packed_in_a_knapsack(monkeypatch: pytest.MonkeyPatch) -> None:
    small = incumbent(resnet(2, 6), 0.5, [])
    small.offer_knapsack(0.5)
    assert not small.found
    monkeypatch.setattr(module, "LARGE", 10)
    large = incumbent(resnet(2, 6), 0.5, [])
    large.offer_knapsack(0.5)
    schedule = large.schedule()
    assert schedule is not None
    assert simulate(large.graph, schedule).peak <= large.budget + large.graph.resident
    alone = solve(large.graph, large.budget + large.graph.resident, "knapsack").certificate
    assert alone.cost is not None
    assert large.cost <= alone.cost + 1e-9


def test_of_thousands_of_inputs_one_is_taken_over() -> None:
    # Two thousand branches are summed up in place.
    branches = 2000
    operations = [Operation("in", "X", 1.0, (), (0,))]
    operations += [Operation(f"b{k}", "X", 1.0, (0,), (k,)) for k in range(1, branches + 1)]
    inputs = tuple(range(1, branches + 1))
    operations.append(Operation("sum", "AddN", 1.0, inputs, (branches + 1,), inplace=inputs))
    buffers = tuple(Buffer(f"t{k}", 100) for k in range(branches + 2))
    graph = TrainingGraph(tuple(operations), buffers, (branches + 1,))
    found = incumbent(graph, 0.5, [])
    problem = found.problem
    assert profile(problem, found.base)[-1] == 100 * branches
    evaluated = anneal(to_arrays(problem), found.base, found.budget, iterations=300)
    assert evaluated.last == found.base
