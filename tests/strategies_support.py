"""What every strategy without a proof of its own must keep to."""

from __future__ import annotations

import pytest

from optckpt.frontends.synthetic import random_graph
from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule
from optckpt.simulate import Simulation, simulate
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import static_floor
from optckpt.solvers.registry import SolveOptions, solve


def plain_peak(graph: TrainingGraph) -> int:
    """Peak bytes of the plain step."""
    return simulate(graph, Schedule.base(graph)).peak


def between(graph: TrainingGraph, share: float) -> int:
    """The budget at `share` of the way from the static floor to the plain peak."""
    low, high = static_floor(graph).bytes, plain_peak(graph)
    return round(low + share * (high - low))


def judged(
    graph: TrainingGraph, budget: int | None, name: str, time_limit: float = 30.0
) -> tuple[Certificate, Simulation]:
    """Run the strategy `name`, which answers with a schedule always, and check its claims."""
    solution = solve(graph, budget, name, SolveOptions(time_limit=time_limit))
    certificate = solution.certificate
    assert solution.schedule is not None
    result = simulate(graph, solution.schedule)
    assert certificate.solver == name
    assert certificate.cost == pytest.approx(result.overhead)
    assert certificate.bound <= result.overhead + 1e-9
    fits = budget is None or result.peak <= budget
    assert (certificate.status == "over-budget") != fits
    assert certificate.status in ("optimal", "feasible", "over-budget")
    assert (certificate.seconds_first is not None) == fits
    return certificate, result


def check_random_graph(name: str, seed: int, fraction: float, most: int = 30) -> None:
    """`judged` on a random graph at `fraction` of its plain peak; only forward is repeated."""
    graph = random_graph(seed, 1 + seed % most)
    _, result = judged(graph, max(1, int(fraction * plain_peak(graph))), name)
    for op, n in zip(graph.operations, result.counts, strict=True):
        assert n == 1 or (op.forward and op.repeatable)


def check_against_the_optimum(name: str, seed: int, fraction: float) -> None:
    """On 3 to 8 operations the strategy is no better than exhaustive search at its own peak."""
    graph = random_graph(seed, 3 + seed % 6)
    certificate, result = judged(graph, max(1, int(fraction * plain_peak(graph))), name)
    truth = cheapest(graph, result.peak)
    assert truth is not None
    assert result.extra_seconds >= truth[0] - 1e-9
    if certificate.status != "over-budget" and "at most" not in certificate.valid_for:
        assert certificate.bound * graph.seconds <= truth[0] + 1e-6 * graph.seconds
