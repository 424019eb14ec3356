"""The exact search against brute force, other strategies, and its promises about limits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_support import between

from optckpt.frontends.synthetic import chain, random_graph
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import engine
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.engine import MipResult, solve_mip
from optckpt.solvers.exact import Outcome, Search
from optckpt.solvers.floor import static_floor
from optckpt.solvers.incumbent import Incumbent
from optckpt.solvers.potentials import STEP, potentials
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import SolveOptions, solve


def search(
    graph: TrainingGraph,
    budget: int,
    *,
    cutoff: float = float("inf"),
    states: int = 20_000,
    led: bool = False,
) -> Outcome:
    """The whole search, of at most `states` states, with or without potentials."""
    problem, room = preprocess(graph), budget - graph.resident
    values = potentials(problem, room, time_limit=20) if led else None
    whole = Search(problem, room, cutoff=cutoff, states=states, potentials=values)
    return whole.run(lambda: False)


def uneven_chain(n: int) -> TrainingGraph:
    """A chain of layers of 3 to 9 MiB."""
    return chain(n, [(3 + 5 * i % 7) << 20 for i in range(n)])


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0, 1),
    again=st.sampled_from([0.0, 0.5, 1.0]),
    distance=st.sampled_from([None, 0.0, 1e-7, 0.1]),
    led=st.booleans(),
)
def test_agrees_with_brute_force(
    seed: int, share: float, again: float, distance: float | None, led: bool
) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 8), repeatable_backward=again)
    low = static_floor(graph).bytes - 1
    high = simulate(graph, Schedule.base(graph)).peak
    budget = round(low + share**2 * (high - low))
    truth = cheapest(graph, budget)
    if truth is None:
        assert search(graph, budget, led=led) == Outcome(None, float("inf"), True)
        return
    optimum = truth[0] / graph.seconds
    cutoff = float("inf") if distance is None else optimum + distance
    found = search(graph, budget, cutoff=cutoff, led=led)
    assert found.finished
    if found.sequence is None:
        assert cutoff <= optimum + 1e-9
        assert found.bound == cutoff
        return
    assert found.bound == pytest.approx(optimum, abs=1e-9)
    schedule = Schedule(preprocess(graph).expand(found.sequence))
    result = simulate(graph, schedule)
    assert result.peak <= budget
    assert result.overhead == pytest.approx(optimum, abs=1e-9)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.5), again=st.floats(0, 1))
def test_potentials_do_not_change_the_answer(seed: int, share: float, again: float) -> None:
    graph = random_graph(seed, 10 + seed % 15, repeatable=1.0, repeatable_backward=again)
    budget = between(graph, share)
    blind = search(graph, budget, states=300_000)
    led = search(graph, budget, states=300_000, led=True)
    assert blind.finished
    assert led.finished
    assert led.bound == pytest.approx(blind.bound, abs=1e-8)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), noise=st.floats(0, 2))
def test_potentials_are_valid_whatever_the_dual_values(
    seed: int, share: float, noise: float
) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 8), repeatable_backward=0.5)
    budget = between(graph, share)
    truth = cheapest(graph, budget)
    problem, room = preprocess(graph), budget - graph.resident
    wrong = np.random.default_rng(seed)

    def disturbed(*args: Any, **limits: Any) -> MipResult:
        result = solve_mip(*args, **limits)
        if result.duals is None:
            return result
        duals = [d + noise * wrong.normal() * STEP for d in result.duals]
        return replace(result, duals=duals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "solve_mip", disturbed)
        values = potentials(problem, room, time_limit=20)
    found = Search(problem, room, states=20_000, potentials=values).run(lambda: False)
    assert found.finished
    optimum = float("inf") if truth is None else truth[0] / graph.seconds
    assert found.bound == pytest.approx(optimum, abs=1e-8)


def test_potentials_see_what_the_linear_program_sees() -> None:
    graph = uneven_chain(16)
    budget = between(graph, 0.3)
    values = potentials(preprocess(graph), budget - graph.resident, time_limit=20)
    assert values is not None
    least = values.constant[-1] + sum(values.wanted[-1, t] for t in graph.outputs)
    assert 0.05 < least <= search(graph, budget).bound


def test_no_potentials_for_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optckpt.solvers.potentials.MAX_COLUMNS", 100)
    graph = uneven_chain(16)
    assert potentials(preprocess(graph), between(graph, 0.3), time_limit=20) is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.5), part=st.integers(1, 60))
def test_a_search_that_is_cut_off_has_a_valid_bound(seed: int, share: float, part: int) -> None:
    graph = random_graph(seed, 16, repeatable=1.0, repeatable_backward=0.5)
    budget = between(graph, share)
    whole = search(graph, budget, states=200_000)
    assert whole.finished
    # So few states that memory for them runs out, or that the count of states ends it.
    for outcome in (
        search(graph, budget, states=part),
        Search(preprocess(graph), budget - graph.resident).run(lambda: False, part),
    ):
        assert outcome.bound <= whole.bound + 1e-9
        if outcome.finished:
            assert outcome.bound == pytest.approx(whole.bound)


def test_goes_on_where_it_stopped() -> None:
    graph = random_graph(7, 24, repeatable=1.0, repeatable_backward=0.5)
    budget = between(graph, 0.2)
    whole = search(graph, budget, states=500_000)
    parts = Search(preprocess(graph), budget - graph.resident)
    bounds = []
    while True:
        outcome = parts.run(lambda: False, 50)
        bounds.append(outcome.bound)
        if outcome.finished:
            break
    assert len(bounds) > 3
    assert bounds == sorted(bounds)
    assert outcome == whole


def test_stops_when_told() -> None:
    graph = uneven_chain(24)
    outcome = Search(preprocess(graph), 25 << 20).run(lambda: True)
    assert outcome == Outcome(None, 0.0, False)


def test_more_than_64_buffers() -> None:
    # Two words of bits; half of the budget's bytes are what brute force cannot look through.
    graph = uneven_chain(40)
    outcome = search(graph, between(graph, 0.02), states=300_000)
    assert outcome.sequence is not None
    schedule = Schedule(preprocess(graph).expand(outcome.sequence))
    assert simulate(graph, schedule).overhead == pytest.approx(outcome.bound)
    certificate = solve(graph, between(graph, 0.02), "rotor").certificate
    assert certificate.cost is not None
    assert outcome.bound <= certificate.cost + 1e-9


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_never_above_the_mip(seed: int, share: float) -> None:
    graph = random_graph(seed, 9, repeatable=1.0)
    budget = between(graph, share)
    certificate = solve(graph, budget, "milp", SolveOptions(gap=0.0)).certificate
    outcome = search(graph, budget, states=200_000)
    assert outcome.finished
    if certificate.status == "optimal":
        # Two sweeps between base operations are enough here.
        assert certificate.cost == pytest.approx(outcome.bound, abs=1e-6)


@pytest.mark.parametrize("megabytes", [25, 27, 30])
def test_optimal_closes_uneven_chains_near_the_floor(
    megabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No luck of the annealing: what the exact search returns is what counts.
    monkeypatch.setattr(Incumbent, "first_schedules", lambda self: None)
    graph = uneven_chain(24)
    budget = megabytes << 20
    certificate = solve(graph, budget, "optimal", SolveOptions(gap=0.0)).certificate
    assert certificate.status == "optimal"
    assert certificate.cost == pytest.approx(search(graph, budget, states=500_000).bound)


def test_optimal_proves_that_nothing_fits() -> None:
    graph = random_graph(1, 40, repeatable=1.0, repeatable_backward=0.3)
    budget = static_floor(graph).bytes
    assert solve(graph, budget).certificate.status == "infeasible"
