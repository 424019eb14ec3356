"""What is ordered after a call of a function waits for what the call returns."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from fresh_process import PeakError
from tf_support import counted, normal

import optckpt
from optckpt.backends.calls import is_inlined
from optckpt.config import Config
from optckpt.frontends import tf_ops
from optckpt.schedule import Plan

pytestmark = pytest.mark.usefixtures("grappler_off")

SIDE = 320
QUICK = Config.model_validate(
    {
        "costs": {"model": "flops"},
        "plans": {"cache": False},
        "memory": {"margin": 0.0},
        "solver": {"order": "fixed", "gap": 0.3, "time_limit": 2.0},
    }
)


def layers(count: int, **attributes: Any) -> tuple[Any, list[tf.Variable]]:
    """A loss of functions that are called one after the other, and its weights."""

    @tf.function(autograph=False, experimental_attributes=attributes or None)
    def layer(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.sin(x @ w) + x)

    weights = [tf.Variable(normal(SIDE, SIDE) / SIDE) for _ in range(count)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        for w in weights:
            x = layer(x, w.read_value())
        return tf.reduce_mean(x * x)

    return loss, weights


def gates_after(call: tf.Operation) -> set[str]:
    return {
        c.type
        for t in call.outputs
        for c in t.consumers()
        if c.type == "Identity" and c._control_outputs
    }


@pytest.mark.parametrize("inlined", [True, False])
def test_operations_after_a_call_wait_for_its_results(inlined: bool) -> None:
    loss_of, weights = layers(4, **({} if inlined else {"_noinline": True}))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        loss = loss_of(x)
        return loss, optckpt.gradients(loss, weights, budget="100%", config=QUICK)

    graph = step.get_concrete_function(tf.TensorSpec((4 * SIDE, SIDE))).graph
    calls = [op for op in graph.get_operations() if tf_ops.is_call(op)]
    assert {is_inlined(call) for call in calls} == {inlined}
    before = [c for c in calls if any(o.type != "Identity" for o in c._control_outputs)]
    assert before
    gated = [call for call in before if gates_after(call)]
    assert bool(gated) is inlined


@pytest.mark.parametrize("following", ["matmul", "tanh"])
def test_the_chain_waits_for_all_that_a_loop_does(following: str) -> None:
    """Lists that only the gradient of a loop reads hold memory until the executor has filled them.

    Product and bias are merged, so that the product has no control inputs.
    """
    weights = [tf.Variable(normal(SIDE, SIDE) / SIDE) for _ in range(3)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        x = tf.tanh(x @ weights[0])
        _, x = tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ weights[1]) + x), (0, x)
        )
        x = x @ weights[2] if following == "matmul" else tf.tanh(x)
        loss = tf.reduce_mean(tf.tanh(x) ** 2)
        return loss, optckpt.gradients(loss, weights[:2], budget="100%", config=QUICK)

    graph = step.get_concrete_function(tf.TensorSpec((4 * SIDE, SIDE))).graph
    forward, _ = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    readers = {c for t in forward.outputs for c in t.consumers() if c.type in ("MatMul", "Tanh")}
    first = min(readers, key=lambda op: op._id)
    after = first.outputs[0].consumers()
    waiting = [op for op in (first, *after) if forward in op.control_inputs]
    assert [op.type for op in waiting] == ["Tanh"]


@pytest.mark.fresh_process
def test_the_peak_of_a_step_with_calls_is_as_predicted() -> None:
    loss_of, weights = layers(10)
    plans: list[Plan] = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        loss = loss_of(x)
        return loss, optckpt.gradients(
            loss, weights, budget="60%", config=QUICK, on_plan=plans.append
        )

    x = counted(normal(4 * SIDE, SIDE))
    step(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    (plan,) = plans
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    if peak > 1.03 * plan.predicted_peak:
        raise PeakError(f"{peak} bytes, predicted {plan.predicted_peak}")
