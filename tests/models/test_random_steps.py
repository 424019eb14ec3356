"""Gradients of random steps equal those of tf.gradients in every bit."""

from __future__ import annotations

import logging

import pytest
from random_steps import RandomStep
from tf_support import assert_same, everything_again, random_schedule

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.solvers.registry import solve


def square_root(graph: TrainingGraph) -> Schedule:
    """What `sqrt_n` plans when every operation takes the same time."""
    solution = solve(graph.with_costs([1.0] * len(graph.operations)), None, "sqrt_n")
    return solution.schedule or everything_again(graph)


@pytest.mark.parametrize("seed", range(12))
def test_two_training_steps_are_the_same(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    step = RandomStep(seed, operations=6)
    with caplog.at_level(logging.DEBUG, "optckpt.frontends.tf_sums"):
        expected = step.run(("sums only", "sums only"))
    if "depends on timing" not in caplog.text:
        assert_same(step.run(), expected)
    schedule = (square_root, random_schedule(seed), everything_again)[seed % 3]
    assert_same(step.run((schedule, schedule)), expected)
    assert sum(len(report.clones) for report in step.reports) > 5
