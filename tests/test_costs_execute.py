"""Measuring leaves things as they were, wherever it is called from."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import tensorflow as tf
from costs_support import STEP, capture_ops, capture_units, f32, measure, trace, training_step
from tensorflow.python.eager import context

from optckpt.costs.flops import FREE


def test_while_a_function_is_traced():
    seen = {}

    @tf.function
    def step(x):
        y = tf.tanh(tf.matmul(x, x))
        graph = tf.compat.v1.get_default_graph()
        before = [op.name for op in graph.get_operations()]
        with tf.device("/device:CPU:0"), tf.control_dependencies([y]):
            seen["graph"] = measure(capture_ops(graph.get_operations()))
        assert [op.name for op in graph.get_operations()] == before
        return y

    result = step(tf.ones([64, 64]))
    np.testing.assert_allclose(result, np.tanh(np.full([64, 64], 64.0)))
    assert all(op.seconds > 0 for op in seen["graph"].operations if op.kind not in FREE)


def test_in_a_v1_graph():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64])
        y = tf.tanh(tf.matmul(x, x))
        count = len(graph.get_operations())
        costs = measure(capture_ops(graph.get_operations()))
        assert len(graph.get_operations()) == count
        with tf.compat.v1.Session() as session:
            assert session.run(y, {x: np.zeros([64, 64])}).sum() == 0.0
    assert all(op.seconds > 0 for op in costs.operations if op.kind not in FREE)


_V1 = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, tensorflow as tf
from costs_support import capture_ops, capture_units
from optckpt.costs import cost
tf.compat.v1.disable_eager_execution()
graph = tf.compat.v1.get_default_graph()
x = tf.compat.v1.placeholder(tf.float32, [8, 16, 16, 3])
w = tf.compat.v1.get_variable("w", [3, 3, 3, 8], use_resource=False)
b = tf.compat.v1.get_variable("b", [8], use_resource=True)
y = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
g = tf.gradients(tf.nn.relu(y), [w, b])
ops = graph.get_operations()
count = len(ops)
found = cost(capture_ops(ops), cache=None)
named = {op.kind: op.seconds for op in found.operations}
for kind in ("Conv2D", "BiasAdd", "Relu", "ReluGrad", "Conv2DBackpropFilter", "BiasAddGrad"):
    assert named[kind] > 0, kind
pair = [op for op in ops if op.type in ("Conv2D", "BiasAdd")]
assert cost(capture_units([pair]), cache=None).operations[0].seconds > 0
assert len(graph.get_operations()) == count
assert tf.compat.v1.get_default_graph() is graph
assert not tf.executing_eagerly()
with tf.compat.v1.Session() as session:
    session.run(tf.compat.v1.global_variables_initializer())
    assert session.run(g[1], {x: np.zeros([8, 16, 16, 3])}).shape == (8,)
"""


def test_with_eager_execution_disabled(request):
    run = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", _V1, str(request.path.parent)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "could not be measured" not in run.stderr


def own_functions() -> set[str]:
    # TensorFlow keeps a wrapper for each kind of kernel that has run.
    names = context.context().list_function_names()
    return {n for n in names if not n.startswith("__wrapped__")}


def test_global_state_is_left_as_it_was():
    ops = trace(training_step, *STEP)
    units = [[op for op in ops if op.type in ("Conv2D", "BiasAdd")]]
    capture = capture_units(units)
    tf.random.set_seed(7)
    expected = [tf.random.uniform([3]).numpy().tolist() for _ in range(2)]
    state = np.random.get_state()[1].tolist()
    ctx = context.context()
    gc.collect()
    functions = own_functions()
    options = ctx.function_call_options.config_proto_serialized

    tf.random.set_seed(7)
    first = tf.random.uniform([3]).numpy().tolist()
    variable = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = variable * variable
        assert measure(capture).operations[0].seconds > 0
    second = tf.random.uniform([3]).numpy().tolist()

    assert [first, second] == expected
    assert float(tape.gradient(y, variable)) == 4.0
    assert np.random.get_state()[1].tolist() == state
    assert ctx.function_call_options.config_proto_serialized == options
    gc.collect()
    assert own_functions() <= functions


def test_inputs_are_freed():
    ops = trace(lambda x: tf.tanh(x), f32(1 << 20))
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    measure(capture_ops(ops))
    gc.collect()
    assert tf.config.experimental.get_memory_info("CPU:0")["current"] <= before


def test_progress_is_reported_to_a_callable(capsys):
    calls = []
    capture = capture_ops(trace(training_step, *STEP))
    measure(capture, progress=lambda done, total, name: calls.append((done, total, name)))
    total = len(capture.units)
    assert [c[0] for c in calls] == list(range(total + 1))
    assert {c[1] for c in calls} == {total}
    assert calls[0][2] == capture.graph.operations[0].name
    measure(capture, progress=True)
    assert capsys.readouterr().err == ""


def test_bar_appears_on_a_terminal_after_a_second(monkeypatch, capsys):
    from optckpt.costs import progress

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Display(True, 10) as display:
        display.update(1, "first")
        assert display._bar is None
        now[0] = 1.5
        display.update(2, "second")
        assert display._bar is not None
    with progress.Display(False, 10) as display:
        now[0] = 9.0
        display.update(2, "second")
        assert display._bar is None
    capsys.readouterr()
