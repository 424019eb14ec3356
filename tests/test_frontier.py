"""The memory-time curve: monotone, within proven bounds, right where brute force knows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import BudgetError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers import frontier as module
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import any_order_floor, static_floor
from optckpt.solvers.frontier import floor, frontier, least_memory
from optckpt.solvers.registry import Interrupted, SolveOptions, solve

OPTIONS = SolveOptions(time_limit=20, threads=1)


def lowest_by_brute_force(graph: TrainingGraph) -> int:
    low, high = 0, simulate(graph, Schedule.base(graph)).peak
    while low < high:
        middle = (low + high) // 2
        if cheapest(graph, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


@settings(derandomize=True, deadline=None, max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_floor_brackets_the_smallest_peak(seed: int) -> None:
    graph = synthetic.random_layered(4, seed=seed)
    found = floor(graph, OPTIONS)
    lowest = lowest_by_brute_force(graph)
    assert found.bound <= lowest <= found.peak
    assert simulate(graph, found.schedule).peak == found.peak
    # The search ends at 0.2 % of the bytes above the resident ones.
    plain = simulate(graph, Schedule.base(graph)).peak
    assert found.peak - found.bound <= max(1, (plain - graph.resident) // 200)


def test_floor_of_a_chain_is_below_every_heuristics_peak() -> None:
    graph = synthetic.chain(40)
    found = floor(graph, OPTIONS)
    assert static_floor(graph).bytes <= found.bound <= found.peak
    assert found.peak < 0.3 * simulate(graph, Schedule.base(graph)).peak
    assert simulate(graph, found.schedule).peak == found.peak


def test_a_floor_just_above_the_static_one_is_found_in_few_solves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Sizes without a common divisor: a step of one byte is never the last.
    rng = random.Random(0)
    reads = [rng.sample(range(max(0, i - 6), i), min(i, 2)) for i in range(20)]
    graph = TrainingGraph(
        tuple(Operation(f"o{i}", "X", rng.random(), tuple(r), (i,)) for i, r in enumerate(reads)),
        tuple(Buffer(f"b{i}", rng.randint(1 << 20, 1 << 30)) for i in range(20)),
    )
    targets: list[int] = []

    def counted(graph: TrainingGraph, budget: int, *rest: Any) -> Solution:
        targets.append(budget)
        return solve(graph, budget, *rest)

    monkeypatch.setattr(module, "solve", counted)
    found = floor(graph, SolveOptions(time_limit=20))
    assert found.peak - found.bound <= found.peak // 100
    assert len(targets) < 30


@pytest.mark.parametrize(
    "graph", [synthetic.residual_chain(8), synthetic.unet(3)], ids=["residual", "unet"]
)
def test_frontier_is_monotone_and_proven(graph: TrainingGraph) -> None:
    seen = []
    curve = frontier(graph, 6, OPTIONS, progress=seen.append)
    assert len(seen) >= 2
    assert curve.floor is not None
    assert curve.points[0].budget == curve.floor.peak
    last = curve.points[-1]
    assert last.overhead == 0.0
    assert last.peak <= simulate(graph, Schedule.base(graph)).peak
    for p in curve.points:
        result = simulate(graph, p.schedule)
        assert (result.peak, result.overhead) == (p.peak, p.overhead)
        assert p.peak <= p.budget
        assert p.bound <= p.overhead
    for lower, higher in zip(curve.points, curve.points[1:], strict=False):
        assert lower.budget < higher.budget
        assert lower.peak <= higher.peak
        assert lower.overhead >= higher.overhead
        assert lower.bound >= higher.bound
    assert curve.knee in curve.points


def test_frontier_of_a_heuristic_is_monotone_too() -> None:
    graph = synthetic.residual_chain(12)
    plain = simulate(graph, Schedule.base(graph)).peak
    budgets = [plain * k // 10 for k in (9, 4, 6, 8, 5)]
    curve = frontier(graph, budgets, OPTIONS, strategy="chen_greedy")
    assert curve.floor is None
    assert {p.budget for p in curve.points} <= set(budgets)
    for lower, higher in zip(curve.points, curve.points[1:], strict=False):
        assert lower.peak <= higher.peak
        assert lower.overhead >= higher.overhead


def test_budgets_below_the_floor_are_left_out() -> None:
    graph = synthetic.chain(10)
    plain = simulate(graph, Schedule.base(graph)).peak
    low = static_floor(graph).bytes - 1
    assert [p.budget for p in frontier(graph, [low, plain], OPTIONS).points] == [plain]
    with pytest.raises(BudgetError, match="no schedule was found within any of the 1 budgets"):
        frontier(graph, [low], OPTIONS)
    with pytest.raises(BudgetError, match="at least 2 points"):
        frontier(graph, 1, OPTIONS)


@settings(derandomize=True, deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.05, 0.3]))
def test_least_memory_is_that_of_brute_force(seed: int, share: float) -> None:
    graph = synthetic.random_layered(4, seed=seed)
    found = least_memory(graph, share, replace(OPTIONS, gap=0.0))
    assert found.overhead <= share + 1e-9
    assert simulate(graph, found.schedule).peak == found.peak == found.budget
    plain = simulate(graph, Schedule.base(graph)).peak
    below = found.peak - max(1, (plain - graph.resident) // 200)
    best = cheapest(graph, below)
    assert best is None or simulate(graph, best[1]).overhead > share


def test_other_orders_are_looked_for_below_the_floor_of_the_base_order() -> None:
    # In base order both large buffers are in memory at once.
    operations = (
        Operation("a", "op", 1.0, (), (0,), repeatable=False),
        Operation("b", "op", 1.0, (), (1,), repeatable=False),
        Operation("read a", "op", 1.0, (0,), (2,), repeatable=False),
        Operation("read b", "op", 1.0, (1,), (3,), repeatable=False),
    )
    buffers = (Buffer("a", 10), Buffer("b", 10), Buffer("x", 1), Buffer("y", 1))
    graph = TrainingGraph(operations, buffers, (2, 3))
    free = replace(OPTIONS, time_limit=4, order="free")
    assert static_floor(graph).bytes == 21
    assert any_order_floor(graph).bytes == 11
    found = floor(graph, free)
    assert (found.bound, found.peak, found.valid_for) == (11, 12, "any order")
    assert floor(graph, OPTIONS).peak == 21
    assert frontier(graph, 3, free).points[0].peak == 12
    assert least_memory(graph, 0.5, free).peak == 12


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (-0.1, "must be a number of at least 0"),
        (float("nan"), "must be a number of at least 0"),
        *((value, "is a share of the plain step's time") for value in ("0.1", None, True, [0.1])),
    ],
)
def test_least_memory_refuses_what_is_no_share(wrong: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=f"max_overhead {words}"):
        least_memory(synthetic.chain(4), wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *((value, "number of its points, or a list of budgets") for value in ("50%", 2.5, None)),
        (True, "number of its points, or a list of budgets"),
        *((value, "at least 2 points") for value in (1, 0, -3)),
        *(([9000, value], "whole number of bytes here, got") for value in ("50%", 0.5, True)),
        ([9000, None], "needs a budget in bytes, got None"),
    ],
)
def test_frontier_refuses_what_are_no_points(wrong: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        frontier(synthetic.chain(4), wrong)


def test_points_of_numpy() -> None:
    graph = synthetic.chain(4)
    peak = simulate(graph, Schedule.base(graph)).peak
    assert len(frontier(graph, np.int64(2), OPTIONS, strategy="sqrt_n").points) >= 1
    points = frontier(graph, np.array([peak, 2 * peak]), OPTIONS, strategy="store_all").points
    assert [p.budget for p in points] == [peak, 2 * peak]


class Pressed:
    """A strategy during whose `nth` call Ctrl-C is pressed."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
        self.left -= 1
        found = solve(graph, budget, "optimal", options)
        if self.left <= 0:
            raise Interrupted(found)
        return found


@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_ends_the_whole_search(nth: int) -> None:
    graph = synthetic.random_layered(30, seed=2)
    plain = simulate(graph, Schedule.base(graph)).peak
    pressed = Pressed(nth)
    assert floor(graph, OPTIONS, strategy=pressed).peak <= plain
    assert pressed.left == 0
    pressed = Pressed(nth)
    assert least_memory(graph, 0.1, OPTIONS, strategy=pressed).interrupted
    assert pressed.left == 0
    pressed = Pressed(nth)
    low = static_floor(graph).bytes
    budgets = [low + (plain - low) * k // 5 for k in range(1, 6)]
    found = frontier(graph, budgets, OPTIONS, strategy=pressed)
    assert pressed.left == 0
    assert 1 <= len(found.points) <= nth
    assert not least_memory(graph, 0.1, OPTIONS).interrupted
