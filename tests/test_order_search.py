"""The compiled searches over orders: results can be executed and are worth what they say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import parents_of, random_order

from optckpt.frontends.synthetic import random_graph, random_layered
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.floor import any_order_floor
from optckpt.solvers.order_search import (
    MIX,
    OrderArrays,
    Weights,
    anneal_order,
    to_order_arrays,
)
from optckpt.solvers.order_sequence import Heat, anneal_sequence
from optckpt.solvers.preprocess import preprocess


def arrays_of(graph: TrainingGraph) -> OrderArrays:
    problem = preprocess(graph, merge=False)
    return to_order_arrays(problem, [sorted(above) for above in parents_of(graph)])


def value_of(graph: TrainingGraph, order: list[int], start: list[int], weights: Weights) -> float:
    """The value of an order of 1 byte's budget, from the simulator and the definition."""
    resident = graph.resident
    use = [
        b - resident
        for b in simulate(graph.in_order(order), Schedule.base(graph.in_order(order))).profile
    ]
    before = simulate(graph.in_order(start), Schedule.base(graph.in_order(start))).peak - resident
    static = []
    size = [b.size for b in graph.buffers]
    place = {o: k for k, o in enumerate(order)}
    for k, o in enumerate(order):
        op = graph.operations[o]
        last = {
            b: len(order) if b in graph.outputs else max((place[r] for r in readers), default=-1)
            for b, readers in enumerate(graph.readers)
        }
        fixed = {
            b
            for b, p in enumerate(graph.producer)
            if not graph.operations[p].repeatable and place[p] < k <= last[b]
        }
        need = sum(size[b] for b in fixed | set(op.reads) | set(op.writes)) + op.workspace
        gifts = [
            size[b]
            for b in op.inplace
            if size[b] == size[op.writes[0]] and (b not in fixed or last[b] == k)
        ]
        static.append(need - max(gifts, default=0))
    n = len(order)
    return (
        weights[0] * max(use)
        + weights[1] * max(static)
        + weights[2] * sum(s**4 for s in static) / n
        + weights[3] * sum((u / max(1, before)) ** 8 for u in use) / n
    )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), moves=st.sampled_from([1, 20, 500]))
def test_annealed_orders_are_valid_and_worth_what_they_say(seed: int, moves: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(1, 25), repeatable_backward=rng.choice([0.0, 0.7]))
    start = random_order(graph, seed)
    order, value = anneal_order(
        arrays_of(graph), start, 1, weights=MIX, moves=moves, hot=3.0, seed=seed
    )
    assert value == pytest.approx(value_of(graph, order, start, MIX), rel=1e-6)
    assert value <= value_of(graph, start, start, MIX) * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), shifts=st.sampled_from([0.0, 0.5, 1.0]))
def test_sequences_hold_under_simulation(seed: int, share: float, shifts: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 60), repeatable_backward=rng.choice([0.0, 0.7]))
    low = any_order_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = max(1 + graph.resident, round(low + share * (high - low)))
    start = random_order(graph, seed)
    found = anneal_sequence(
        arrays_of(graph),
        start,
        budget - graph.resident,
        Heat(0.01, 1e-4, lean=0.0, shifts=shifts),
        moves=1500,
        seed=seed,
    )
    simulate(graph, Schedule(tuple(found.last)))
    if shifts == 0.0:
        assert list(dict.fromkeys(found.last)) == start
    if found.best is not None:
        result = simulate(graph, Schedule(tuple(found.best)))
        assert result.peak <= budget
        assert result.overhead == pytest.approx(found.cost, abs=1e-12)


def test_searches_repeat() -> None:
    graph = random_layered(80, 2)
    arrays = arrays_of(graph)
    base = range(len(graph.operations))
    budget = int(0.75 * simulate(graph, Schedule.base(graph)).peak)
    orders = [anneal_order(arrays, base, budget, weights=MIX, moves=5000, seed=4) for _ in "ab"]
    assert orders[0] == orders[1]
    heat = Heat(1e-3, 1e-5, lean=0.0, shifts=0.8)
    sequences = [anneal_sequence(arrays, base, budget, heat, moves=5000, seed=4) for _ in "ab"]
    assert sequences[0] == sequences[1]
    assert sequences[0].best is not None
