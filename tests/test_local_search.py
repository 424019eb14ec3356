"""Annealing: what it returns can be executed, fits, costs what it says, and repeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import static_floor
from optckpt.solvers.local_search import anneal, to_arrays
from optckpt.solvers.preprocess import preprocess


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_results_hold_under_simulation(seed: int, share: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 30), repeatable_backward=rng.choice([0.0, 0.7]))
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = round(low + share * (high - low))
    problem = preprocess(graph)
    found = anneal(
        to_arrays(problem),
        range(problem.n),
        budget - graph.resident,
        iterations=1500,
        seed=seed,
    )
    simulate(graph, Schedule(problem.expand(found.last)))
    if found.best is not None:
        result = simulate(graph, Schedule(problem.expand(found.best)))
        assert result.peak <= budget
        assert result.overhead == pytest.approx(found.cost, abs=1e-12)


def test_improves_repeats_and_respects_what_is_known() -> None:
    graph = residual_chain(10)
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = (low + high) // 2 - graph.resident
    problem = preprocess(graph)
    arrays = to_arrays(problem)
    base = range(problem.n)
    short = anneal(arrays, base, budget, iterations=1000, seed=1)
    long = anneal(arrays, base, budget, iterations=50_000, seed=1)
    assert short.best is not None
    assert long.best is not None
    assert long.cost <= short.cost
    assert anneal(arrays, base, budget, iterations=50_000, seed=1) == long
    nothing = anneal(arrays, base, budget, iterations=1000, seed=1, known=0.0)
    assert nothing.best is None
    stopped = anneal(arrays, base, budget, iterations=10**9, seed=1, stop=lambda: True)
    assert stopped.last
