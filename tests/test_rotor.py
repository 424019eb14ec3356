"""Optimal checkpoints of chains: against exhaustive search, the binomial schedule and `optimal`."""

from __future__ import annotations

import random
import time
from dataclasses import replace

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
from optckpt.solvers import rotor as module
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.solvers.segments import articulation_points

SIZE = 1000


def has_chain(graph: TrainingGraph) -> bool:
    return any(p.operation < graph.first_backward - 1 for p in articulation_points(graph))


def tiny_chain(seed: int, *, falling: bool) -> TrainingGraph:
    """Two to five layers; sizes are no smaller than the loss, which need not stay in memory."""
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    sizes = [4 * rng.randint(1, 6) for _ in range(n)]
    graph = synthetic.chain(
        n,
        size=sorted(sizes, reverse=True) if falling else sizes,
        seconds=[rng.randint(1, 4) for _ in range(n)],
        weights=0 if n == 5 else rng.choice([0, 4]),
    )
    return replace(graph, outputs=graph.outputs[1:])


def budgets(graph: TrainingGraph) -> range:
    return range(static_floor(graph).bytes - 4, plain_peak(graph) + 4, 4)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 10**9), st.floats(0.3, 1.1))
def test_random_graphs_are_answered(seed: int, fraction: float) -> None:
    graph = synthetic.random_graph(seed, 1 + seed % 30)
    if has_chain(graph):
        check_random_graph("rotor", seed, fraction)
    else:
        with pytest.raises(OptckptError, match=r"'rotor' needs a chain.*'optimal'"):
            judged(graph, 1, "rotor")


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(0, 10**9), st.floats(0.3, 1.0))
def test_never_below_the_optimum(seed: int, fraction: float) -> None:
    if has_chain(synthetic.random_graph(seed, 3 + seed % 6)):
        check_against_the_optimum("rotor", seed, fraction)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
def test_exact_on_chains_of_falling_sizes(seed: int) -> None:
    graph = tiny_chain(seed, falling=True)
    for budget in budgets(graph):
        truth = cheapest(graph, budget)
        certificate, result = judged(graph, budget, "rotor")
        assert (certificate.status == "feasible") == (truth is not None)
        if truth is not None:
            assert result.extra_seconds == truth[0]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(0, 10**9))
def test_at_least_the_optimum_on_any_chain(seed: int) -> None:
    graph = tiny_chain(seed, falling=False)
    for budget in budgets(graph):
        certificate, result = judged(graph, budget, "rotor")
        if certificate.status == "feasible":
            truth = cheapest(graph, budget)
            assert truth is not None
            assert result.extra_seconds >= truth[0]


@pytest.mark.parametrize("weights", [0, SIZE // 10])
def test_optimal_is_never_above_it_on_chains(weights: int) -> None:
    graph = synthetic.chain(
        14, size=[SIZE * (3 + 5 * i % 7) for i in range(14)], seconds=1.0, weights=weights
    )
    for share in (0.2, 0.4, 0.7):
        budget = between(graph, share)
        certificate, result = judged(graph, budget, "rotor")
        ours = solve(graph, budget, "optimal", SolveOptions(time_limit=8, gap=0.0)).certificate
        if certificate.status == "feasible":
            assert ours.cost is not None
            assert ours.bound <= result.overhead + 1e-9
            assert ours.status != "optimal" or ours.cost <= result.overhead + 3e-6


@pytest.mark.parametrize("share", [0.06, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("n", [40, 110])
def test_never_above_the_binomial_schedule(n: int, share: float) -> None:
    graph = synthetic.chain(n, size=SIZE, seconds=1.0)
    budget = max(7 * SIZE, int(share * plain_peak(graph)))
    theirs = solve(graph, budget, "griewank").certificate
    certificate, result = judged(graph, budget, "rotor")
    assert certificate.status == theirs.status == "feasible"
    assert theirs.cost is not None
    assert result.overhead <= theirs.cost + 1e-9


def test_unequal_layers_are_worth_more_than_equal_segments() -> None:
    graph = synthetic.chain(60, size=[18 * SIZE] * 6 + [SIZE] * 54, seconds=[1.0] * 6 + [9.0] * 54)
    budget = int(0.5 * plain_peak(graph))
    _, result = judged(graph, budget, "rotor")
    others = [solve(graph, budget, name).certificate for name in ("chen_greedy", "griewank")]
    assert all(c.cost is not None and result.overhead < 0.5 * c.cost for c in others)


def test_memory_in_levels_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.residual_chain(12, size=SIZE + 17)
    high = plain_peak(graph)
    exact = [judged(graph, int(f * high), "rotor")[1].overhead for f in (0.3, 0.5, 0.8)]
    assert exact == sorted(exact, reverse=True)
    monkeypatch.setattr(module, "LEVELS", 60)
    for fraction, least in zip((0.3, 0.5, 0.8), exact, strict=True):
        certificate, result = judged(graph, int(fraction * high), "rotor")
        assert certificate.status == "feasible"
        assert least <= result.overhead <= 1.5 * least + 0.05


def test_random_masks_are_in_memory_until_they_are_read_again() -> None:
    """An operation that must not be repeated feeds one that is repeated."""
    graph = synthetic.residual_chain(10, size=SIZE)
    graph = replace(
        graph,
        operations=tuple(
            replace(op, repeatable=op.repeatable and op.kind != "Relu") for op in graph.operations
        ),
    )
    for share in (0.3, 0.5, 0.8):
        certificate, result = judged(graph, between(graph, share), "rotor")
        assert certificate.status == "feasible"
        assert result.re_executions > 0


def test_below_what_it_reaches_the_lowest_peak() -> None:
    graph = synthetic.chain(50, size=SIZE)
    certificate, result = judged(graph, SIZE, "rotor")
    assert certificate.status == "over-budget"
    assert result.peak < 8 * SIZE


def test_long_chains_are_coarsened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STAGES", 60)
    graph = synthetic.chain(700, size=SIZE, seconds=1.0)
    certificate, result = judged(graph, int(0.1 * plain_peak(graph)), "rotor")
    assert certificate.status == "feasible"
    assert result.extra_seconds <= 700


def test_the_time_limit_ends_it() -> None:
    graph = synthetic.chain(900, size=[SIZE + i for i in range(900)])
    judged(synthetic.chain(4), SIZE, "rotor")  # compiles
    started = time.process_time()
    certificate, result = judged(graph, int(0.1 * plain_peak(graph)), "rotor", time_limit=0.5)
    assert time.process_time() - started < 0.5 + 2
    assert certificate.status == (
        "feasible" if result.peak <= 0.1 * plain_peak(graph) else "over-budget"
    )


def test_no_budget_is_the_plain_step() -> None:
    assert judged(synthetic.chain(9), None, "rotor")[1].re_executions == 0
