"""What TensorFlow may merge has one partner to be merged with."""

from __future__ import annotations

import tensorflow as tf
from tf_support import Step, assert_same, normal, weight

from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule


def backward_units_again(graph: TrainingGraph) -> Schedule:
    """Each BiasAddGrad with its partner, executed again at once from the same gradient."""
    executions: list[int] = []
    for o, op in enumerate(graph.operations):
        executions.append(o)
        if op.kind == "BiasAddGrad+Conv2DBackpropFilter" and op.repeatable:
            executions += [o, o]
    return Schedule(tuple(executions))


def test_each_execution_reads_the_gradient_by_a_name_of_its_own() -> None:
    w = weight(3, 3, 8, 8)
    offset = weight(8, seed=9)

    def model(x: tf.Tensor) -> tf.Tensor:
        # Gradients are sums over layers: those of the single layers may be computed again.
        for _ in range(3):
            x = tf.tanh(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), offset))
        return tf.reduce_sum(x * x)

    x = normal(4, 16, 16, 8)
    plain = Step(model, [w, offset])(x)
    step = Step(model, [w, offset], backward_units_again, chain_from=1, count_from=0)
    assert_same(step(x), plain)
    assert step.report is not None
    again = [op for op in step.report.clones if op.type == "BiasAddGrad"]
    assert len(again) >= 2
    assert len({id(op.inputs[0]) for op in again}) == len(again)
    for op in again:
        readers = op.inputs[0].consumers()
        assert sorted(c.type for c in readers) == ["BiasAddGrad", "Conv2DBackpropFilter"]
