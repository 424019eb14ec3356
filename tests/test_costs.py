from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from costs_support import capture_ops, capture_units, f32, trace

from optckpt import costs
from optckpt.costs import Cost, cost
from optckpt.costs.constants import Folder
from optckpt.costs.flops import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    operation_bytes,
    operation_flops,
)
from optckpt.errors import OptckptError


def last(function, *args):
    """The last operation that does something in a traced function."""
    return [op for op in trace(function, *args) if op.type not in ("Identity", "NoOp")][-1]


def test_unit_costs_one_second_each():
    capture = capture_ops(trace(lambda x: tf.nn.relu(tf.matmul(x, x)), f32(4, 4)))
    graph = cost(capture, "unit")
    assert {op.seconds for op in graph.operations} == {1.0}
    assert {op.workspace for op in graph.operations} == {0}
    assert graph.fingerprint == capture.graph.fingerprint


def test_unknown_model_names_the_known_ones():
    capture = capture_ops(trace(tf.nn.relu, f32(4)))
    with pytest.raises(OptckptError, match=r"'guess'.*measured, flops, unit"):
        cost(capture, "guess")
    with pytest.raises(OptckptError, match="repeats"):
        cost(capture, "unit", repeats=0)


def test_registered_model_is_used(monkeypatch):
    capture = capture_ops(trace(tf.nn.relu, f32(4)))

    def half(capture, options):
        return [Cost(0.5, 7)] * len(capture.graph.operations)

    monkeypatch.setattr("optckpt.costs.registry._models._registered", {})
    costs.register("half", half)
    assert costs.names() == ["measured", "flops", "unit", "half"]
    for model in ("half", half):
        graph = cost(capture, model)
        assert {(op.seconds, op.workspace) for op in graph.operations} == {(0.5, 7)}


@pytest.mark.parametrize("model", ["unit", "flops", "measured"])
def test_workspace_of_the_capture_is_a_lower_bound(model):
    capture = capture_ops(trace(tf.nn.relu, f32(64)))
    n = len(capture.units)
    graph = capture.graph.with_costs([0.0] * n, [12345] * n)
    capture = type(capture)(graph, capture.units)
    assert {op.workspace for op in cost(capture, model, cache=None).operations} == {12345}


def test_flops_of_convolutions():
    x, w = f32(2, 8, 10, 3), f32(3, 5, 3, 7)
    conv = last(lambda x, w: tf.nn.conv2d(x, w, [1, 2, 2, 1], "SAME"), x, w)
    # Each of 2 x 4 x 5 x 7 results sums 3 x 5 x 3 products.
    forward = 2 * (2 * 4 * 5 * 7) * (3 * 5 * 3)
    assert operation_flops(conv) == forward
    assert operation_bytes(conv) == 4 * (2 * 8 * 10 * 3 + 3 * 5 * 3 * 7 + 2 * 4 * 5 * 7)

    ops = trace(lambda x, w: tf.gradients(tf.nn.conv2d(x, w, [1, 2, 2, 1], "SAME"), [x, w]), x, w)
    backward = {op.type: operation_flops(op) for op in ops if "Backprop" in op.type}
    assert backward == {"Conv2DBackpropInput": forward, "Conv2DBackpropFilter": forward}


def test_flops_of_grouped_and_volumetric_convolutions():
    grouped = last(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), f32(2, 8, 8, 6), f32(3, 3, 2, 9))
    assert operation_flops(grouped) == 2 * (2 * 8 * 8 * 9) * (3 * 3 * 2)
    volume = last(
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "VALID"), f32(1, 4, 5, 6, 2), f32(2, 2, 2, 2, 3)
    )
    assert operation_flops(volume) == 2 * (3 * 4 * 5 * 3) * (2 * 2 * 2 * 2)


def test_flops_of_depthwise_convolution():
    x, w = f32(2, 8, 8, 5), f32(3, 3, 5, 2)

    def gradients(x, w):
        return tf.gradients(tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [x, w])

    found = {op.type: operation_flops(op) for op in trace(gradients, x, w) if "wise" in op.type}
    assert found == {
        "DepthwiseConv2dNative": 2 * (2 * 8 * 8 * 10) * 9,
        "DepthwiseConv2dNativeBackpropInput": 2 * (2 * 8 * 8 * 10) * 9,
        "DepthwiseConv2dNativeBackpropFilter": 2 * (2 * 8 * 8 * 10) * 9,
    }


@pytest.mark.parametrize("transpose", [False, True])
def test_flops_of_matrix_products(transpose):
    a = f32(5, 3) if transpose else f32(3, 5)
    product = last(lambda a, b: tf.matmul(a, b, transpose_a=transpose), a, f32(5, 7))
    assert operation_flops(product) == 2 * 3 * 5 * 7
    a = f32(2, 6, 5, 3) if transpose else f32(2, 6, 3, 5)
    batch = last(lambda a, b: tf.matmul(a, b, transpose_a=transpose), a, f32(2, 6, 5, 7))
    assert batch.type.startswith("BatchMatMul")
    assert operation_flops(batch) == 2 * 2 * 6 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("equation", "a", "b", "expected"),
    [
        ("bthd,bshd->bhts", (2, 3, 4, 5), (2, 6, 4, 5), 2 * 2 * 4 * 3 * 6 * 5),
        ("...ij,...jk->...ik", (7, 2, 3), (7, 3, 4), 2 * 7 * 2 * 3 * 4),
        ("...ij,jk->...ik", (8, 7, 2, 3), (3, 4), 2 * 8 * 7 * 2 * 3 * 4),
    ],
)
def test_flops_of_einsum(equation, a, b, expected):
    op = next(
        op
        for op in trace(lambda a, b: tf.raw_ops.Einsum(inputs=[a, b], equation=equation),
                        f32(*a), f32(*b))
        if op.type == "Einsum"
    )  # fmt: skip
    assert operation_flops(op) == expected


def test_flops_seconds_are_a_roofline():
    def step(x, y):
        return tf.reshape(tf.matmul(x, x), [-1]), x + y

    ops = trace(step, f32(1024, 1024), f32(1024, 1024))
    capture = capture_ops(ops)
    seconds = {op.kind: op.seconds for op in cost(capture, "flops").operations}
    assert seconds["MatMul"] == pytest.approx(2 * 1024**3 / FLOPS_PER_SECOND)
    assert seconds["AddV2"] == pytest.approx(3 * 4 * 1024**2 / BYTES_PER_SECOND)
    assert seconds["Reshape"] == seconds["Placeholder"] == seconds["Const"] == 0.0


def test_flops_of_a_unit_is_the_sum():
    def layer(x, w, b):
        return tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)

    args = f32(4, 16, 16, 8), f32(3, 3, 8, 8), f32(8)
    ops = [op for op in trace(layer, *args) if op.type in ("Conv2D", "BiasAdd")]
    apart = cost(capture_ops(ops), "flops")
    together = cost(capture_units([ops]), "flops")
    assert together.operations[0].seconds == pytest.approx(apart.seconds)


def test_flops_of_loops_and_branches():
    def loop(x):
        return tf.map_fn(lambda row: tf.matmul(row, row), x)

    ops = trace(loop, f32(6, 128, 128))
    graph = cost(capture_ops(ops), "flops")
    (loop_op,) = [op for op in graph.operations if op.kind in ("While", "StatelessWhile")]
    assert 6 * 2 * 128**3 / FLOPS_PER_SECOND <= loop_op.seconds < 6 * 1e-4

    def branch(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, x), lambda: x + x)

    graph = cost(capture_ops(trace(branch, f32(256, 256))), "flops")
    (branch_op,) = [op for op in graph.operations if op.kind in ("If", "StatelessIf")]
    assert branch_op.seconds == pytest.approx(2 * 256**3 / FLOPS_PER_SECOND)


def test_flops_of_the_gradient_of_a_loop_counts_its_iterations():
    def gradient(x):
        y = tf.map_fn(lambda row: tf.matmul(row, row), x)
        return tf.gradients(y, x)

    graph = cost(capture_ops(trace(gradient, f32(6, 128, 128))), "flops")
    forward, backward = (
        op.seconds for op in graph.operations if op.kind in ("While", "StatelessWhile")
    )
    assert backward > 1.5 * forward


def test_constants_are_folded_without_touching_the_graph():
    def function(x):
        n = tf.shape(x)[0] * 2 + tf.reduce_prod([3, 4])
        return tf.stack([n, tf.rank(x)]), tf.cast(x[0, 0], tf.int32)

    ops = trace(function, f32(5, 6))
    count = len(ops[0].graph.get_operations())
    from optckpt.costs.execute import eager_scope, run_operation

    pack = next(op for op in ops if op.type == "Pack" and op.inputs[0].op.type == "AddV2")
    unknown = next(op for op in ops if op.type == "Cast")
    with eager_scope():
        folder = Folder(run_operation)
        np.testing.assert_array_equal(folder.value(pack.outputs[0]), [22, 2])
        assert folder.value(unknown.outputs[0]) is None
    assert Folder().value(pack.outputs[0]) is None
    assert len(ops[0].graph.get_operations()) == count


def test_folding_leaves_tensors_feedable():
    with tf.Graph().as_default() as graph:
        c = tf.constant([1, 2])
        y = c + 1
    assert Folder().value(c).tolist() == [1, 2]
    assert graph.is_feedable(c)
    assert graph.is_feedable(y)
