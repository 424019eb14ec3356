"""The bound for chains: against exhaustive search in its own model, and over whole schedules."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import accumulate, combinations, count
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_support import between

from optckpt.frontends.synthetic import chain, random_graph, resnet
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.solvers import chain_bound as module
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.chain_bound import (
    Moment,
    chain_bound,
    chain_of,
    heaviest_path,
    least_cost,
    step_costs,
)
from optckpt.solvers.heuristics import griewank
from optckpt.solvers.loss_cut import loss_cut_bound
from optckpt.solvers.optimal import optimal
from optckpt.solvers.order_chain import order_chain_bound
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import SolveOptions

INFINITY = float("inf")


def exhaustive(size: Sequence[int], cost: Sequence[float], moments: Sequence[Moment]) -> float:
    """The least cost over all sets that may be held at the moments, one after the other."""
    total = [0.0, *accumulate(cost)]

    def sets(moment: Moment) -> list[frozenset[int]]:
        usable = range(moment.top + 1)
        return [
            frozenset(held)
            for k in range(moment.top + 2)
            for held in combinations(usable, k)
            if sum(size[x] for x in held) <= moment.room
            and (not moment.wanted or moment.top in held)
        ]

    def step(old: frozenset[int], new: frozenset[int]) -> float:
        below, price = -1, 0.0
        for above in [*sorted(old), len(size)]:
            fresh = [x for x in new if below < x < above]
            price += total[max(fresh) + 1] - total[below + 1] if fresh else 0.0
            below = above
        return price

    order = count()
    first = {held: 0.0 for held in sets(moments[0])}
    queue = [(0.0, next(order), 0, held) for held in first]
    best: dict[tuple[int, frozenset[int]], float] = {(0, h): 0.0 for h in first}
    options = [sets(moment) for moment in moments]
    while queue:
        price, _, k, held = heapq.heappop(queue)
        if price > best[k, held]:
            continue
        if k == len(moments) - 1:
            return price
        for new in options[k + 1]:
            after = price + step(held, new)
            if after < best.get((k + 1, new), INFINITY):
                best[k + 1, new] = after
                heapq.heappush(queue, (after, next(order), k + 1, new))
    return INFINITY


def random_moments(rng: random.Random, n: int, largest: int) -> list[Moment]:
    moments: list[Moment] = []
    for top in range(n - 1, -1, -1):
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            moments.append(Moment(top, rng.random() < 0.7, rng.randint(1, 3 * largest)))
    return moments or [Moment(n - 1, True, largest)]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(seed=st.integers(0, 10**9))
def test_no_way_through_a_chain_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 5)
    size = [rng.randint(1, 4) for _ in range(n)]
    if seed % 4:
        size.sort(reverse=True)
    cost = [float(rng.randint(0, 5)) for _ in range(n)]
    moments = random_moments(rng, n, size[0])
    found = chain_of(size, cost, moments, 10**6)
    if found is None:
        assert not any(m.wanted for m in moments)
        return
    bound = least_cost(found)
    assert bound is not None
    assert bound <= exhaustive(size, cost, moments) + 1e-9


@settings(derandomize=True, deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_where_all_is_wanted_once_the_program_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    size = sorted((rng.randint(1, 4) for _ in range(n)), reverse=True)
    cost = [float(rng.randint(0, 5)) for _ in range(n)]
    # The sweep to the last element is free: it is in memory, or can be, as the first one is wanted.
    rooms = [rng.randint(size[0], 3 * size[0]) for _ in range(n)]
    moments = [Moment(k, True, rooms[k]) for k in range(n - 1, -1, -1)]
    found = chain_of(size, cost, moments, 10**6)
    assert found is not None
    assert least_cost(found) == pytest.approx(exhaustive(size, cost, moments), rel=1e-4, abs=1e-3)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_rounded_and_thinned_chains_bound_still(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    size = [rng.randint(5, 40) for _ in range(n)]
    cost = [float(rng.randint(0, 5)) for _ in range(n)]
    moments = random_moments(rng, n, max(size))
    found = chain_of(size, cost, moments, 10**6)
    if found is None:
        return
    # Five elements have 36 values a level; so few levels are left, and then elements go.
    cells = rng.choice((600, 1500, 3000))
    with patch.object(module, "CELLS", cells), patch.object(module, "FINEST", 40):
        bound = least_cost(found)
    assert bound is not None
    assert bound <= exhaustive(size, cost, moments) + 1e-9


def small_graph(rng: random.Random) -> TrainingGraph:
    """A chain of few layers, or a random graph."""
    if rng.random() < 0.4:
        return random_graph(rng, rng.randint(3, 8), repeatable_backward=rng.choice((0.0, 0.5)))
    n = rng.randint(2, 5)
    sizes = [rng.randint(1, 5) for _ in range(n)]
    if rng.random() < 0.7:
        sizes.sort(reverse=True)
    return chain(n, sizes, [float(rng.randint(1, 5)) for _ in range(n)])


@settings(derandomize=True, deadline=None, max_examples=400)
@given(seed=st.integers(0, 10**9), share=st.floats(-0.1, 0.7))
def test_no_schedule_in_base_order_is_cheaper(seed: int, share: float) -> None:
    graph = small_graph(random.Random(seed))
    budget = max(1, between(graph, share))
    bound = chain_bound(preprocess(graph), budget - graph.resident)
    truth = cheapest(graph, budget)
    if bound is not None:
        best = INFINITY if truth is None else truth[0] / graph.seconds
        assert bound <= best + 1e-9


def with_companions(rng: random.Random) -> TrainingGraph:
    """A chain of which some layers also read what a companion makes of an earlier layer's output.

    Now and then the backward pass reads it too, or it is small: then it must not count.
    """
    n = rng.randint(2, 4)
    size = sorted((rng.randint(1, 4) for _ in range(n)), reverse=rng.random() < 0.8)
    operations: list[Operation] = []
    buffers: list[Buffer] = []

    def add(name: str, seconds: int, reads: Sequence[int], out: int, forward: bool = True) -> int:
        buffers.append(Buffer(name, out))
        operations.append(
            Operation(
                name, "Op", float(seconds), tuple(reads), (len(buffers) - 1,),
                forward=forward, repeatable=forward,
            )
        )  # fmt: skip
        return len(buffers) - 1

    layers: list[int] = []
    wanted: list[list[int]] = []
    for k in range(n):
        reads = layers[-1:]
        extra = []
        if k and rng.random() < 0.6:
            source = [layers[rng.randrange(k)]] if rng.random() < 0.8 else []
            extra = [add(f"c{k}", rng.randint(1, 4), source, rng.randint(1, 5))]
        layers.append(add(f"p{k}", rng.randint(0, 4), [*reads, *extra], size[k]))
        wanted.append([layers[-1], *(extra if rng.random() < 0.2 else [])])
    gradient: list[int] = []
    for k in range(n - 1, -1, -1):
        out = rng.randint(1, 2)
        gradient = [add(f"g{k}", rng.randint(0, 2), [*gradient, *wanted[k]], out, False)]
    return TrainingGraph(tuple(operations), tuple(buffers), (gradient[0],))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(seed=st.integers(0, 10**9), share=st.floats(-0.1, 0.7))
def test_companions_cost_no_more_than_they_do(seed: int, share: float) -> None:
    graph = with_companions(random.Random(seed))
    budget = max(1, between(graph, share))
    bound = chain_bound(preprocess(graph), budget)
    truth = cheapest(graph, budget)
    best = INFINITY if truth is None else truth[0] / graph.seconds
    assert bound is None or bound <= best + 1e-9


def test_projections_beside_a_path_are_companions() -> None:
    graph = resnet(3, 3)
    problem = preprocess(graph)
    path = heaviest_path(problem)
    costs = step_costs(problem, path)
    operations = [problem.producer[t] for t in path]
    beside = [
        o for o in range(problem.n)
        if graph.operations[problem.members[o][0]].kind == "Conv2D"
        and graph.operations[problem.members[o][0]].forward
        and o not in operations
    ]  # fmt: skip
    assert beside
    more = sum(costs) - sum(problem.cost[o] for o in operations)
    assert more == pytest.approx(sum(problem.cost[o] for o in beside))


def test_long_chains_of_many_sizes_are_bounded_still() -> None:
    rng = random.Random(5)
    graph = chain(250, [rng.randint(10**6, 2 * 10**6) for _ in range(250)])
    budget = between(graph, 0.03)
    bound = chain_bound(preprocess(graph), budget)
    solution = griewank(graph, budget, SolveOptions())
    assert solution.certificate.cost is not None
    assert bound is not None
    assert 0.1 < bound < solution.certificate.cost
    assert chain_bound(preprocess(graph), budget, lambda: False) is None


def test_certificates_of_chains_rest_on_it() -> None:
    graph = resnet(3, 6)
    budget = between(graph, 0.1)
    certificate = optimal(graph, budget, SolveOptions(time_limit=100.0, gap=0.02)).certificate
    bound = chain_bound(preprocess(graph), budget - graph.resident)
    in_any_order = order_chain_bound(graph, budget)
    assert bound is not None
    assert in_any_order is not None
    assert certificate.status == "optimal"
    assert certificate.cost is not None
    assert certificate.cost > loss_cut_bound(graph, budget) + 0.02
    assert in_any_order - 1e-6 <= certificate.bound <= certificate.cost <= bound + 0.02
