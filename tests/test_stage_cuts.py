"""The relaxations: whatever the cuts, no bound above the optimum, no false infeasibility."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.decode import decode, drop_dead
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.floor import static_floor
from optckpt.solvers.loss_cut import find_loss, loss_cut_bound
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.sequence import cost, profile
from optckpt.solvers.stage_cuts import STEP, build, read_choice


def draw(seed: int, share: float) -> tuple[random.Random, TrainingGraph, int]:
    rng = random.Random(seed)
    again = rng.choice([0.0, 0.5, 1.0])
    graph = random_graph(rng, rng.randint(3, 8), repeatable_backward=again)
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    return rng, graph, round(low + share * (high - low))


@settings(derandomize=True, deadline=None, max_examples=250)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.8), every=st.booleans())
def test_any_cuts_bound_from_below(seed: int, share: float, every: bool) -> None:
    rng, graph, budget = draw(seed, share)
    truth = cheapest(graph, budget)
    problem = preprocess(graph, merge=False)
    positions = range(problem.n + 1)
    cuts = positions if every else rng.sample(positions, rng.randint(1, len(positions)))
    moments = [(c, o) for c in cuts for o in range(c) if problem.repeatable[o]]
    relaxation = build(problem, cuts, budget - graph.resident, moments=moments)
    result = solve_mip(relaxation.model, time_limit=20)
    if truth is None:
        return
    assert result.status == "optimal"
    assert result.bound / STEP <= truth[0] / graph.seconds + 1e-9
    assert result.values is not None
    sequence = decode(problem, read_choice(relaxation, result.values))
    simulation = simulate(graph, Schedule(tuple(sequence)))
    assert simulation.overhead == pytest.approx(cost(problem, sequence), abs=1e-12)
    use = profile(problem, sequence)
    assert [u + graph.resident for u in use] == list(simulation.profile)


def two_readings() -> TrainingGraph:
    """Operation 3 alone reads buffer 2, and may be executed again for operation 5.

    Within 13 bytes, 1 is best executed again right behind 3, without buffer 2 in memory, which
    is computed again only then.
    """
    buffers = tuple(Buffer(n, s) for n, s in (("u", 4), ("y", 6), ("t", 2), ("v", 5), ("e", 1)))
    operations = (
        Operation("p", "op", 10.0, (), (0,)),
        Operation("o", "op", 1.0, (0,), (1,), workspace=3),
        Operation("t", "op", 1.0, (0,), (2,)),
        Operation("c", "op", 1.0, (2,), (3,), workspace=2),
        Operation("x", "op", 1.0, (1,), (), workspace=5, forward=False, repeatable=False),
        Operation("r", "op", 1.0, (3,), (4,), forward=False, repeatable=False),
    )
    return TrainingGraph(operations, buffers, (4,))


def varied(graph: TrainingGraph, rng: random.Random) -> TrainingGraph:
    """`graph` with some sizes, times, edges and properties changed, and operations put in."""
    buffers, operations = list(graph.buffers), list(graph.operations)
    end = buffers[graph.outputs[0]].name
    for b, buffer in enumerate(buffers):
        if rng.random() < 0.4:
            buffers[b] = replace(buffer, size=max(0, buffer.size + rng.choice([-2, -1, 1, 2])))
    for i, op in enumerate(operations):
        if rng.random() < 0.3:
            workspace = max(0, op.workspace + rng.choice([-2, -1, 1, 2]))
            op = replace(op, workspace=workspace)
        if rng.random() < 0.3:
            op = replace(op, seconds=float(rng.randint(0, 5)))
        if rng.random() < 0.15:
            op = replace(op, repeatable=not op.repeatable)
        others = [b for before in operations[:i] for b in before.writes if b not in op.reads]
        if others and rng.random() < 0.2:
            op = replace(op, reads=(*op.reads, rng.choice(others)))
        if op.reads and op.writes and rng.random() < 0.25:
            given = rng.choice(op.reads)
            op = replace(op, inplace=(given,))
            if rng.random() < 0.7:
                b = op.writes[0]
                buffers[b] = replace(buffers[b], size=buffers[given].size)
        operations[i] = op
    for _ in range(rng.randint(0, 2)):
        i = rng.randint(1, len(operations) - 1)
        have = [b for before in operations[:i] for b in before.writes]
        b = len(buffers)
        buffers.append(Buffer(f"n{b}", rng.randint(0, 6)))
        reads = tuple(rng.sample(have, min(len(have), rng.randint(1, 2))))
        again = rng.random() < 0.7
        workspace = rng.choice([0, 0, 2])
        seconds = float(rng.randint(0, 4))
        later = rng.randrange(i, len(operations))
        operations[later] = replace(operations[later], reads=(*operations[later].reads, b))
        operations.insert(
            i, Operation(f"n{b}", "op", seconds, reads, (b,), workspace, repeatable=again)
        )
    outputs = {next(b for b, buffer in enumerate(buffers) if buffer.name == end)}
    if rng.random() < 0.3:
        outputs.add(rng.randrange(len(buffers)))
    return TrainingGraph(tuple(operations), tuple(buffers), tuple(sorted(outputs)))


def least_costs(graph: TrainingGraph, most: int) -> list[tuple[int, float]]:
    """Up to `most` budgets below the plain peak, descending, and the least overhead there."""
    found: list[tuple[int, float]] = []
    budget = simulate(graph, Schedule.base(graph)).peak - 1
    while len(found) < most and (truth := cheapest(graph, budget)) is not None:
        result = simulate(graph, truth[1])
        found.append((result.peak, result.overhead))
        budget = result.peak - 1
    return found


def assert_bounds_hold(graph: TrainingGraph) -> None:
    """With a cut everywhere, with and without all moment rows, at the tightest budgets."""
    for budget, optimum in least_costs(graph, 3):
        for merge in (False, True):
            problem = preprocess(graph, merge=merge)
            every = [(c, o) for c in range(problem.n) for o in range(c) if problem.repeatable[o]]
            for moments in (every, []):
                relaxation = build(problem, range(problem.n), budget, moments=moments)
                result = solve_mip(relaxation.model, time_limit=20)
                assert result.status == "optimal"
                assert result.bound / STEP <= optimum + 1e-9


def test_moments_see_what_only_the_cut_still_reads() -> None:
    graph = two_readings()
    truth = cheapest(graph, 13)
    assert truth is not None
    assert truth[0] == 3.0
    problem = preprocess(graph, merge=False)
    for cuts in ([3, 4], range(6)):
        result = solve_mip(build(problem, cuts, 13, moments=[(3, 1)]).model, time_limit=20)
        # The moment row is what makes the bound reach the optimum.
        assert result.bound / STEP == pytest.approx(0.2, abs=1e-5)
        assert result.bound / STEP <= 0.2


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6))
def test_bounds_hold_where_the_cut_runs_again(seed: int) -> None:
    assert_bounds_hold(varied(two_readings(), random.Random(seed)))


def live_before(problem: Problem, sequence: list[int]) -> list[set[int]]:
    """Per execution, buffers whose copy made before it is read by it or later."""
    live = set(problem.reads[problem.n])
    found = [live]
    for o in reversed(sequence):
        live = (live - set(problem.writes[o])) | set(problem.reads[o])
        found.append(live)
    return found[::-1]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**6), every=st.booleans())
def test_every_schedule_satisfies_the_rows(seed: int, every: bool) -> None:
    rng = random.Random(seed)
    graph = varied(two_readings(), rng) if seed % 2 else random_graph(rng, 8)
    problem = preprocess(graph, merge=False)
    n = problem.n
    moments = [(c, o) for c in range(n) for o in range(c) if problem.repeatable[o]]
    if not moments:
        return
    sequence = list(range(n))
    for _ in range(rng.randint(1, 8)):
        o = rng.choice([o for o in range(n) if problem.repeatable[o]])
        sequence.insert(rng.randint(sequence.index(o) + 1, len(sequence)), o)
    sequence = drop_dead(problem, sequence)
    live = live_before(problem, sequence)
    first = [sequence.index(o) for o in range(n)] + [len(sequence)]
    again = [(k, o) for k, o in enumerate(sequence) if first[o] != k]
    cuts = range(n + 1) if every else sorted(rng.sample(range(n + 1), rng.randint(1, n)))
    relaxation = build(problem, cuts, max(profile(problem, sequence)), moments=moments)
    values: dict[int, float] = {}
    for i, cut in enumerate(relaxation.cuts):
        start, end = first[cut], first[cuts[i + 1]] if i + 1 < len(cuts) else len(sequence)
        assert relaxation.kept[i] <= live[start]
        for t, column in relaxation.keep[i].items():
            values[column] = t in live[start]
        for o, column in relaxation.comp[i].items():
            values[column] = any(q == o and start < k < end for k, q in again)
        for o, column in relaxation.again[i].items():
            values[column] = any(q == o and start < k for k, q in again)
        # No re-execution of what is before the cut is without a column.
        assert {o for k, o in again if k > start and o < cut} <= set(relaxation.again[i])
    model = relaxation.model
    for column, value in values.items():
        model.lower[column] = model.upper[column] = float(value)
    result = solve_mip(model, time_limit=20)
    assert result.status == "optimal"
    assert result.bound / STEP <= cost(problem, sequence) + 1e-6


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.8))
def test_a_cutoff_keeps_what_is_cheaper(seed: int, share: float) -> None:
    _, graph, budget = draw(seed, share)
    truth = cheapest(graph, budget)
    problem = preprocess(graph)
    if truth is None or not truth[0]:
        return
    optimum = truth[0] / graph.seconds
    cuts = range(problem.n)
    above = build(problem, cuts, budget - graph.resident, cutoff=optimum + 1e-4)
    assert solve_mip(above.model, time_limit=20).status == "optimal"
    nothing = build(problem, cuts, budget - graph.resident, cutoff=-1e-3)
    assert solve_mip(nothing.model, time_limit=20).status == "infeasible"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.8))
def test_loss_cut_bounds_from_below(seed: int, share: float) -> None:
    rng, graph, budget = draw(seed, share)
    bound = loss_cut_bound(graph, budget)
    truth = cheapest(graph, budget)
    if truth is not None:
        assert bound <= truth[0] / graph.seconds + 1e-9
    other, order = reordered(rng, graph)
    elsewhere = cheapest(other, budget)
    if elsewhere is not None:
        assert bound <= elsewhere[0] / graph.seconds + 1e-9
    assert len(order) == len(graph.operations)


def reordered(rng: random.Random, graph: TrainingGraph) -> tuple[TrainingGraph, list[int]]:
    """The same step with its operations in another valid order."""
    parents = [{graph.producer[b] for b in op.reads} | set(op.after) for op in graph.operations]
    order: list[int] = []
    while len(order) < len(parents):
        ready = [i for i in range(len(parents)) if i not in order and parents[i] <= set(order)]
        order.append(rng.choice(ready))
    place = {o: i for i, o in enumerate(order)}
    operations = tuple(
        replace(graph.operations[o], after=tuple(place[a] for a in graph.operations[o].after))
        for o in order
    )
    return TrainingGraph(operations, graph.buffers, graph.outputs, graph.resident), order


def test_loss_cut_finds_the_middle_of_a_chain() -> None:
    graph = residual_chain(10)
    cut = find_loss(graph)
    assert cut is not None
    forward = [i for i, op in enumerate(graph.operations) if op.forward]
    assert cut.operation >= forward[-1] - 3
    low = static_floor(graph).bytes
    high = simulate(graph, Schedule.base(graph)).peak
    bounds = [loss_cut_bound(graph, round(low + x * (high - low))) for x in (0.2, 0.5, 0.9, 1)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 0
    assert bounds[-1] == 0
