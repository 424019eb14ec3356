"""Explanations of plans."""

from __future__ import annotations

import pytest

from optckpt.errors import OptckptError, PlanError
from optckpt.explain import explain, explain_operation
from optckpt.frontends import synthetic
from optckpt.planner import make_plan
from optckpt.simulate import simulate

GRAPH = synthetic.chain(16, resident=1000)
PLAN = make_plan(GRAPH, "60%")
RESULT = simulate(GRAPH, PLAN.schedule)


def test_every_activation_is_kept_or_computed_again():
    found = explain(GRAPH, PLAN)
    read_later = [
        b
        for b in range(len(GRAPH.buffers))
        if GRAPH.operations[GRAPH.producer[b]].forward
        and any(not GRAPH.operations[r].forward for r in GRAPH.readers[b])
    ]
    sizes = {b: GRAPH.buffers[b].size for b in read_later}
    again = sum(s for b, s in sizes.items() if RESULT.counts[GRAPH.producer[b]] > 1)
    assert again > 0
    assert sum(r.computed_again for r in found.layers) == again
    assert sum(r.kept for r in found.layers) == sum(sizes.values()) - again
    assert sum(r.executions_again for r in found.layers) == RESULT.re_executions
    assert sum(r.seconds_again for r in found.layers) == pytest.approx(RESULT.extra_seconds)


def test_peak_and_floor():
    found = explain(GRAPH, PLAN)
    assert found.peak == PLAN.live_peak
    assert found.resident == 1000
    running = PLAN.schedule.executions[RESULT.peak_step]
    assert found.peak_operation == GRAPH.operations[running].name
    assert 0 < sum(h.size for h in found.at_peak) <= found.peak - found.resident
    assert [h.size for h in found.at_peak] == sorted((h.size for h in found.at_peak), reverse=True)
    assert found.floor == PLAN.floor
    assert found.floor_place.startswith("operation ")


def test_an_operation_that_is_executed_again():
    index = next(i for i, n in enumerate(RESULT.counts) if n > 1)
    one = explain_operation(GRAPH, PLAN, GRAPH.operations[index].name)
    assert len(one.executions) == RESULT.counts[index] == len(one.writes[0].copies)
    assert list(one.executions) == sorted(one.executions)
    assert all(0 <= a < b <= 1 for a, b in one.writes[0].copies)
    assert one.reason.startswith(f"executed {RESULT.counts[index]} times")


def test_an_operation_that_is_kept_and_one_of_the_backward_pass():
    kept = [
        i
        for i, n in enumerate(RESULT.counts)
        if n == 1
        and GRAPH.operations[i].forward
        and any(
            not GRAPH.operations[r].forward for r in GRAPH.readers[GRAPH.operations[i].writes[0]]
        )
    ]
    one = explain_operation(GRAPH, PLAN, GRAPH.operations[kept[0]].name)
    assert one.writes[0].fate == "kept"
    assert one.reason.startswith("kept")
    last = explain_operation(GRAPH, PLAN, GRAPH.operations[-1].name)
    assert not last.forward
    assert "backward" in last.reason


def test_parts_of_names():
    name = GRAPH.operations[0].name
    with pytest.raises(OptckptError, match="has no operation 'nosuch'"):
        explain_operation(GRAPH, PLAN, "nosuch")
    several = name[0]
    assert sum(several in op.name for op in GRAPH.operations) > 1
    with pytest.raises(OptckptError, match="several operations: "):
        explain_operation(GRAPH, PLAN, several)


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(PlanError, match="another graph"):
        explain(synthetic.chain(5), PLAN)
