"""Schedules from the bound for chains."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_support import between

from optckpt.frontends.synthetic import chain, random_graph, resnet
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.chain_bound import chain_bound
from optckpt.solvers.chain_schedule import chained
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.sequence import cost, profile


def test_on_equal_layers_the_bound_is_reached() -> None:
    graph = chain(40, 1000, 1.0)
    problem = preprocess(graph)
    for share in (0.15, 0.3, 0.6):
        # A layer that is computed again needs one layer's memory more than the bound knows.
        budget = between(graph, share)
        found = chained(problem, budget)
        assert found is not None
        assert found.sequence is not None
        assert found.bound == chain_bound(problem, budget)
        assert cost(problem, found.sequence) == pytest.approx(found.bound, abs=1e-4)
        assert max(profile(problem, found.sequence)) <= budget + 1000


def test_residual_networks_cost_nearly_the_bound() -> None:
    graph = resnet(3, 8)
    problem = preprocess(graph)
    found = chained(problem, between(graph, 0.2))
    assert found is not None
    assert found.sequence is not None
    assert found.bound <= cost(problem, found.sequence) + 1e-9
    assert cost(problem, found.sequence) <= 1.1 * found.bound


def test_no_schedule_where_nothing_fits_and_none_without_a_chain() -> None:
    problem = preprocess(chain(10, 1000, 1.0))
    found = chained(problem, 999)
    assert found is not None
    assert found.sequence is None
    assert found.bound == float("inf")
    assert chained(preprocess(random_graph(0, 1)), 1) is None
    assert chained(problem, 9000, lambda: False) is None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9), share=st.floats(0.0, 1.0))
def test_whatever_comes_out_can_be_executed(seed: int, share: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 30), repeatable_backward=rng.choice((0.0, 0.5)))
    problem = preprocess(graph)
    found = chained(problem, max(1, between(graph, share)) - graph.resident)
    if found is None or found.sequence is None:
        return
    result = simulate(graph, Schedule(problem.expand(found.sequence)))
    assert result.overhead == pytest.approx(cost(problem, found.sequence))
    assert result.peak == max(profile(problem, found.sequence)) + graph.resident
    # First executions keep the base order.
    assert list(dict.fromkeys(found.sequence)) == list(range(problem.n))
