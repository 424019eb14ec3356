"""The relaxations: whatever the cuts, no bound above the optimum, no false infeasibility."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.decode import decode
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.floor import static_floor
from optckpt.solvers.loss_cut import find_loss, loss_cut_bound
from optckpt.solvers.preprocess import preprocess
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
    from dataclasses import replace

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
