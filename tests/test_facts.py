"""Facts from dual values: none contradicts a cheapest schedule."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_cuts import draw

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.engine import MipModel, solve_mip
from optckpt.solvers.facts import Facts, decide
from optckpt.solvers.floor import static_floor
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.stage_cuts import STEP, build
from optckpt.solvers.strengthening import Strengthening


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.8))
def test_cheapest_schedules_survive(seed: int, share: float) -> None:
    rng, graph, budget = draw(seed, share)
    truth = cheapest(graph, budget)
    if truth is None:
        return
    optimum = truth[0] / graph.seconds
    problem = preprocess(graph)
    strengthening = Strengthening(problem, budget - graph.resident)
    cuts: set[int] = set()
    for spare in (0.05, 0.01, 1e-4):
        cuts |= set(rng.sample(range(problem.n), min(problem.n, 2)))
        for _ in range(3):
            strengthened = strengthening.build(cuts)
            result = solve_mip(strengthened.relaxation.model, time_limit=20, relax=True)
            assert result.status == "optimal"
            assert result.values is not None
            duals = result.duals or [0.0] * len(strengthened.relaxation.model.row_lower)
            strengthening.facts.learn(strengthened.relaxation, duals, optimum + spare)
            strengthening.separate(strengthened, result.values)
        for every in (cuts, rng.sample(range(problem.n), rng.randint(1, problem.n))):
            moments = [(c, o) for c in every for o in range(c)] if rng.random() < 0.5 else []
            model = strengthening.build(every, moments, optimum + 1e-5).relaxation.model
            result = solve_mip(model, time_limit=20)
            assert result.status == "optimal"
            assert result.bound / STEP <= optimum + 1e-9


def test_below_the_optimum_nothing_is_left() -> None:
    graph = residual_chain(5)
    low = static_floor(graph).bytes
    budget = round(low + 0.3 * (simulate(graph, Schedule.base(graph)).peak - low))
    problem = preprocess(graph)
    strengthening = Strengthening(problem, budget - graph.resident)
    strengthened = strengthening.build(range(problem.n))
    result = solve_mip(strengthened.relaxation.model, time_limit=20, relax=True)
    assert result.duals is not None
    cheaper = 0.5 * result.bound / STEP
    strengthening.facts.learn(strengthened.relaxation, result.duals, cheaper)
    for cuts in (range(problem.n), range(0, problem.n, 3)):
        again = strengthening.build(cuts)
        assert again.cutoff == cheaper
        assert solve_mip(again.relaxation.model, time_limit=20).status == "infeasible"


def test_facts_make_relaxations_smaller() -> None:
    graph = random_graph(3, 40)
    problem = preprocess(graph)
    low = static_floor(graph).bytes
    budget = round(low + 0.5 * (simulate(graph, Schedule.base(graph)).peak - low))
    cuts = list(range(problem.n // 2, problem.n, 4))
    relaxation = build(problem, cuts, budget - graph.resident)
    result = solve_mip(relaxation.model, time_limit=20, relax=True)
    assert result.duals is not None
    facts = Facts(problem)
    decided = facts.learn(relaxation, result.duals, result.bound / STEP + 1e-3)
    assert decided > len(relaxation.model.cost) / 10
    more = build(problem, [*cuts, cuts[0] + 1], budget - graph.resident)
    columns = len(more.model.cost)
    assert facts.apply(more) < columns - decided / 2


@pytest.mark.parametrize("cutoff", [2.5, 4.0])
def test_reduced_costs_decide(cutoff: float) -> None:
    # min x + 3 y + 3 z: x + y >= 1, 0 <= z <= 1.
    model = MipModel()
    x, y, z = (model.add_column(cost) for cost in (1.0, 3.0, 3.0))
    model.add_row({x: 1.0, y: 1.0}, lower=1.0)
    decided = decide(model, [1.0], cutoff)
    # The bound is 1; y adds 2 to it, z adds 3.
    assert decided == ({y: False, z: False} if cutoff < 3 else {z: False} if cutoff < 4 else {})
    # Dual values of the wrong sign, or none, prove less.
    assert decide(model, [-7.0], cutoff) == ({y: False, z: False} if cutoff < 3 else {})
    assert decide(model, [0.0], 0.5) == {x: False, y: False, z: False}


def test_random_duals_decide_nothing_wrongly() -> None:
    rng = random.Random(1)
    for _ in range(200):
        model = MipModel()
        columns = [model.add_column(float(rng.randint(-3, 5))) for _ in range(5)]
        for _ in range(4):
            terms = {c: float(rng.randint(-3, 3)) for c in rng.sample(columns, 3)}
            if rng.random() < 0.5:
                model.add_row(terms, lower=float(rng.randint(-3, 2)))
            else:
                model.add_row(terms, upper=float(rng.randint(-1, 3)))
        duals = [rng.uniform(-2, 2) for _ in range(4)]
        cutoff = rng.uniform(-4, 6)
        decided = decide(model, duals, cutoff)
        for point in range(32):
            values = [float(point >> c & 1) for c in columns]
            activity = [0.0] * 4
            for r, c, v in zip(model.row, model.column, model.value, strict=True):
                activity[r] += v * values[c]
            fits = all(
                low <= a <= high
                for low, a, high in zip(model.row_lower, activity, model.row_upper, strict=True)
            )
            if fits and sum(k * v for k, v in zip(model.cost, values, strict=True)) <= cutoff:
                assert all(values[c] == float(one) for c, one in decided.items())
