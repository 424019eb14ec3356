"""Changes of a sequence, weighed from what they touch, against evaluating the whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import random_order
from test_order_search import arrays_of

from optckpt.frontends.synthetic import random_graph
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.order_memory import Line, Trial, accept, lay, new_line, new_trial, weigh
from optckpt.solvers.order_moves import limits
from optckpt.solvers.order_search import OrderArrays
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.sequence import cost, profile


def with_re_executions(graph: TrainingGraph, rng: random.Random) -> list[int]:
    """A valid sequence without dead re-executions."""
    sequence = random_order(graph, rng.randrange(10**6))
    for _ in range(rng.randint(0, 8)):
        k = rng.randrange(1, len(sequence) + 1)
        again = [o for o in sequence[:k] if graph.operations[o].repeatable]
        if again:
            sequence.insert(k, rng.choice(again))
    return drop_dead(preprocess(graph, merge=False), sequence)


def laid(
    graph: TrainingGraph, sequence: list[int], budget: int
) -> tuple[OrderArrays, Line, Trial, tuple[int, float, float, int]]:
    arrays = arrays_of(graph)
    capacity = 2 * len(sequence) + 64
    line = new_line(capacity)
    facts = lay(np.array(sequence, np.int64), budget, arrays, line)
    return arrays, line, new_trial(arrays, capacity), facts


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 1.0))
def test_shifts_and_removals_are_weighed_as_the_whole_would_be(seed: int, share: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(2, 25), repeatable_backward=rng.choice([0.0, 0.7]))
    problem = preprocess(graph, merge=False)
    sequence = with_re_executions(graph, rng)
    use = profile(problem, sequence)
    budget = max(1, round(share * max(use)))
    arrays, line, trial, (_, _, excess, bad) = laid(graph, sequence, budget)
    length = len(sequence)
    assert line.use[:length].tolist() == use
    assert bad == sum(u > budget for u in use)
    for mark in range(1, 30):
        source = rng.randrange(length)
        i = int(line.at[source])
        moved, added, longer = [i], 0.0, 0
        if i >= problem.n and rng.random() < 0.5:
            low = high = source
            longer = -1
            trial.place[i] = -1
            added = -problem.cost[line.operation[i]]
        else:
            earliest, latest, own = limits(i, arrays, line, length)
            target = rng.randint(earliest, min(latest, own - 1))
            low, high = min(source, target), max(source, target)
            stretch = [int(k) for k in line.at[low : high + 1]]
            stretch.remove(i)
            stretch.insert(target - low, i)
            trial.at[low : high + 1] = stretch
        for q in range(low, high + longer + 1):
            trial.place[trial.at[q]] = q
        trial.moved[0] = i
        trial.stamp[i] = mark
        fits, start, stop, gained, more_excess, more_bad, givers, dead = weigh(
            arrays, line, trial, low, high, longer, len(moved), mark, budget, 1.0, 0.0, added,
            excess, np.inf,
        )  # fmt: skip
        assert fits
        lost = [int(line.operation[k]) for k in trial.dead[:dead]]
        assert gained == pytest.approx(added - sum(problem.cost[o] for o in lost), abs=1e-12)
        accept(line, trial, length, low, high, longer, start, stop, givers)
        length += longer
        if longer:
            j = line.operation[i]
            while line.following[j] != i:
                j = line.following[j]
            line.following[j] = line.following[i]
            line.place[i] = -1
        executions = [int(line.operation[k]) for k in line.at[:length]]
        use = profile(problem, executions)
        assert line.use[:length].tolist() == use
        bad += more_bad
        excess += more_excess
        assert bad == sum(u > budget for u in use)
        _, _, exact, _ = lay(np.array(executions, np.int64), budget, arrays, new_line(len(line.at)))
        assert excess == pytest.approx(exact, abs=1e-9)
        simulate(graph, Schedule(tuple(executions)))
        assert len(drop_dead(problem, executions)) <= length - dead
        if dead:
            # The memory of what nobody needs is told by those who take it out.
            break
    assert cost(problem, executions) >= -1e-12


def test_too_dear_a_change_is_given_up() -> None:
    graph = random_graph(random.Random(1), 20, repeatable_backward=0.0)
    sequence = list(range(len(graph.operations)))
    use = profile(preprocess(graph, merge=False), sequence)
    arrays, line, trial, (_, _, excess, _) = laid(graph, sequence, max(use))
    given_up = 0
    for mark, i in enumerate(sequence, 1):
        earliest, latest, _ = limits(i, arrays, line, len(sequence))
        for target in {earliest, latest} - {i}:
            low, high = min(i, target), max(i, target)
            stretch = [k for k in range(low, high + 1) if k != i]
            stretch.insert(target - low, i)
            trial.at[low : high + 1] = stretch
            for q in range(low, high + 1):
                trial.place[trial.at[q]] = q
            trial.moved[0] = i
            stamp = 2 * mark + (target > i)
            trial.stamp[i] = stamp
            peak = max(profile(preprocess(graph, merge=False), swapped(sequence, low, stretch)))
            fits = weigh(
                arrays, line, trial, low, high, 0, 1, stamp, max(use), 1.0, 0.0, 0.0, excess, 0.0
            )[0]
            assert fits == (peak <= max(use))
            given_up += not fits
    assert given_up > 0
    # Nothing of what was given up is left in the scratch.
    for scratch in (trial.begins, trial.ends, trial.new_begins, trial.new_ends):
        assert not scratch.any()


def swapped(sequence: list[int], low: int, stretch: list[int]) -> list[int]:
    return [*sequence[:low], *stretch, *sequence[low + len(stretch) :]]
