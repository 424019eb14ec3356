"""Free order: orders that can be executed, bounds that hold for all of them, costs never above."""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import GraphError, OptckptError
from optckpt.frontends.synthetic import (
    chain,
    random_graph,
    random_layered,
    residual_chain,
    with_random_limits,
)
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import any_order_floor, static_floor
from optckpt.solvers.loss_cut import loss_cut_bound
from optckpt.solvers.registry import Progress, SolveOptions, solve


def parents_of(graph: TrainingGraph) -> list[set[int]]:
    return [{graph.producer[b] for b in op.reads} | set(op.after) for op in graph.operations]


def all_orders(graph: TrainingGraph) -> Iterator[list[int]]:
    """Every order that the dependencies of `graph` allow."""
    parents = parents_of(graph)

    def extend(order: list[int], done: set[int]) -> Iterator[list[int]]:
        if len(order) == len(parents):
            yield list(order)
        for o, above in enumerate(parents):
            if o not in done and above <= done:
                yield from extend([*order, o], done | {o})

    return extend([], set())


def random_order(graph: TrainingGraph, seed: int) -> list[int]:
    rng = random.Random(seed)
    parents = parents_of(graph)
    order: list[int] = []
    while len(order) < len(parents):
        done = set(order)
        ready = [o for o, above in enumerate(parents) if o not in done and above <= done]
        order.append(rng.choice(ready))
    return order


def budget_between(graph: TrainingGraph, share: float) -> int:
    """`share` of the way from just below the floor of any order to the plain peak."""
    low = any_order_floor(graph).bytes - 1
    high = simulate(graph, Schedule.base(graph)).peak
    return round(low + share * (high - low))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30))
def test_a_reordered_graph_is_the_same_step(seed: int, size: int) -> None:
    graph = random_graph(seed, size, repeatable_backward=0.5)
    graph = with_random_limits(graph, seed, 0.2)
    order = random_order(graph, seed)
    other = graph.in_order(order)
    base = Schedule.base(other)
    there, here = simulate(other, base), simulate(graph, base.out_of(order))
    assert there.profile == here.profile
    back = [0] * size
    for k, o in enumerate(order):
        back[o] = k
    assert other.in_order(back) == graph


def test_impossible_orders_are_refused() -> None:
    graph = chain(3)
    with pytest.raises(GraphError, match="no permutation"):
        graph.in_order([0, 0, *range(2, len(graph.operations))])
    with pytest.raises(GraphError, match="before any operation has written it"):
        graph.in_order(list(reversed(range(len(graph.operations)))))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), again=st.sampled_from([0.0, 0.5, 1.0]))
def test_between_the_bound_and_the_fixed_order(seed: int, share: float, again: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 6), repeatable_backward=again, plain=seed % 3 == 0)
    budget = budget_between(graph, share)
    found = [cheapest(graph.in_order(order), budget) for order in all_orders(graph)]
    costs = [f[0] / graph.seconds for f in found if f is not None]
    bound = loss_cut_bound(graph, budget)
    free = solve(graph, budget, options=SolveOptions(time_limit=1, order="free"))
    certificate = free.certificate
    assert certificate.valid_for == "any order"
    if not costs:
        assert free.schedule is None
        return
    assert budget >= any_order_floor(graph).bytes
    assert bound <= min(costs) + 1e-9
    assert certificate.bound <= min(costs) + 1e-9
    assert certificate.status in ("optimal", "feasible")
    assert certificate.cost is not None
    assert certificate.cost >= min(costs) - 1e-9
    if certificate.status == "optimal":
        assert certificate.cost <= min(costs) + 0.001 + 1e-9
    if budget >= static_floor(graph).bytes:
        fixed = cheapest(graph, budget)
        if fixed is not None:
            assert certificate.cost <= fixed[0] / graph.seconds + 0.001 + 1e-9


@pytest.mark.parametrize("graph", [residual_chain(4), chain(10), random_layered(30, 4)])
def test_what_the_base_order_allows_is_never_missed(graph: TrainingGraph) -> None:
    budget = budget_between(graph, 0.5)
    options = SolveOptions(time_limit=6, gap=0.01)
    fixed = solve(graph, budget, options=options)
    assert fixed.certificate.status == "optimal"
    free = solve(graph, budget, options=replace(options, order="free"))
    assert free.certificate.cost is not None
    assert fixed.certificate.cost is not None
    assert free.certificate.cost <= fixed.certificate.cost + 1e-12


def test_layered_graphs_are_reordered_instead_of_computed_twice() -> None:
    graph = random_layered(100, 3)
    budget = int(0.9 * simulate(graph, Schedule.base(graph)).peak)
    fixed = solve(graph, budget, options=SolveOptions(time_limit=5))
    free = solve(graph, budget, options=SolveOptions(time_limit=5, order="free"))
    assert fixed.certificate.cost is not None
    assert free.certificate.cost is not None
    assert free.certificate.cost <= fixed.certificate.cost / 2


def test_a_budget_that_no_order_meets_is_proven_so() -> None:
    graph = residual_chain(6)
    budget = any_order_floor(graph).bytes - 1
    solution = solve(graph, budget, options=SolveOptions(order="free"))
    assert solution.schedule is None
    assert solution.certificate.status == "infeasible"
    assert solution.certificate.valid_for == "any order"


def test_same_seed_same_schedule() -> None:
    graph = residual_chain(5)
    budget = budget_between(graph, 0.5)
    options = SolveOptions(seed=3, gap=0.05, time_limit=60, order="free")
    first, second = (solve(graph, budget, options=options) for _ in range(2))
    assert first.schedule == second.schedule
    assert first.certificate.bound == second.certificate.bound


def test_progress_is_monotone_and_its_bound_holds_for_any_order() -> None:
    graph = residual_chain(6)
    seen: list[Progress] = []
    options = SolveOptions(time_limit=5, order="free", progress=seen.append)
    solution = solve(graph, budget_between(graph, 0.4), options=options)
    incumbents = [p.incumbent for p in seen if p.incumbent is not None]
    assert incumbents == sorted(incumbents, reverse=True)
    assert incumbents[-1] == pytest.approx(solution.certificate.cost)
    assert [p.bound for p in seen] == sorted(p.bound for p in seen)
    assert max(p.bound for p in seen) <= solution.certificate.bound + 1e-9


def test_interrupt_returns_the_best_so_far() -> None:
    graph = random_layered(200, 1)
    fired = threading.Event()

    def interrupt(progress: Progress) -> None:
        if progress.incumbent is not None and not fired.is_set():
            fired.set()
            threading.Timer(0.2, _thread.interrupt_main).start()

    options = SolveOptions(time_limit=120, gap=0.0, order="free", progress=interrupt)
    solution = solve(graph, budget_between(graph, 0.7), options=options)
    assert solution.schedule is not None
    assert solution.certificate.status in ("feasible", "optimal")
    assert solution.certificate.seconds < 60


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(OptckptError, match="'fixed' or 'free'"):
        SolveOptions(order="random")  # type: ignore[arg-type]
