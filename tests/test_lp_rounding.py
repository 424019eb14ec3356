"""Rounding of Checkmate's relaxation: what phase two makes of any rounding, and the strategy."""

from __future__ import annotations

import random
import time

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

from optckpt.errors import OptckptError
from optckpt.frontends import synthetic
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers import lp_rounding as module
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.lp_rounding import backward_stages, phase_two, roundings
from optckpt.solvers.milp import STEP, Checkmate, sweeps_by_operation
from optckpt.solvers.recompute import relevant_operations
from optckpt.solvers.registry import solve


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.floats(0.4, 1.1))
def test_random_graphs_are_answered(seed: int, fraction: float) -> None:
    check_random_graph("lp_rounding", seed, fraction, most=20)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.floats(0.4, 1.0))
def test_never_below_the_optimum(seed: int, fraction: float) -> None:
    check_against_the_optimum("lp_rounding", seed, fraction)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(0, 10**9), st.integers(1, 12), st.floats(0, 1))
def test_phase_two_makes_a_schedule_of_anything(seed: int, most: int, share: float) -> None:
    graph = synthetic.random_graph(seed, 2 + seed % 25)
    stages = backward_stages(graph, relevant_operations(graph), most)
    assert [i for s in stages for i in range(s.start, s.end)] == list(range(len(graph.operations)))
    rng = random.Random(seed)
    saved = [
        {t for t, p in enumerate(graph.producer) if p < end and rng.random() < share}
        for end in [s.start for s in stages] + [len(graph.operations)]
    ]
    executions = phase_two(graph, stages, saved)
    simulate(graph, Schedule(tuple(executions)))
    assert [o for k, o in enumerate(executions) if o not in executions[:k]] == list(
        range(len(graph.operations))
    )


def test_phase_two_of_everything_is_the_plain_step() -> None:
    graph = synthetic.unet(2)
    stages = backward_stages(graph, relevant_operations(graph), 6)
    everything = set(range(len(graph.buffers)))
    executions = phase_two(graph, stages, [everything] * (len(stages) + 1))
    assert executions == list(range(len(graph.operations)))


def test_stages_share_what_is_read() -> None:
    graph = synthetic.chain(60, size=1000)
    again = relevant_operations(graph)
    stages = backward_stages(graph, again, 6)
    assert 6 <= len(stages) - 2 <= 8
    assert stages[0].end == graph.first_backward
    assert not stages[0].again
    inner = [s.end - s.start for s in stages[1:-1]]
    assert max(inner) <= 20
    # A short backward pass gets a stage for each operation.
    short = synthetic.chain(3)
    assert [s.end - s.start for s in backward_stages(short, [0, 1, 2], 8)[1:-1]] == [1] * 4


def test_roundings_by_threshold_and_at_random() -> None:
    fractions = [{0: 0.4}, {0: 0.4, 1: 1.0, 2: 0.0}]
    found = list(roundings(fractions, seed=1))
    assert found[module.THRESHOLDS.index(0.5)] == [set(), {1}]
    assert found[module.THRESHOLDS.index(0.3)] == [{0}, {0, 1}]
    drawn = found[len(module.THRESHOLDS) :]
    assert len(drawn) == module.DRAWS
    assert all(1 in after and 2 not in after for _, after in drawn)
    assert all((0 in before) == (0 in after) for before, after in drawn)
    assert 0 < sum(0 in before for before, _ in drawn) < len(drawn)
    assert list(roundings(fractions, seed=1)) == found


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.1, 0.9))
def test_the_program_bounds_the_formulation_with_integers(seed: int, share: float) -> None:
    graph = synthetic.random_graph(seed, 8)
    budget = between(graph, share)
    model = Checkmate(graph, budget, sweeps_by_operation(8, 1)).model
    whole = solve_mip(model, time_limit=20)
    linear = solve_mip(model, time_limit=20, relax=True)
    if linear.values is None:
        assert whole.values is None
    elif whole.values is not None:
        assert linear.bound <= whole.bound + 1e-4 * STEP


@pytest.mark.parametrize(
    "graph", [synthetic.resnet(2, 2), synthetic.unet(2)], ids=["resnet", "unet"]
)
def test_cheaper_than_segments_where_the_budget_is_not_low(graph: TrainingGraph) -> None:
    budget = between(graph, 0.6)
    certificate, result = judged(graph, budget, "lp_rounding")
    theirs = solve(graph, budget, "chen_greedy").certificate
    assert certificate.status == "feasible"
    assert theirs.cost is not None
    assert result.overhead < 0.8 * theirs.cost


def test_below_every_program_a_low_peak() -> None:
    graph = synthetic.chain(12, size=1000)
    certificate, result = judged(graph, 1000, "lp_rounding")
    assert certificate.status == "over-budget"
    assert result.peak < 0.8 * plain_peak(graph)


def test_refuses_large_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZE", 4 * 30)
    graph = synthetic.chain(31, size=1000)
    with pytest.raises(OptckptError, match=r"at most 30 operations .* this one has 31"):
        judged(graph, between(graph, 0.5), "lp_rounding")


def test_the_time_limit_ends_it() -> None:
    graph = synthetic.resnet(3, 12)
    started = time.monotonic()
    judged(graph, between(graph, 0.3), "lp_rounding", time_limit=1.0)
    assert time.monotonic() - started < 1.0 + 10


def test_no_budget_is_the_plain_step() -> None:
    assert judged(synthetic.unet(2), None, "lp_rounding")[1].re_executions == 0


def test_a_linear_program_that_highs_gives_up_is_solved_otherwise() -> None:
    # Sizes of up to a gigabyte, on which HiGHS of OR-Tools 9.15 ends with an error.
    rng = random.Random(613013910)
    n = rng.randint(2, 8)
    again = rng.choice([0, 0, 0.5, 1.0])
    graph = synthetic.random_graph(
        rng,
        n,
        repeatable=rng.choice([0.8, 1.0]),
        repeatable_backward=again,
        plain=rng.random() < 0.2,
        max_size=rng.choice([8, 100, 10**9]),
    )
    assert solve(graph, 2_644_820_790, "lp_rounding").schedule is not None
