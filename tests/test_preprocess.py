"""Merging operations changes neither what fits nor what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends.synthetic import random_graph
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import static_floor
from optckpt.solvers.preprocess import Problem, memory_unit, preprocess
from optckpt.solvers.sequence import profile


def merged_graph(problem: Problem, graph: TrainingGraph) -> TrainingGraph:
    """The problem as a graph of its own."""
    written = sorted(b for writes in problem.writes for b in writes)
    number = {b: k for k, b in enumerate(written)}
    operations = tuple(
        Operation(
            f"unit{i}",
            "X",
            problem.cost[i] * graph.seconds,
            tuple(number[b] for b in problem.reads[i]),
            tuple(number[b] for b in problem.writes[i]),
            problem.workspace[i],
            tuple(number[b] for b in problem.takes[i]),
            repeatable=problem.repeatable[i],
        )
        for i in range(problem.n)
    )
    return TrainingGraph(
        operations,
        tuple(Buffer(f"b{b}", problem.size[b]) for b in written),
        tuple(number[b] for b in problem.reads[problem.n]),
        graph.resident,
    )


def with_inplace_chains(seed: int) -> TrainingGraph:
    """A random graph in which operations are often followed by an in-place one."""
    rng = random.Random(seed)
    graph = random_graph(rng, 5, repeatable_backward=rng.choice([0.0, 1.0]))
    operations: list[Operation] = []
    buffers: list[Buffer] = []
    moved: dict[int, int] = {}
    for i, op in enumerate(graph.operations):
        reads = tuple(dict.fromkeys(moved[b] for b in op.reads))
        writes = tuple(range(len(buffers), len(buffers) + len(op.writes)))
        buffers += [graph.buffers[b] for b in op.writes]
        moved |= dict(zip(op.writes, writes, strict=True))
        inplace = tuple(b for b in reads if b in {moved[c] for c in op.inplace})
        operations.append(
            Operation(
                f"op{i}", "X", op.seconds, reads, writes, op.workspace, inplace,
                op.forward, op.repeatable,
            )
        )  # fmt: skip
        if len(writes) == 1 and len(operations) < 8 and rng.random() < 0.6:
            new = len(buffers)
            buffers.append(Buffer(f"i{i}", buffers[writes[0]].size))
            operations.append(
                Operation(
                    f"in{i}", "Relu", float(rng.randint(0, 3)), writes, (new,),
                    rng.choice([0, 0, 2]), writes, op.forward, rng.random() < 0.8,
                )
            )  # fmt: skip
            moved[op.writes[0]] = new
    outputs = tuple(moved[b] for b in graph.outputs)
    return TrainingGraph(tuple(operations), tuple(buffers), outputs, graph.resident)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_merging_keeps_the_optimum(seed: int, share: float) -> None:
    graph = with_inplace_chains(seed)
    problem = preprocess(graph)
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = round(low + share * (high - low))
    before = cheapest(graph, budget)
    after = cheapest(merged_graph(problem, graph), budget)
    if before is None:
        assert after is None
        return
    assert after is not None
    assert before[0] == pytest.approx(after[0])
    expanded = simulate(graph, Schedule(problem.expand(after[1].executions)))
    assert expanded.peak <= budget
    assert expanded.extra_seconds == pytest.approx(after[0])


def test_something_is_merged() -> None:
    sizes = [
        (len(g.operations), preprocess(g).n) for g in (with_inplace_chains(s) for s in range(30))
    ]
    assert sum(n < m for m, n in sizes) > 5


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6))
def test_profile_agrees_with_the_referee(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 15), repeatable_backward=0.5)
    problem = preprocess(graph, merge=False)
    sequence: list[int] = []
    for o in range(problem.n):
        again = [k for k in range(o) if problem.repeatable[k]]
        sequence += rng.choices(again, k=rng.choice([0, 0, 1, 2])) if again else []
        sequence.append(o)
    truth = simulate(graph, Schedule(tuple(sequence)))
    assert [u + graph.resident for u in profile(problem, sequence)] == list(truth.profile)


def test_memory_unit_is_exact_or_bounded() -> None:
    graph = random_graph(1, 8, plain=True)
    problem = preprocess(graph)
    assert all(b % memory_unit(problem, 100) == 0 for b in problem.size)
    assert 10**12 // memory_unit(problem, 10**12) <= 10**6
