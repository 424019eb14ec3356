"""The compiled searches over orders: results can be executed and are worth what they say."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import parents_of, random_order

from optckpt.frontends.synthetic import chain, random_graph, random_layered
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import order_sequence
from optckpt.solvers.compiling import interruptible
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.floor import any_order_floor
from optckpt.solvers.order_memory import lay, new_line, new_trial, weigh
from optckpt.solvers.order_search import (
    MIX,
    OrderArrays,
    Weights,
    anneal_order,
    to_order_arrays,
)
from optckpt.solvers.order_sequence import Annealed, Heat, anneal_sequence
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


def all_over_again(graph: TrainingGraph) -> list[int]:
    """The sequence that executes all the forward pass again before each step of the backward."""
    forward = [o for o, op in enumerate(graph.operations) if op.forward and op.repeatable]
    sequence: list[int] = []
    for o, op in enumerate(graph.operations):
        sequence += [o] if op.forward else [*forward, o]
    return drop_dead(preprocess(graph, merge=False), sequence)


def test_the_work_between_two_looks_at_the_clock_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = chain(60)
    arrays = arrays_of(graph)
    sequence = all_over_again(graph)
    assert max(sequence.count(o) for o in set(sequence)) > 50
    budget = (any_order_floor(graph).bytes + simulate(graph, Schedule.base(graph)).peak) // 2
    work: list[int] = []
    tried: list[int] = []
    ends: list[list[int]] = []

    def watched(function: Any, arrays: Any, line: Any, *rest: Any) -> Any:
        result = interruptible(function, arrays, line, *rest)
        work.append(int(line.work[0]))
        ends.append(result[2].tolist())
        tried.append(result[4])
        return result

    monkeypatch.setattr(order_sequence, "interruptible", watched)
    monkeypatch.setattr(order_sequence, "MOST", 20_000)

    def annealed(looks: int) -> Annealed:
        """Where annealing ends if it is stopped at so many looks at the clock."""
        for seen in (work, tried, ends):
            seen.clear()
        return anneal_sequence(
            arrays, sequence, budget - graph.resident, Heat(1e-2, 1e-4, lean=0.0, shifts=0.2),
            moves=500, seed=3, stop=lambda: len(work) >= looks,
        )  # fmt: skip

    found = annealed(500)
    assert sum(tried) == 500
    assert len(work) > 10
    # A move is finished before the clock is looked at.
    assert max(work) < 2 * order_sequence.MOST
    for last in ends:
        # Also where the clock is looked at before all that is dead has been taken out.
        assert drop_dead(preprocess(graph, merge=False), last) == last
        simulate(graph, Schedule(tuple(last)))
    assert annealed(500) == found
    annealed(2)
    assert len(work) == 2


def test_a_removal_takes_one_pass_over_the_executions_of_what_it_touches() -> None:
    work = []
    for n in (40, 80):
        graph = chain(n)
        arrays = arrays_of(graph)
        sequence = all_over_again(graph)
        capacity = len(sequence) + 1
        line, trial = new_line(capacity), new_trial(arrays, capacity)
        made, _, excess, _ = lay(np.array(sequence, np.int64), 1, arrays, line)
        # The execution in the middle of those of an early operation.
        often = [i for i in range(len(graph.operations), made) if line.operation[i] == 2]
        i = often[len(often) // 2]
        low = int(line.place[i])
        trial.place[i] = -1
        trial.moved[0] = i
        trial.stamp[i] = 1
        weigh(arrays, line, trial, low, low, -1, 1, 1, 1, 1.0, 0.0, 0.0, excess, np.inf)
        work.append(int(line.work[0]) / len(often))
    # Twice as many executions take twice as long, and not four times.
    assert work[1] < 1.3 * work[0]
