"""Warm starts: schedules carried over to a step that resembles one planned before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt import reuse
from optckpt.budget import Budget
from optckpt.frontends.synthetic import chain, random_graph, unet
from optckpt.graph import TrainingGraph
from optckpt.judge import plain_peak
from optckpt.plan_cache import PlanCache
from optckpt.reuse import Problem, plan_once
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.registry import SolveOptions, solve
from optckpt.warm import Memory, carry_over


def scaled(graph: TrainingGraph, factor: float) -> TrainingGraph:
    """The same step for a batch that is so many times as large."""
    return replace(
        graph,
        buffers=tuple(replace(b, size=int(b.size * factor)) for b in graph.buffers),
        operations=tuple(replace(op, seconds=op.seconds * factor) for op in graph.operations),
    )


def names(graph: TrainingGraph) -> list[tuple[str, str]]:
    return [(op.name, op.kind) for op in graph.operations]


def repeating(graph: TrainingGraph) -> Schedule:
    """A schedule that repeats something."""
    schedule = solve(graph, None, "sqrt_n", SolveOptions()).schedule
    assert schedule is not None
    assert len(schedule) > len(graph.operations)
    return schedule


def without(graph: TrainingGraph, gone: int) -> TrainingGraph:
    """`graph` without an operation, whose outputs are there from the beginning."""
    index = [o for o in range(len(graph.operations)) if o != gone]
    place = {o: i for i, o in enumerate(index)}
    lost = set(graph.operations[gone].writes)
    left = [b for b in range(len(graph.buffers)) if b not in lost]
    moved = {b: i for i, b in enumerate(left)}

    def kept(buffers):
        return tuple(moved[b] for b in buffers if b in moved)

    operations = []
    for o in index:
        op = graph.operations[o]
        operations.append(
            replace(
                op,
                reads=kept(op.reads),
                writes=kept(op.writes),
                inplace=kept(op.inplace),
                after=tuple(place[a] for a in op.after if a in place),
            )
        )
    return replace(
        graph,
        operations=tuple(operations),
        buffers=tuple(graph.buffers[b] for b in left),
        outputs=kept(graph.outputs),
    )


def test_the_same_operations_at_other_sizes():
    memory = Memory()
    graph = unet(3)
    schedule = repeating(graph)
    memory.remember(graph, schedule, 0.25)
    found = memory.start(scaled(graph, 0.6))
    assert found is not None
    assert (found.schedule, found.overhead) == (schedule, 0.25)


def test_the_same_step_is_left_out():
    memory = Memory()
    graph = chain(12)
    memory.remember(graph, repeating(graph), 0.3)
    assert memory.start(graph) is None


def test_other_steps_are_no_start():
    memory = Memory()
    memory.remember(chain(12), repeating(chain(12)), 0.3)
    assert memory.start(unet(3)) is None
    assert memory.start(chain(20)) is None
    renamed = scaled(chain(12), 0.5)
    operations = tuple(replace(op, kind=op.kind + "X") for op in renamed.operations)
    assert memory.start(replace(renamed, operations=operations)) is None


def test_a_plain_schedule_is_no_start():
    memory = Memory()
    memory.remember(chain(12), Schedule.base(chain(12)), 0.0)
    assert memory.start(scaled(chain(12), 0.5)) is None


def test_the_latest_of_equals_and_few_are_remembered():
    memory = Memory()
    graph = chain(12)
    first, second = repeating(graph), Schedule((*repeating(graph).executions, 0))
    memory.remember(scaled(graph, 2), first, 0.1)
    memory.remember(scaled(graph, 3), second, 0.2)
    found = memory.start(graph)
    assert found is not None
    assert found.overhead == 0.2
    for n in range(40):
        memory.remember(scaled(unet(3), 1 + n), repeating(unet(3)), 0.5)
    assert memory.start(graph) is None


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_what_is_carried_over_can_be_executed(seed):
    """With an operation missing on either side: its tensors have become small, say."""
    rng = random.Random(seed)
    graph = random_graph(seed, rng.randint(8, 30))
    schedule = solve(graph, None, "sqrt_n", SolveOptions()).schedule
    less = without(graph, rng.randrange(len(graph.operations)))
    found = carry_over(names(graph), schedule, less)
    repeats = len(schedule) - len(graph.operations)
    if found is not None:
        simulate(less, found)
        assert 0 < len(found) - len(less.operations) <= repeats
    back = solve(less, None, "sqrt_n", SolveOptions()).schedule
    more = carry_over(names(less), back, graph)
    if more is not None:
        simulate(graph, more)
        assert len(more) - len(graph.operations) == len(back) - len(less.operations)


def test_repeats_stand_before_the_same_operations():
    graph = chain(8)
    schedule = repeating(graph)
    gone = next(o for o, op in enumerate(graph.operations) if not op.forward)
    less = without(graph, gone)
    found = carry_over(names(graph), schedule, less)
    assert found is not None
    here = [less.operations[o].name for o in found.executions]
    there = [graph.operations[o].name for o in schedule.executions]
    assert here == [name for name in there if name != graph.operations[gone].name]


def test_another_order_needs_all_operations():
    graph = chain(8)
    executions = list(repeating(graph).executions)
    executions.remove(0)
    executions.append(0)
    assert carry_over(names(graph), Schedule(tuple(executions)), without(graph, 3)) is None


# --- In planning ---------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch) -> Memory:
    fresh = Memory()
    monkeypatch.setattr(reuse, "memory", fresh)
    return fresh


@pytest.fixture
def seen(monkeypatch) -> list[SolveOptions]:
    """The options of each solve."""
    found: list[SolveOptions] = []
    make = reuse.make_plan

    def noted(graph, budget, strategy, options, **more):
        found.append(options)
        return make(graph, budget, strategy, options, **more)

    monkeypatch.setattr(reuse, "make_plan", noted)
    return found


def problem(graph: TrainingGraph, budget: str) -> Problem:
    return Problem(
        graph=graph,
        budget=Budget.parse(budget),
        strategy="optimal",
        options=SolveOptions(time_limit=8.0, threads=1),
        margin=0.0,
        allocator=None,
        plain_graph=graph,
        max_overhead=None,
        reorder=False,
        repeat="all",
        surroundings={},
    )


def test_a_smaller_batch_begins_from_the_plan_of_the_larger(memory, seen, tmp_path):
    cache = PlanCache(tmp_path)
    graph = unet(4)
    limit = int(0.7 * plain_peak(graph))
    large = plan_once(problem(graph, str(limit)), cache)
    smaller = scaled(graph, 0.8)
    small = plan_once(problem(smaller, str(limit)), cache)
    assert [options.start for options in seen] == [None, large.schedule]
    # The plan of the larger batch fits, so that the search is a short one.
    assert [options.time_limit for options in seen] == [8.0, pytest.approx(0.8)]
    assert small.live_peak <= limit
    assert small.overhead <= simulate(smaller, large.schedule).overhead + 1e-9
    # The same again, and the same step at another budget, are not started from it.
    assert plan_once(problem(smaller, str(limit)), cache).schedule == small.schedule
    assert len(seen) == 2


def test_a_larger_batch_is_searched_in_full(memory, seen, tmp_path):
    cache = PlanCache(tmp_path)
    graph = unet(4)
    limit = int(0.8 * plain_peak(graph))
    plan_once(problem(graph, str(limit)), cache)
    larger = plan_once(problem(scaled(graph, 1.1), str(limit)), cache)
    assert [options.time_limit for options in seen] == [8.0, 8.0]
    assert seen[1].start is not None
    assert larger.live_peak <= limit


def test_what_was_planned_before_does_not_change_the_same_step(memory, seen, tmp_path):
    cache = PlanCache(tmp_path)
    for budget in ("80%", "60%", "80%"):
        plan_once(problem(unet(3), budget), cache)
    assert [options.start for options in seen] == [None, None]


def test_a_plan_from_the_cache_is_a_start_as_well(memory, seen, tmp_path, monkeypatch):
    graph = unet(3)
    plan = plan_once(problem(graph, "70%"), PlanCache(tmp_path))
    monkeypatch.setattr(reuse, "memory", Memory())
    plan_once(problem(graph, "70%"), PlanCache(tmp_path))
    plan_once(problem(scaled(graph, 0.5), "70%"), PlanCache(tmp_path))
    assert [options.start for options in seen] == [None, plan.schedule]
