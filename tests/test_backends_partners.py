"""What TensorFlow may merge has one partner to be merged with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from tf_support import (
    Step,
    assert_same,
    everything_again,
    flat,
    grappler_off,
    normal,
    random_order,
    random_schedule,
    weight,
)

from optckpt.backends.tensorflow import rewrite
from optckpt.frontends.tensorflow import capture
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


def biased_bfloat16(waiting: bool = False) -> tuple[Callable[..., tf.Tensor], list[tf.Variable]]:
    """Convolutions with biases, which wait for something by control edges of the model's own."""
    ws = [weight(3, 3, 8, 8, seed=i) for i in range(4)]
    bs = [weight(8, seed=i) for i in range(4, 8)]

    def model(x: tf.Tensor) -> tf.Tensor:
        first = x = tf.cast(x, tf.bfloat16)
        for w, b in zip(ws, bs, strict=True):
            x = tf.tanh(x)
            x = tf.nn.conv2d(x, tf.cast(w, tf.bfloat16), 1, "SAME")
            if waiting:
                x.op._add_control_input(tf.sin(first).op)
            x = tf.tanh(tf.nn.bias_add(x, tf.cast(b, tf.bfloat16)))
        return tf.reduce_sum(tf.square(tf.cast(x, tf.float32)))

    return model, [*ws, *bs]


@pytest.mark.parametrize("waiting", [False, True])
def test_bfloat16_convolutions_are_merged_with_their_biases_if_the_plain_ones_are(
    waiting: bool,
) -> None:
    model, variables = biased_bfloat16(waiting)
    x = normal(4, 16, 16, 8)
    plain = Step(model, variables)(x)
    schedules = [everything_again, random_schedule(1)]
    schedules += [random_order(seed, share) for seed in range(3) for share in (0.0, 0.5)]
    gates = set()
    for schedule in schedules:
        step = Step(model, variables, schedule, chain_from=1, count_from=0)
        assert_same(step(x), plain)
        assert step.capture is not None
        for op in step.capture.tf_graph.get_operations():
            if op.type == "BiasAdd":
                conv = op.inputs[0].op
                assert not op.control_inputs
                if not waiting:
                    assert not conv.control_inputs
                if conv.inputs[0].op.type == "Identity":
                    gates.add(conv.inputs[0].op)
    assert bool(gates) is not waiting
    for gate in gates:
        assert gate.control_inputs
        assert len(gate.outputs[0].consumers()) == 1


def test_bfloat16_gradients_taken_twice_are_the_plain_ones() -> None:
    model, variables = biased_bfloat16()
    x = normal(4, 16, 16, 8)

    def gradients(schedules: list[Callable[..., Schedule] | None]) -> list[np.ndarray]:
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            y = model(x)
            found: list[tf.Tensor] = [y]
            for factor, schedule in zip((1.0, 3.0), schedules, strict=True):
                loss = tf.sin(factor * y)
                outputs = flat(tf.gradients(loss, variables))
                if schedule is not None:
                    step = capture(loss.graph, [loss], outputs, chain_from=1, count_from=0)
                    rewrite(step, schedule(step.graph))
                found += outputs
            return found

        function = tf.function(step, autograph=False)
        with grappler_off():
            return [t.numpy() for t in function(x)]

    plain = gradients([None, None])
    for schedules in ([everything_again] * 2, [random_order(1), random_schedule(2)]):
        assert_same(gradients(schedules), plain)
