"""When buffers are in memory: the sum of what is alive is what the referee says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends import synthetic
from optckpt.graph import TrainingGraph
from optckpt.lives import copies
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.registry import solve


def profile(graph: TrainingGraph, schedule: Schedule) -> list[int]:
    """Bytes of all copies alive at each execution, in a graph without in-place operations."""
    found = [graph.resident + graph.operations[o].workspace for o in schedule.executions]
    for copy in copies(graph, schedule):
        for step in range(copy.born, min(copy.dies + 1, len(schedule))):
            found[step] += graph.buffers[copy.buffer].size
    return found


@given(st.integers(0, 1000), st.sampled_from(["sqrt_n", "chen_greedy", "store_all"]))
@settings(max_examples=40, deadline=None)
def test_the_copies_in_memory_make_the_profile(seed, strategy):
    graph = synthetic.random_layered(14, seed)
    assert not any(op.inplace for op in graph.operations)
    schedule = solve(graph, None, strategy).schedule
    assert tuple(profile(graph, schedule)) == simulate(graph, schedule).profile


def test_copies_of_a_chain():
    graph = synthetic.chain(3)
    base = Schedule.base(graph)
    found = copies(graph, base)
    assert [c.buffer for c in found] == [
        b for o in base.executions for b in graph.operations[o].writes
    ]
    assert all(c.born <= c.dies <= len(base) for c in found)
    ends = {c.buffer for c in found if c.dies == len(base)}
    assert ends == set(graph.outputs)


def test_a_buffer_computed_again_has_two_copies():
    graph = synthetic.chain(16)
    plain = simulate(graph, Schedule.base(graph)).peak
    schedule = solve(graph, plain * 6 // 10, "optimal").schedule
    again = [o for o in set(schedule.executions) if schedule.executions.count(o) == 2]
    assert again
    number = [c.buffer for c in copies(graph, schedule)]
    for o in again:
        assert number.count(graph.operations[o].writes[0]) == 2


def test_outputs_that_are_written_again_live_on_in_the_last_copy():
    graph = synthetic.chain(4)
    found = copies(graph, Schedule.base(graph))
    assert sum(c.dies == len(graph.operations) for c in found) == len(graph.outputs)
    with pytest.raises(KeyError):
        copies(graph, Schedule(tuple(reversed(range(len(graph.operations))))))
