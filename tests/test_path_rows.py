"""Path rows: every schedule satisfies them, and they keep linear relaxations from splitting."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from test_stage_cuts import live_before, two_readings, varied

from optckpt.frontends.synthetic import random_graph, residual_chain
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.floor import static_floor
from optckpt.solvers.path_rows import PathRow, add_path_rows, violated_paths
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.stage_cuts import STEP, Relaxation, build
from optckpt.solvers.strengthening import Strengthening


def values_of(problem: Problem, relaxation: Relaxation, sequence: list[int]) -> list[float]:
    """The columns' values for a schedule, auxiliary columns left at 0."""
    live = live_before(problem, sequence)
    first = [sequence.index(o) for o in range(problem.n)] + [len(sequence)]
    again = [(k, o) for k, o in enumerate(sequence) if first[o] != k]
    values = [0.0] * len(relaxation.model.cost)
    ends = [*(first[c] for c in relaxation.cuts[1:]), len(sequence)]
    for i, (cut, end) in enumerate(zip(relaxation.cuts, ends, strict=True)):
        for t, column in relaxation.keep[i].items():
            values[column] = float(t in live[first[cut]])
        for o, column in relaxation.again[i].items():
            values[column] = float(any(q == o and first[cut] < k for k, q in again))
        for o, column in relaxation.comp[i].items():
            values[column] = float(any(q == o and first[cut] < k < end for k, q in again))
    return values


def with_repeats(rng: random.Random, problem: Problem) -> list[int]:
    """A schedule with some re-executions, maybe dead ones."""
    sequence = list(range(problem.n))
    again = [o for o in range(problem.n) if problem.repeatable[o]]
    for _ in range(rng.randint(1, 10)):
        o = rng.choice(again)
        sequence.insert(rng.randint(sequence.index(o) + 1, len(sequence)), o)
    return sequence


@settings(derandomize=True, deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**6))
def test_every_schedule_satisfies_every_path_row(seed: int) -> None:
    rng = random.Random(seed)
    graph = varied(two_readings(), rng) if seed % 3 == 0 else random_graph(rng, rng.randint(6, 14))
    problem = preprocess(graph, merge=False)
    if not any(problem.repeatable):
        return
    cuts = sorted(rng.sample(range(problem.n + 1), rng.randint(3, problem.n)))
    # A moment that no cut offers keeps operations from being joined, which is not tested here.
    relaxation = build(problem, cuts, 10**9, moments=[(-1, 0)])
    wild = [rng.choice([0.0, 0.0, rng.random(), 1.0]) for _ in relaxation.model.cost]
    rows = violated_paths(problem, relaxation, wild, 0.0)
    finer = build(problem, {*cuts, *rng.sample(range(problem.n), 3)}, 10**9, moments=[(-1, 0)])
    for _ in range(4):
        sequence = drop_dead(problem, with_repeats(rng, problem))
        for where in (relaxation, finer):
            values = values_of(problem, where, sequence)
            for row in rows:
                written = row.terms(where)
                # What asks may have no column in a part of the stage.
                assert written is not None or (where is finer and row.demand == "again")
                terms, low = written or ({}, 0.0)
                assert sum(values[c] * v for c, v in terms.items()) >= low


@settings(derandomize=True, deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6))
def test_what_is_found_is_violated_and_enough(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(8, 20))
    problem = preprocess(graph)
    relaxation = build(problem, rng.sample(range(problem.n), 5), 10**9)
    wild = [rng.random() for _ in relaxation.model.cost]
    rows = violated_paths(problem, relaxation, wild, 0.1)
    for row, index in add_path_rows(relaxation, rows):
        terms, low = row.terms(relaxation) or ({}, 0.0)
        assert sum(wild[c] * v for c, v in terms.items()) < low - 0.1 + 1e-9
        assert relaxation.model.row_lower[index] == low
    nothing = [1.0] * len(relaxation.model.cost)
    assert not violated_paths(problem, relaxation, nothing, 0.0)


def test_a_row_says_nothing_without_its_cuts() -> None:
    problem = preprocess(residual_chain(6))
    relaxation = build(problem, [5, 8, 10], 10**9)
    assert PathRow(5, 9, 1, (1,), "use").terms(relaxation) is None
    assert add_path_rows(relaxation, [PathRow(4, 10, 1, (1,), "use")]) == []


def test_a_linear_relaxation_with_many_cuts_rises() -> None:
    graph = random_graph(3, 40)
    problem = preprocess(graph)
    low = static_floor(graph).bytes
    budget = round(low + 0.3 * (simulate(graph, Schedule.base(graph)).peak - low))
    strengthening = Strengthening(problem, budget - graph.resident)
    values = []
    for _ in range(8):
        strengthened = strengthening.build(range(problem.n // 2, problem.n, 2))
        result = solve_mip(strengthened.relaxation.model, time_limit=20, relax=True)
        assert result.values is not None
        values.append(result.bound / STEP)
        if not strengthening.separate(strengthened, result.values):
            break
    # Loose rows go, violated ones come; the value must not suffer.
    assert values == sorted(values)
    assert values[-1] > values[0] + 1e-3
