"""Checkmate's formulation against exhaustive search and against `optimal`."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import OptckptError
from optckpt.frontends.synthetic import chain, random_graph, residual_chain
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import milp
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, solve

EXACT = SolveOptions(time_limit=20, gap=0.0)


def draw(seed: int, share: float, n_ops: int) -> tuple[TrainingGraph, int]:
    rng = random.Random(seed)
    graph = random_graph(rng, n_ops, repeatable_backward=rng.choice([0.0, 0.0, 1.0]))
    low = static_floor(graph).bytes - 1
    high = simulate(graph, Schedule.base(graph)).peak
    return graph, round(low + share * (high - low))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), n_ops=st.integers(3, 8))
def test_agrees_with_exhaustive_search(seed: int, share: float, n_ops: int) -> None:
    graph, budget = draw(seed, share, n_ops)
    solution = solve(graph, budget, "milp", EXACT)
    truth = cheapest(graph, budget)
    if truth is None:
        assert solution.schedule is None
        assert solution.certificate.status in ("infeasible", "stopped")
        return
    assert solution.certificate.status != "infeasible"
    assert solution.schedule is not None
    assert solution.certificate.status == "optimal"
    result = simulate(graph, solution.schedule)
    assert result.peak <= budget
    assert result.extra_seconds == pytest.approx(truth[0], abs=2e-6 * graph.seconds)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 1), n_ops=st.integers(9, 12))
def test_agrees_with_optimal(seed: int, share: float, n_ops: int) -> None:
    graph, budget = draw(seed, share, n_ops)
    options = SolveOptions(time_limit=4, gap=0.0)
    ours = solve(graph, budget, "optimal", options).certificate
    theirs = solve(graph, budget, "milp", options).certificate
    # milp knows fewer schedules, so its cost is an upper bound on the optimum, not less.
    if theirs.cost is not None:
        assert ours.status != "infeasible"
        assert ours.bound <= theirs.cost + 1e-9
    if ours.status == theirs.status == "optimal":
        assert ours.cost is not None
        assert theirs.cost is not None
        assert ours.cost <= theirs.cost + 3e-6
    if ours.status == "infeasible":
        assert theirs.cost is None


@pytest.mark.parametrize("graph", [chain(5), residual_chain(1)])
def test_same_cost_as_optimal_on_structured_graphs(graph: TrainingGraph) -> None:
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = (low + high) // 2
    ours = solve(graph, budget, "optimal", EXACT).certificate
    theirs = solve(graph, budget, "milp", EXACT).certificate
    assert ours.status == theirs.status == "optimal"
    assert ours.cost == pytest.approx(theirs.cost, abs=3e-6)


@pytest.mark.parametrize(("n_ops", "seed"), [(6, 17), (6, 83), (7, 9), (7, 54), (8, 92)])
def test_a_second_sweep_finds_more(n_ops: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(seed, n_ops, repeatable=1.0, repeatable_backward=1.0)
    budget = static_floor(graph).bytes + 1
    truth = cheapest(graph, budget)
    assert truth is not None
    two = solve(graph, budget, "milp", EXACT).certificate
    assert two.cost == pytest.approx(truth[0] / graph.seconds, abs=2e-6)
    monkeypatch.setattr(milp, "SWEEPS", 1)
    one = solve(graph, budget, "milp", EXACT).certificate
    assert one.cost is None or one.cost > two.cost + 1e-3
    # A class of schedules that holds none that fits proves nothing about the others.
    assert one.status == ("optimal" if one.cost is not None else "stopped")
    assert one.cost is not None or one.bound <= truth[0] / graph.seconds + 1e-9


def test_infeasible_is_what_is_proven_for_all_schedules() -> None:
    graph = residual_chain(1)
    floor = static_floor(graph).bytes
    assert solve(graph, floor - 1, "milp", EXACT).certificate.status == "infeasible"


@pytest.mark.parametrize("size", [1 << 20, 1 << 30, 3 << 33])
def test_large_sizes_are_no_different(size: int) -> None:
    for make in (partial(chain, 5), partial(residual_chain, 1)):
        costs = []
        for s in (1 << 10, size):
            graph = make(s)
            low, high = static_floor(graph).bytes, simulate(graph, Schedule.base(graph)).peak
            certificate = solve(graph, low + (high - low) * 11 // 20, "milp", EXACT).certificate
            assert certificate.status == "optimal"
            costs.append(certificate.cost)
        assert costs[0] == pytest.approx(costs[1], abs=3e-6)


def test_coefficients_are_nothing_that_engines_take_for_rounding() -> None:
    graph = chain(5, size=1 << 38)
    buffers = (replace(graph.buffers[0], size=(1 << 37) + 3), *graph.buffers[1:])
    graph = replace(graph, buffers=buffers)
    budget = simulate(graph, Schedule.base(graph)).peak * 3 // 4
    model = milp.Checkmate(graph, budget, milp.sweeps_by_operation(len(graph.operations), 2)).model
    sizes = [abs(v) for v in model.value if v]
    assert min(sizes) >= 2.0**-milp.SIZE_BITS
    assert max(sizes) < 2.0**milp.ROOM_BITS


@pytest.mark.parametrize("readers", [5, 8])
def test_buffers_with_many_readers(readers: int) -> None:
    # Operation 0 writes what all others read; each of them writes as much, which only the end
    # reads, but the third, which cannot be executed again.
    operations = [Operation("a", "X", 1.0, (), (0,))]
    for k in range(1, readers + 1):
        operations.append(Operation(f"r{k}", "X", 1.0 + k, (0,), (k,), repeatable=k != 3))
    last = readers + 1
    operations.append(Operation("end", "X", 1.0, (1, 2), (last,), forward=False))
    buffers = tuple(Buffer(f"b{k}", 100) for k in range(last + 1))
    graph = TrainingGraph(tuple(operations), buffers, (last, 0, 3))
    plain = simulate(graph, Schedule.base(graph)).peak
    for budget in range(static_floor(graph).bytes, plain + 1, 100):
        ours = solve(graph, budget, "milp", EXACT).certificate
        truth = cheapest(graph, budget)
        assert (ours.cost is None) == (truth is None)
        if truth is not None:
            assert ours.cost == pytest.approx(truth[0] / graph.seconds, abs=3e-6)


def test_refuses_large_graphs() -> None:
    n = milp.MAX_OPERATIONS + 1
    graph = TrainingGraph(
        tuple(Operation(f"op{i}", "X", 1.0, (), (i,)) for i in range(n)),
        tuple(Buffer(f"b{i}", 1) for i in range(n)),
    )
    with pytest.raises(OptckptError, match=rf"at most 60 operations, this one has {n}"):
        solve(graph, 1, "milp")


def test_no_budget_is_the_plain_step() -> None:
    graph = chain(5)
    solution = solve(graph, None, "milp")
    assert solution.schedule == Schedule.base(graph)
    assert solution.certificate.status == "optimal"
