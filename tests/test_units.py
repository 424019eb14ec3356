"""Blocks executed again as one: found where they should be, and no bound suffers from them."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends.synthetic import random_graph
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.floor import static_floor
from optckpt.solvers.preprocess import memory_unit, preprocess
from optckpt.solvers.stage_cuts import STEP, build
from optckpt.solvers.units import joined


def stretched(rng: random.Random, graph: TrainingGraph, share: float) -> TrainingGraph:
    """`graph` with some operations split in two, the second writing no more than the first."""
    buffers = list(graph.buffers)
    operations: list[Operation] = []
    place: list[int] = []
    for op in graph.operations:
        op = replace(op, after=tuple(place[a] for a in op.after))
        if op.writes and rng.random() < share:
            b = len(buffers)
            buffers.append(
                Buffer(f"{op.name}/inner", buffers[op.writes[0]].size + rng.randrange(3))
            )
            first = replace(op, name=f"{op.name}/first", writes=(b,), inplace=())
            operations.append(first)
            op = replace(op, reads=(b,), inplace=(), after=())
            if len(op.writes) > 1:
                op = replace(op, writes=op.writes[:1])
                operations[-1] = replace(
                    first, writes=(b, *graph.operations[len(place)].writes[1:])
                )
        place.append(len(operations))
        operations.append(op)
    return TrainingGraph(tuple(operations), tuple(buffers), graph.outputs, graph.resident)


def layers(sizes: list[int]) -> TrainingGraph:
    """A chain of operations; the last one also reads the first buffer."""
    operations = [
        Operation(f"o{i}", "op", 1.0, (i - 1,) if i else (), (i,)) for i in range(len(sizes))
    ]
    operations[-1] = replace(operations[-1], reads=(0, len(sizes) - 2))
    return TrainingGraph(tuple(operations), tuple(Buffer(f"b{i}", s) for i, s in enumerate(sizes)))


def normalised_chain(n: int, size: int) -> TrainingGraph:
    """Layers of two operations; the first also writes 4 bytes for the backward pass."""
    operations: list[Operation] = []
    buffers: list[Buffer] = []

    def write(name: str, bytes_: int) -> int:
        buffers.append(Buffer(name, bytes_))
        return len(buffers) - 1

    above: tuple[int, ...] = ()
    saved = []
    for i in range(n):
        x, s = write(f"x{i}", size), write(f"s{i}", 4)
        operations.append(Operation(f"norm{i}", "op", 1.0, above, (x, s)))
        above = (write(f"a{i}", size),)
        operations.append(Operation(f"act{i}", "op", 1.0, (x,), above))
        saved.append((*above, s))
    gradient: tuple[int, ...] = ()
    for i, (a, s) in reversed(list(enumerate(saved))):
        g = write(f"ga{i}", size)
        operations.append(
            Operation(f"act{i}/g", "op", 1.0, (*gradient, a), (g,), 0, (), False, False)
        )
        gradient = (write(f"gx{i}", size),)
        operations.append(Operation(f"norm{i}/g", "op", 2.0, (g, s), gradient, 0, (), False, False))
    return TrainingGraph(tuple(operations), tuple(buffers), gradient)


def test_joins_what_shrinks() -> None:
    assert joined(preprocess(layers([4, 9, 7, 5, 6, 1]), merge=False)) == {1: 2, 2: 3, 4: 5}


def test_several_readers_or_outputs_keep_apart() -> None:
    graph = layers([4, 9, 7, 5, 1])
    read_twice = replace(graph.operations[4], reads=(0, 1, 3))
    problem = preprocess(
        replace(graph, operations=(*graph.operations[:4], read_twice)), merge=False
    )
    assert joined(problem) == {2: 3}
    fixed = replace(graph.operations[2], repeatable=False)
    operations = (*graph.operations[:2], fixed, *graph.operations[3:])
    assert joined(preprocess(replace(graph, operations=operations), merge=False)) == {}


def test_sizes_count_to_the_byte() -> None:
    # Rounded to units of two bytes, all of the large buffers are equal; but d is larger than b,
    # and so may not be kept instead of it where c writes over d.
    k = 300_000
    buffers = (Buffer("b", 2 * k), Buffer("d", 2 * k + 1), Buffer("out", 2 * k + 1), Buffer("e", 1))
    operations = (
        Operation("o", "op", 10.0, (), (0,)),
        Operation("q", "op", 1.0, (0,), (1,)),
        Operation("c", "op", 1.0, (1,), (2,), inplace=(1,), forward=False, repeatable=False),
        Operation("r", "op", 1.0, (1,), (3,), forward=False, repeatable=False),
    )
    graph = TrainingGraph(operations, buffers, (3,))
    problem = preprocess(graph)
    budget = 4 * k + 1
    assert memory_unit(problem, budget) == 2
    assert joined(problem) == {}
    truth = cheapest(graph, budget)
    assert truth is not None
    for cuts in ([2], range(4)):
        result = solve_mip(build(problem, cuts, budget).model, time_limit=20)
        assert result.status == "optimal"
        assert result.bound / STEP <= truth[0] / graph.seconds + 1e-9


def test_whoever_writes_a_few_bytes_more_stands_alone() -> None:
    graph = normalised_chain(3, 64 << 20)
    problem = preprocess(graph, merge=False)
    assert not any(len(problem.writes[o]) > 1 for o in joined(problem))
    plain = simulate(graph, Schedule.base(graph)).peak
    assert memory_unit(problem, plain) > 4
    for cut in range(problem.n + 1):
        build(problem, [cut], plain // 2)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.9), every=st.booleans())
def test_bounds_stay_below_the_optimum(seed: int, share: float, every: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 6), repeatable=1.0, repeatable_backward=1.0)
    graph = stretched(rng, graph, 0.6)
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    budget = round(low + share * (high - low))
    truth = cheapest(graph, budget)
    if truth is None:
        return
    problem = preprocess(graph, merge=False)
    positions = range(problem.n + 1)
    cuts = positions if every else rng.sample(positions, rng.randint(1, len(positions)))
    relaxation = build(problem, cuts, budget - graph.resident)
    result = solve_mip(relaxation.model, time_limit=20)
    assert result.status == "optimal"
    assert result.bound / STEP <= truth[0] / graph.seconds + 1e-9


def test_blocks_shrink_the_relaxation() -> None:
    graph = stretched(random.Random(1), random_graph(7, 40, repeatable=1.0), 0.6)
    problem = preprocess(graph, merge=False)
    assert joined(problem)
    budget = static_floor(graph).bytes
    cuts = range(5, problem.n, 9)
    small = build(problem, cuts, budget)
    # Moment rows see what blocks hide; asking for one brings all columns back.
    repeated = next(o for o in small.comp[0])
    large = build(problem, cuts, budget, moments=[(cuts[0], repeated)])
    assert len(small.model.cost) < len(large.model.cost)
