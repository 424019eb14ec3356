from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends import synthetic
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.griewank import Chain, advances, balanced_slots, next_checkpoint
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.solvers.segments import articulation_points

SIZE = 1000


def chain_of(graph):
    return Chain(graph, tuple(articulation_points(graph)))


@cache
def fewest_advances(links, slots):
    """The recursion that the binomial formula solves."""
    if links <= 1:
        return 0
    if slots == 1:
        return links * (links - 1) // 2
    return min(
        m + fewest_advances(links - m, slots - 1) + fewest_advances(m, slots)
        for m in range(1, links)
    )


@pytest.mark.parametrize("slots", range(1, 8))
def test_binomial_formula(slots):
    for links in range(1, 40):
        assert advances(links, slots) == fewest_advances(links, slots)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(2, 60), st.integers(2, 8))
def test_next_checkpoint_is_a_best_one(links, slots):
    m = next_checkpoint(links, slots)
    assert 1 <= m < links
    total = m + fewest_advances(links - m, slots - 1) + fewest_advances(m, slots)
    assert total == fewest_advances(links, slots)


def test_balanced_slots():
    assert [balanced_slots(n) for n in (1, 2, 3, 6, 7, 20, 21, 70, 71)] == [
        1, 1, 2, 2, 3, 3, 4, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 17, 40])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_cost_on_a_chain_is_the_known_one(n, slots):
    # The gradient reads a layer's input, so that a link needs nothing but its input.
    graph = synthetic.chain(n, size=SIZE, seconds=1.0, weights=1)
    chain = chain_of(graph)
    links = n + 1  # The loss is the last link.
    assert len(chain) == links
    result = simulate(graph, chain.reversal(slots))
    # The first pass over all links but the last is the plain step's own.
    assert result.extra_seconds == advances(links, slots) - (links - 1)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_peak_on_a_chain_is_the_number_of_slots(slots):
    n = 60
    graph = synthetic.chain(n, size=SIZE, seconds=1.0, weights=1)
    result = simulate(graph, chain_of(graph).reversal(slots))
    # Saved states (the input is free), the state at hand and its successor or two gradients.
    layers = (slots - 1) + 3
    assert result.peak <= layers * SIZE + 2 * n


@pytest.mark.parametrize("graph", [synthetic.chain(30), synthetic.residual_chain(10)])
def test_more_slots_cost_less(graph):
    chain = chain_of(graph)
    costs = [simulate(graph, chain.reversal(s)).overhead for s in range(1, len(chain) + 1)]
    assert all(a >= b - 1e-12 for a, b in pairwise(costs))


def test_a_schedule_that_grows_too_long_is_given_up():
    chain = chain_of(synthetic.chain(60))
    assert chain.reversal(1, most=300) is None
    assert chain.reversal(8, most=300) is not None


def test_links_are_the_blocks_of_a_residual_chain():
    graph = synthetic.residual_chain(9, size=SIZE, seconds=1.0)
    result = simulate(graph, chain_of(graph).reversal(3))
    plain = simulate(graph, chain_of(graph).reversal(len(chain_of(graph))))
    assert result.peak < plain.peak
    assert max(result.counts) >= 3


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 5))
def test_random_graphs(seed, slots):
    graph = synthetic.random_graph(seed, 4 + seed % 20)
    points = articulation_points(graph)
    if points:
        simulate(graph, Chain(graph, tuple(points)).reversal(slots))


@pytest.mark.parametrize("slots", [2, 3, 5, 8, 17, 40])
def test_the_strategy_finds_the_slots_that_fit(slots: int) -> None:
    graph = synthetic.chain(60)
    chain = Chain(graph, tuple(articulation_points(graph)))
    schedule = chain.reversal(slots)
    assert schedule is not None
    wanted = simulate(graph, schedule)
    solution = solve(graph, wanted.peak, "griewank")
    assert solution.certificate.cost is not None
    assert solution.certificate.cost <= wanted.overhead


@pytest.mark.parametrize("uneven", [False, True])
def test_optimal_is_never_above_the_binomial_schedule(uneven: bool) -> None:
    n = 400
    sizes = [(1 + 7 * i % 5) << 18 for i in range(n)] if uneven else [1 << 20] * n
    graph = synthetic.chain(n, sizes)
    lowest = solve(graph, None, "griewank")
    for share in (None, 0.1):
        rule = lowest
        if share is not None:
            rule = solve(graph, int(share * simulate(graph, Schedule.base(graph)).peak), "griewank")
        assert rule.schedule is not None
        peak = simulate(graph, rule.schedule).peak
        best = solve(graph, peak, options=SolveOptions(time_limit=2)).certificate
        assert best.cost is not None
        assert rule.certificate.cost is not None
        assert best.cost <= rule.certificate.cost + 1e-9
