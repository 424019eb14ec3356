"""The strategy `optimal` against exhaustive search, and its promises about limits."""

from __future__ import annotations

import _thread
import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_cuts import two_readings
from test_units import normalised_chain

from optckpt.frontends.synthetic import chain, random_graph, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import incumbent, optimal
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import static_floor
from optckpt.solvers.incumbent import Incumbent
from optckpt.solvers.registry import Progress, SolveOptions, solve

EXACT = SolveOptions(time_limit=20, gap=0.0)


def budget_between(graph: TrainingGraph, share: float) -> int:
    """`share` of the way from just below the floor to the plain peak."""
    low = static_floor(graph).bytes - 1
    high = simulate(graph, Schedule.base(graph)).peak
    return round(low + share * (high - low))


def medium_graph() -> TrainingGraph:
    return random_graph(11, 60, repeatable=1.0, repeatable_backward=0.3)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0, 1),
    again=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_agrees_with_exhaustive_search(seed: int, share: float, again: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 8), repeatable_backward=again, plain=seed % 5 == 0)
    budget = budget_between(graph, share)
    solution = solve(graph, budget, "optimal", EXACT)
    certificate = solution.certificate
    truth = cheapest(graph, budget)
    if truth is None:
        assert certificate.status == "infeasible"
        assert solution.schedule is None
        return
    assert certificate.status == "optimal"
    assert solution.schedule is not None
    result = simulate(graph, solution.schedule)
    assert result.peak <= budget
    assert result.extra_seconds == pytest.approx(truth[0], abs=2e-6 * graph.seconds)
    assert certificate.cost is not None
    assert certificate.cost == pytest.approx(result.overhead)
    assert certificate.bound <= truth[0] / graph.seconds + 1e-9
    assert certificate.bound <= certificate.cost


def test_large_relaxations_agree_with_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small graphs, as if they were large: no exact search, SCIP, moves weighed by what they change.
    monkeypatch.setattr(optimal, "LARGE_RELAXATION", -1)
    monkeypatch.setattr(optimal, "EXACT_OPERATIONS", 0)
    monkeypatch.setattr(incumbent, "LONG", 1)
    closed = 0
    for seed in range(40):
        graph = random_graph(seed, 8, repeatable_backward=0.5)
        budget = budget_between(graph, random.Random(seed).random())
        truth = cheapest(graph, budget)
        solution = solve(graph, budget, "optimal", SolveOptions(time_limit=2, gap=0.0))
        certificate = solution.certificate
        if truth is None:
            assert solution.schedule is None
            assert certificate.status in ("infeasible", "stopped")
            continue
        assert certificate.bound <= truth[0] / graph.seconds + 1e-9
        if certificate.status == "optimal":
            closed += 1
            assert certificate.cost == pytest.approx(truth[0] / graph.seconds, abs=2e-6)
    assert closed > 20


@pytest.mark.parametrize("budget", [13, 14])
def test_a_cut_that_runs_again_does_not_close_the_gap(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Annealing would find the optimum of such a small graph, and that caps a wrong bound.
    monkeypatch.setattr(Incumbent, "first_schedules", lambda self: None)
    monkeypatch.setattr(Incumbent, "improve", lambda *args, **kwargs: None)
    monkeypatch.setattr(Incumbent, "improve_while", lambda *args, **kwargs: None)
    graph = two_readings()
    truth = cheapest(graph, budget)
    assert truth is not None
    certificate = solve(graph, budget, "optimal", EXACT).certificate
    assert certificate.status == "optimal"
    assert certificate.cost == pytest.approx(truth[0] / graph.seconds, abs=2e-6)


@pytest.mark.parametrize("share", [0.5, 0.6])
def test_a_few_bytes_beside_large_buffers_are_no_obstacle(share: float) -> None:
    graph = normalised_chain(8, 64 << 20)
    budget = int(share * simulate(graph, Schedule.base(graph)).peak)
    certificate = solve(graph, budget, "optimal", EXACT).certificate
    assert certificate.status == "optimal"


@pytest.mark.parametrize("graph", [chain(12), residual_chain(6), random_graph(3, 30)])
def test_plain_peak_needs_no_re_execution(graph: TrainingGraph) -> None:
    peak = simulate(graph, Schedule.base(graph)).peak
    for budget in (None, peak, peak + 1):
        solution = solve(graph, budget)
        assert solution.schedule == Schedule.base(graph)
        assert solution.certificate.status == "optimal"
        assert solution.certificate.cost == solution.certificate.bound == 0


def test_below_the_floor_is_infeasible_at_once() -> None:
    graph = medium_graph()
    solution = solve(graph, static_floor(graph).bytes - 1)
    assert solution.schedule is None
    assert solution.certificate.status == "infeasible"
    assert solution.certificate.gap is None


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("length", [8, 20])
def test_chains_are_solved_to_the_gap(length: int, share: float) -> None:
    graph = chain(length)
    solution = solve(graph, budget_between(graph, share), options=SolveOptions(gap=0.002))
    certificate = solution.certificate
    assert certificate.status == "optimal"
    assert certificate.gap is not None
    assert certificate.gap <= 0.002


def test_resident_bytes_count() -> None:
    graph = residual_chain(4)
    budget = budget_between(graph, 0.5)
    heavier = TrainingGraph(
        graph.operations, graph.buffers, graph.outputs, resident=graph.resident + 1000
    )
    light, heavy = solve(graph, budget), solve(heavier, budget + 1000)
    assert light.certificate.cost == heavy.certificate.cost
    assert light.schedule == heavy.schedule


def test_bound_and_cost_keep_their_order_at_the_time_limit() -> None:
    graph = random_graph(5, 150, repeatable=1.0, repeatable_backward=1.0)
    budget = budget_between(graph, 0.2)
    # Compiling, once after installation, is not what this test is about.
    solve(graph, budget, options=SolveOptions(time_limit=0.1))
    started = time.monotonic()
    solution = solve(graph, budget, options=SolveOptions(time_limit=1.5, gap=0.0))
    assert time.monotonic() - started < 1.5 + 4
    certificate = solution.certificate
    assert certificate.status in ("feasible", "optimal")
    assert certificate.cost is not None
    assert 0 <= certificate.bound <= certificate.cost
    assert certificate.seconds_first is not None
    assert certificate.seconds_first <= certificate.seconds


def test_same_seed_same_schedule() -> None:
    graph = residual_chain(8)
    budget = budget_between(graph, 0.3)
    options = SolveOptions(seed=5, gap=0.003)
    first, second = (solve(graph, budget, options=options) for _ in range(2))
    assert first.certificate.status == "optimal"
    assert first.schedule == second.schedule
    assert first.certificate.bound == second.certificate.bound


def test_a_closed_gap_is_refined_alike_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # By cuts alone, as larger graphs are.
    monkeypatch.setattr(optimal, "EXACT_OPERATIONS", 0)
    graph = medium_graph()
    budget = budget_between(graph, 0.4)
    options = SolveOptions(gap=0.002, time_limit=60)
    first, second = (solve(graph, budget, options=options) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.certificate == replace(
        second.certificate,
        seconds=first.certificate.seconds,
        seconds_first=first.certificate.seconds_first,
    )
    assert first.certificate.status == "optimal"
    assert first.certificate.gap is not None
    assert first.certificate.gap < 2e-4
    # Who is content with less does not wait for it.
    rough = solve(graph, budget, options=replace(options, gap=0.02)).certificate
    assert rough.status == "optimal"
    assert rough.gap is not None
    assert rough.gap > 2e-3


def test_progress_is_monotone() -> None:
    graph = residual_chain(8)
    seen: list[Progress] = []
    solution = solve(graph, budget_between(graph, 0.3), options=SolveOptions(progress=seen.append))
    incumbents = [p.incumbent for p in seen if p.incumbent is not None]
    assert incumbents
    assert incumbents == sorted(incumbents, reverse=True)
    assert [p.bound for p in seen] == sorted(p.bound for p in seen)
    assert incumbents[-1] == pytest.approx(solution.certificate.cost)


def test_interrupt_returns_the_best_so_far() -> None:
    graph = random_graph(5, 150, repeatable=1.0, repeatable_backward=1.0)
    fired = threading.Event()

    def interrupt(progress: Progress) -> None:
        if progress.incumbent is not None and not fired.is_set():
            fired.set()
            threading.Timer(0.3, _thread.interrupt_main).start()

    options = SolveOptions(time_limit=60, gap=0.0, progress=interrupt)
    started = time.monotonic()
    solution = solve(graph, budget_between(graph, 0.2), options=options)
    assert time.monotonic() - started < 30
    assert solution.schedule is not None
    assert solution.certificate.status == "feasible"


def test_interrupt_without_a_schedule_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from optckpt.solvers import incumbent

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(incumbent, "anneal", interrupted)
    graph = residual_chain(4)
    with pytest.raises(KeyboardInterrupt):
        solve(graph, budget_between(graph, 0.5))


def test_zero_times_cost_nothing() -> None:
    graph = residual_chain(3)
    free = graph.with_costs([0.0] * len(graph.operations))
    solution = solve(free, budget_between(free, 0.5))
    assert solution.certificate.status == "optimal"
    assert solution.certificate.cost == 0
