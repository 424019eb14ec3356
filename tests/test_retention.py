"""Retention intervals: against enumeration of their class of schedules, and their limits."""

from __future__ import annotations

import time
from functools import partial
from itertools import product

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
from optckpt.solvers import retention as module
from optckpt.solvers.heuristics import chen_greedy, sqrt_n
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.solvers.retention import from_re_executions, re_executions, retention

EXACT = SolveOptions(time_limit=20, gap=0.0)


@settings(derandomize=True, deadline=None, max_examples=8)
@given(st.integers(0, 10**9), st.floats(0.4, 0.9))
def test_random_graphs_are_answered(seed: int, fraction: float) -> None:
    check_random_graph("retention", seed, fraction, most=20)


@settings(derandomize=True, deadline=None, max_examples=8)
@given(st.integers(0, 10**9), st.floats(0.5, 0.9))
def test_never_below_the_optimum(seed: int, fraction: float) -> None:
    check_against_the_optimum("retention", seed, fraction)


def cheapest_of_class(graph: TrainingGraph, budget: int) -> float | None:
    """Least extra time with at most two executions and one sweep per stage, by enumeration."""
    n = len(graph.operations)
    choices = [
        [None, *range(o + 1, n + 1)] if op.repeatable else [None]
        for o, op in enumerate(graph.operations)
    ]
    best: float | None = None
    for stages in product(*choices):
        extra = sum(graph.operations[o].seconds for o, j in enumerate(stages) if j is not None)
        if best is not None and extra >= best:
            continue
        events = [(o, o) for o in range(n)] + [(j, o) for o, j in enumerate(stages) if j]
        if simulate(graph, Schedule(tuple(o for _, o in sorted(events)))).peak <= budget:
            best = extra
    return best


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.floats(0.05, 0.9))
def test_agrees_with_enumeration_of_its_class(seed: int, share: float) -> None:
    graph = synthetic.random_graph(seed, 3 + seed % 3, repeatable=1.0, repeatable_backward=0.5)
    budget = between(graph, share)
    truth = cheapest_of_class(graph, budget)
    solution = solve(graph, budget, retention, EXACT)
    certificate = solution.certificate
    if truth is None:
        assert certificate.status == "over-budget"
        return
    assert certificate.bound * graph.seconds <= truth + 1e-6
    if certificate.status == "optimal":
        assert certificate.cost is not None
        assert certificate.cost * graph.seconds == pytest.approx(truth, abs=1e-5)


def test_two_executions_do_not_always_suffice() -> None:
    graph = synthetic.chain(7, size=1000, seconds=1.0)
    budget = between(graph, 0.2)
    two = solve(graph, budget, retention, EXACT).certificate
    three = solve(graph, budget, partial(retention, executions=3), EXACT).certificate
    truth = solve(graph, budget, "optimal", EXACT).certificate
    assert two.status == "over-budget"
    assert three.status == truth.status == "optimal"
    assert three.cost == pytest.approx(truth.cost)


def test_one_execution_is_the_plain_step() -> None:
    graph = synthetic.chain(5, size=1000)
    once = partial(retention, executions=1)
    solution = solve(graph, between(graph, 0.5), once, EXACT)
    assert solution.certificate.status == "over-budget"
    assert solution.schedule == Schedule.base(graph)
    with pytest.raises(OptckptError, match="executions must be at least 1, got 0"):
        retention(graph, 1, EXACT, executions=0)


@pytest.mark.parametrize("heuristic", [sqrt_n, chen_greedy])
@pytest.mark.parametrize("graph", [synthetic.resnet(2, 3), synthetic.unet(3)])
def test_heuristics_are_in_its_class(heuristic, graph) -> None:  # type: ignore[no-untyped-def]
    problem = preprocess(graph, merge=False)
    schedule = heuristic(graph, None, SolveOptions()).schedule
    copies = re_executions(problem, schedule)
    assert copies
    again = simulate(graph, from_re_executions(problem, copies))
    before = simulate(graph, schedule)
    assert again.overhead == pytest.approx(before.overhead)
    assert again.peak <= before.peak


def test_improves_on_the_heuristics() -> None:
    graph = synthetic.residual_chain(3)
    budget = between(graph, 0.35)
    certificate, _ = judged(graph, budget, "retention", time_limit=6)
    heuristics = [
        solve(graph, budget, name).certificate for name in ("chen_greedy", "sqrt_n", "knapsack")
    ]
    fitting = [c.cost for c in heuristics if c.status == "feasible" and c.cost is not None]
    assert certificate.status in ("feasible", "optimal")
    assert certificate.cost is not None
    assert not fitting or certificate.cost < 0.9 * min(fitting)
    assert certificate.valid_for == "any order" or "at most 2 executions" in certificate.valid_for


def test_what_it_need_not_prove_is_no_bound() -> None:
    # Within the gap of nothing at all: what CP-SAT has proven is about its class of schedules only.
    graph = synthetic.residual_chain(3)
    budget = between(graph, 0.5)
    cost = solve(graph, budget, "retention", SolveOptions(time_limit=6)).certificate.cost
    assert cost
    options = SolveOptions(time_limit=6, gap=1.01 * cost)
    certificate = solve(graph, budget, "retention", options).certificate
    assert certificate.status == "optimal"
    assert certificate.bound == 0.0
    assert certificate.valid_for.startswith("any order")


def test_below_what_it_reaches_a_low_peak() -> None:
    graph = synthetic.chain(12, size=1000)
    certificate, result = judged(graph, 1000, "retention", time_limit=3)
    assert certificate.status == "over-budget"
    assert certificate.bound == 0.0
    assert result.peak < 0.8 * plain_peak(graph)


def test_the_time_limit_ends_it() -> None:
    graph = synthetic.resnet(3, 12)
    started = time.monotonic()
    judged(graph, between(graph, 0.3), "retention", time_limit=2.0)
    assert time.monotonic() - started < 2.0 + 10


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Silent(module._Search):
        def __init__(self, request: dict[str, object]) -> None:
            super().__init__({**request, "until": time.time() + 100})
            started.append(self.process)

    monkeypatch.setattr(module, "_Search", Silent)
    graph = synthetic.resnet(3, 8)
    before = time.monotonic()
    judged(graph, between(graph, 0.3), "retention", time_limit=1.0)
    assert time.monotonic() - before < 1.0 + 10
    assert started
    assert started[0].poll() is not None


def test_failures_of_the_process_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = synthetic.chain(6, size=1000)
    monkeypatch.setattr(module, "COST_UNITS", 10**30)
    with pytest.raises(OptckptError, match="OR-Tools failed: "):
        solve(graph, between(graph, 0.5), "retention")


def test_no_budget_is_the_plain_step() -> None:
    certificate, result = judged(synthetic.unet(2), None, "retention")
    assert certificate.status == "optimal"
    assert result.re_executions == 0
