"""Exhaustive search: known answers, and random schedules never beat it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import OptckptError
from optckpt.frontends.synthetic import random_graph, with_random_limits
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import MAX_BUFFERS, cheapest


def three_step_chain() -> TrainingGraph:
    """a -> b -> c forward, then c', b', a' each reading its forward operation's input."""
    ops = (
        Operation("a", "F", 1.0, (), (0,)),
        Operation("b", "F", 2.0, (0,), (1,)),
        Operation("c", "F", 3.0, (1,), (2,)),
        Operation("c'", "B", 1.0, (2, 1), (3,), forward=False, repeatable=False),
        Operation("b'", "B", 1.0, (3, 0), (4,), forward=False, repeatable=False),
    )
    sizes = (4, 4, 1, 1, 1)
    return TrainingGraph(ops, tuple(Buffer(f"b{i}", s) for i, s in enumerate(sizes)), (4,))


def test_known_answer() -> None:
    graph = three_step_chain()
    assert simulate(graph, Schedule.base(graph)).peak == 10
    # Dropping `a` while c' runs saves 4 bytes and costs one second.
    assert cheapest(graph, 10) == (0.0, Schedule.base(graph))
    found = cheapest(graph, 9)
    assert found is not None
    assert found[0] == 1.0
    assert simulate(graph, found[1]).peak <= 9
    assert cheapest(graph, 7) is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_random_schedules_do_not_beat_it(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 7), repeatable_backward=0.5)
    graph = with_random_limits(graph, rng, rng.choice([0.0, 0.4]))
    for _ in range(20):
        sequence: list[int] = []
        for o in range(len(graph.operations)):
            again = [
                k
                for k, op in enumerate(graph.operations[:o])
                if op.repeatable and all(a >= o for a in op.repeat_before)
            ]
            sequence += rng.choices(again, k=rng.choice([0, 0, 1, 2])) if again else []
            sequence.append(o)
        result = simulate(graph, Schedule(tuple(sequence)))
        found = cheapest(graph, result.peak)
        assert found is not None
        assert found[0] <= result.extra_seconds
        best = simulate(graph, found[1])
        assert best.peak <= result.peak
        assert best.extra_seconds == found[0]


def test_refuses_many_buffers() -> None:
    n = MAX_BUFFERS + 1
    graph = TrainingGraph(
        tuple(Operation(f"op{i}", "X", 1.0, (), (i,)) for i in range(n)),
        tuple(Buffer(f"b{i}", 1) for i in range(n)),
    )
    with pytest.raises(OptckptError, match=f"at most {MAX_BUFFERS} buffers"):
        cheapest(graph, 10)
