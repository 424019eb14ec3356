"""Minimum cut and knapsack against enumeration; the strategy on networks."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_support import (
    between,
    check_against_the_optimum,
    check_random_graph,
    judged,
    plain_peak,
)

from optckpt.frontends import synthetic
from optckpt.graph import TrainingGraph
from optckpt.simulate import simulate
from optckpt.solvers.knapsack import (
    CHEAP_SHARES,
    Knapsack,
    cheap_operations,
    saved_buffers,
)
from optckpt.solvers.recompute import (
    always_kept,
    last_backward_uses,
    missing_operations,
    relevant_operations,
    schedule_from_kept,
)
from optckpt.solvers.registry import solve


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.floats(0.3, 1.1))
def test_random_graphs_are_answered(seed: int, fraction: float) -> None:
    check_random_graph("knapsack", seed, fraction)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.floats(0.3, 1.0))
def test_never_below_the_optimum(seed: int, fraction: float) -> None:
    check_against_the_optimum("knapsack", seed, fraction)


def fewest_bytes(graph: TrainingGraph, again: set[int]) -> int:
    """By enumeration of what is executed again."""
    needed = {b for b, last in enumerate(last_backward_uses(graph)) if last >= 0}
    free = always_kept(graph)
    best = None
    for n in range(len(again) + 1):
        for chosen in combinations(sorted(again), n):
            wanted = needed | {b for o in chosen for b in graph.operations[o].reads}
            saved = {
                b
                for b in wanted - free
                if graph.producer[b] not in chosen and graph.operations[graph.producer[b]].forward
            }
            size = sum(graph.buffers[b].size for b in saved)
            best = size if best is None else min(best, size)
    assert best is not None
    return best


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 10**9), st.floats(0, 1))
def test_the_cut_saves_the_fewest_bytes(seed: int, share: float) -> None:
    graph = synthetic.random_graph(seed, 3 + seed % 14)
    relevant = relevant_operations(graph)
    again = set(relevant[: round(share * len(relevant))])
    saved = saved_buffers(graph, again)
    assert sum(graph.buffers[b].size for b in saved) == fewest_bytes(graph, again)
    # The operations that may be executed again suffice to serve the backward pass.
    at_hand = bytearray(len(graph.buffers))
    for b in saved | always_kept(graph):
        at_hand[b] = 1
    needed = [b for b, last in enumerate(last_backward_uses(graph)) if last >= 0]
    assert missing_operations(graph, needed, at_hand) <= again


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.floats(0, 1))
def test_the_knapsack_holds_the_most_time(seed: int, ratio: float) -> None:
    graph = synthetic.random_graph(seed, 3 + seed % 10)
    filled = Knapsack.fill(graph, relevant_operations(graph))
    room = 1000 if ratio >= 1 else int(ratio * 1000)
    weight = dict(zip(filled.items, filled.weights, strict=True))
    value = {i: graph.operations[i].seconds for i in filled.items}
    found = filled.chosen(ratio)
    assert ratio >= 1 or sum(weight[i] for i in found) <= room
    best = max(
        sum(value[i] for i in some)
        for n in range(len(weight) + 1)
        for some in combinations(filled.items, n)
        if sum(weight[i] for i in some) <= room
    )
    assert sum(value[i] for i in found) >= best


def test_everything_fits_into_the_whole() -> None:
    graph = synthetic.unet(3)
    filled = Knapsack.fill(graph, relevant_operations(graph))
    assert filled.chosen(1.0) == set(relevant_operations(graph))
    assert filled.chosen(0.0) == set()


def test_cheap_operations_are_the_light_ones() -> None:
    graph = synthetic.resnet(2, 4)
    cheap = cheap_operations(graph, 0.1)
    assert {graph.operations[i].kind for i in cheap} == {"FusedBatchNormV3", "Relu", "AddV2"}
    assert cheap_operations(graph, 0.0) == set()


def test_without_a_budget_cheap_operations_are_repeated() -> None:
    graph = synthetic.resnet(2, 4)
    _, result = judged(graph, None, "knapsack")
    again = {op.kind for op, n in zip(graph.operations, result.counts, strict=True) if n > 1}
    assert again
    assert "Conv2D" not in again
    assert result.extra_seconds <= CHEAP_SHARES[0] * graph.seconds
    assert result.peak < plain_peak(graph)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_cheaper_than_segments_where_the_budget_is_not_low(share: float) -> None:
    graph = synthetic.resnet(2, 6)
    budget = between(graph, share)
    certificate, result = judged(graph, budget, "knapsack")
    theirs = solve(graph, budget, "chen_greedy").certificate
    assert certificate.status == "feasible"
    assert theirs.cost is not None
    assert result.overhead < 0.7 * theirs.cost


def test_what_is_saved_does_not_bound_the_peak() -> None:
    """Why the ratio is swept: to save nothing is to compute everything again at once."""
    graph = synthetic.chain(40, size=1000)
    relevant = set(relevant_operations(graph))
    nothing = saved_buffers(graph, relevant)
    assert nothing == set()
    assert simulate(graph, schedule_from_kept(graph, nothing, "retained")).peak > 38_000
    _, result = judged(graph, between(graph, 0.3), "knapsack")
    assert result.peak < 0.8 * plain_peak(graph)


def test_the_time_limit_ends_it() -> None:
    graph = synthetic.resnet(3, 60)
    started = time.process_time()
    judged(graph, between(graph, 0.2), "knapsack", time_limit=0.3)
    assert time.process_time() - started < 0.3 + 2


def test_ample_memory_costs_nothing() -> None:
    graph = synthetic.unet(3)
    assert judged(graph, plain_peak(graph), "knapsack")[1].re_executions == 0
