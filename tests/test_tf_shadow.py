"""Graphs traced with unknown sizes: captured on a sized copy, right at every size."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function
from tf_support import (
    everything_again,
    flat,
    grappler_off,
    random_order,
    random_schedule,
)

from optckpt.backends.tensorflow import rewrite
from optckpt.errors import CaptureError
from optckpt.frontends import tf_ops
from optckpt.frontends.tensorflow import capture
from optckpt.frontends.tf_chance import is_view_by_chance
from optckpt.frontends.tf_shadow import shadow
from optckpt.schedule import Schedule
from optckpt.simulate import simulate


def variable(*shape: int, seed: int = 0) -> tf.Variable:
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])
    return tf.Variable(values.astype(np.float32))


def data(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class Traced:
    """A step traced with unknown sizes, planned at the shapes given, beside the plain one."""

    def __init__(self, model, xs, specs, shapes, schedulers=(), **options):
        self.captures = []
        self.graph = None
        self.static = None
        specs = [tf.TensorSpec(*s) if isinstance(s, tuple) else tf.TensorSpec(s) for s in specs]

        def plain(*args):
            ys = tf.nest.flatten(model(*args))
            return [*ys, *flat(tf.gradients(ys, list(xs)))]

        def rewritten(*args):
            self.graph = tf.compat.v1.get_default_graph()
            ys = tf.nest.flatten(model(*args))
            outputs = flat(tf.gradients(ys, list(xs)))
            at = {id(t): tf.TensorShape(s) for t, s in zip(args, shapes, strict=True)}
            for scheduler in schedulers or (Schedule.base,):
                found = capture(self.graph, ys, outputs, shapes=at, **options)
                rewrite(found, scheduler(found.graph))
                self.captures.append(found)
            return [*ys, *outputs]

        def static(*args):
            ys = tf.nest.flatten(model(*args))
            outputs = flat(tf.gradients(ys, list(xs)))
            self.static = capture(tf.compat.v1.get_default_graph(), ys, outputs, **options)
            return ys

        sized = [tf.TensorSpec(s, d.dtype) for s, d in zip(shapes, specs, strict=True)]
        tf.function(static, autograph=False).get_concrete_function(*sized)
        self.plain = tf.function(plain, autograph=False, input_signature=specs)
        self.function = tf.function(rewritten, autograph=False, input_signature=specs)
        self.function.get_concrete_function()
        self.capture = self.captures[0]

    def assert_identical(self, *args):
        with grappler_off():
            expected = [t.numpy() for t in self.plain(*args)]
            got = [t.numpy() for t in self.function(*args)]
        assert len(got) == len(expected) > 1
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def base_peak(found) -> int:
    return simulate(found.graph, Schedule.base(found.graph)).peak


def again(graph):
    schedule = everything_again(graph)
    assert len(schedule) > len(graph.operations), "nothing is repeated"
    return schedule


# --- Networks -----------------------------------------------------------------------------------


def mlp():
    ws = [variable(32, 32, seed=i) for i in range(4)]
    bias = variable(32, seed=9)

    def model(x):
        for w in ws:
            # The bias is used more than twice, so that its gradient is a sum of many.
            x = tf.tanh(x @ w + bias) * 1.5 + tf.nn.relu(x) * bias
        return tf.reduce_sum(x * x)

    return model, [*ws, bias], [[None, 32]], [(64, 32)], lambda n: [data(n, 32)]


def convolutions():
    k1, k2, gamma, beta = variable(3, 3, 3, 8), variable(3, 3, 8, 8), variable(8), variable(8)
    bias = variable(8, seed=3)

    def model(x):
        y = tf.nn.bias_add(tf.nn.conv2d(x, k1, 1, "SAME"), bias)
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(y, gamma, beta, is_training=True)
        y = tf.nn.max_pool2d(tf.nn.relu(y), 2, 2, "SAME")
        y = y + tf.nn.relu(
            tf.nn.conv2d(tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]), k2, 1, "VALID")
        )
        return tf.reduce_mean(tf.reduce_mean(y, [1, 2]) ** 2)

    xs = [k1, k2, gamma, beta, bias]
    return model, xs, [[None, 12, 12, 3]], [(8, 12, 12, 3)], lambda n: [data(n, 12, 12, 3)]


def attention():
    wq, wk, wv = (variable(32, 32, seed=i) for i in range(3))

    def heads(x, w):
        batch, length = tf.shape(x)[0], tf.shape(x)[1]
        y = tf.reshape(tf.reshape(x, [-1, 32]) @ w, [batch, length, 4, 8])
        return tf.transpose(y, [0, 2, 1, 3])

    def model(x):
        q, k, v = heads(x, wq), heads(x, wk), heads(x, wv)
        a = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 3.0)
        y = tf.reshape(tf.transpose(tf.matmul(a, v), [0, 2, 1, 3]), tf.shape(x))
        first, rest = y[:, :1], y[:, 1:]
        z = tf.concat([first, rest * 2.0], 1)
        z += tf.tile(tf.reduce_mean(z, 1, keepdims=True), [1, tf.shape(x)[1], 1])
        return tf.reduce_sum(tf.square(z), [1, 2])

    return (
        model,
        [wq, wk, wv],
        [[None, None, 32]],
        [(6, 10, 32)],
        lambda n: [data(n, 3 + n % 7, 32)],
    )


def embedding():
    table, w = variable(50, 32), variable(32, 32)

    def model(tokens):
        x = tf.gather(table, tokens)
        x = tf.tanh(tf.reshape(x, [-1, 32]) @ w)
        return tf.reduce_mean(tf.square(tf.reshape(x, [tf.shape(tokens)[0], -1])))

    tokens = tf.constant(np.random.default_rng(0).integers(0, 50, (100, 12)), tf.int32)
    return model, [table, w], [([None, 12], tf.int32)], [(40, 12)], lambda n: [tokens[:n]]


def branches():
    ws = [variable(32, 32, seed=i) for i in range(3)]

    @tf.function(autograph=False)
    def inner(x, w):
        return tf.tanh(x @ w) * x

    def model(x, flag):
        x = inner(x, ws[0])
        # The same function at another size.
        y = inner(tf.concat([x, x], 0), ws[1])
        z = tf.cond(flag > 0, lambda: tf.nn.relu(y @ ws[2]), lambda: tf.nn.sigmoid(y))
        return tf.reduce_sum(z * y)

    return (
        model,
        ws,
        [[None, 32], ([], tf.int32)],
        [(48, 32), ()],
        lambda n: [data(n, 32), tf.constant(n % 2)],
    )


def recurrent():
    model = keras.Sequential(
        [
            keras.layers.Input((5, 16)),
            keras.layers.LSTM(16, return_sequences=True),
            keras.layers.GRU(8, go_backwards=True),
            keras.layers.Dense(4),
        ]
    )
    xs = [v.value for v in model.trainable_variables]
    return (
        lambda x: tf.reduce_mean(tf.square(model(x, training=True))),
        xs,
        [[None, 5, 16]],
        [(24, 5, 16)],
        lambda n: [data(n, 5, 16)],
    )


def slices():
    w = variable(16, 64)

    def model(x):
        h = x @ w
        a, b = tf.split(h, 2, 0)
        c = tf.unstack(tf.reshape(h, [2, -1, 64]))
        d = tf.transpose(tf.reshape(h, [-1, 1, 64]), [1, 0, 2])
        e = tf.broadcast_to(tf.reduce_sum(h, 0, keepdims=True), tf.shape(h))
        f = h[: tf.shape(h)[0] // 2] * 2.0 + h[tf.shape(h)[0] // 2 :]
        g = tf.squeeze(tf.expand_dims(h, 1)[:, 0:1], 1)
        return tf.reduce_sum((a + b) * tf.tanh(c[0] - c[1]) * f) + tf.reduce_sum(
            tf.tanh(d[0] * e) * g
        )

    return model, [w], [[None, 16]], [(32, 16)], lambda n: [data(2 * n, 16)]


NETWORKS = [mlp, convolutions, attention, embedding, branches, recurrent, slices]
SIZES = (1, 5, 40)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
def test_same_bits_at_every_size(network):
    model, xs, specs, shapes, batch = network()
    schedulers = (again, random_schedule(3, 0.5))
    traced = Traced(model, xs, specs, shapes, schedulers, chain_from=256, count_from=0)
    for n in SIZES:
        traced.assert_identical(*batch(n))


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
def test_same_bits_in_another_order_planned_for_one(network):
    """At a batch of one most sums over a batch are views, and at others they are not."""
    model, xs, specs, shapes, batch = network()
    one = [(2 if network is slices else 1, *s[1:]) if s else s for s in shapes]
    traced = Traced(model, xs, specs, one, (random_order(1),), chain_from=1, count_from=0)
    for n in SIZES:
        traced.assert_identical(*batch(n))


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
def test_as_large_as_if_traced_for_the_size(network):
    model, xs, specs, shapes, _ = network()
    traced = Traced(model, xs, specs, shapes, chain_from=256, count_from=0)
    # Where it knows the shapes, differentiation makes constants of some of what it needs.
    mine, other = (base_peak(c) - c.graph.resident for c in (traced.capture, traced.static))
    assert 0.95 * other <= mine <= 1.05 * other + sum(traced.static.folded)


def test_the_capture_is_of_the_graph_itself():
    model, xs, specs, shapes, _ = mlp()
    found = Traced(model, xs, specs, shapes, chain_from=256).capture
    graph = found.tf_graph
    assert found.sized is not None
    assert found.sized.tf_graph is not graph
    for op in (*found.members, *(op for unit in found.units for op in unit)):
        assert op.graph is graph
    for t in (*found.tensors, *found.outputs):
        assert t.graph is graph
    known = {id(t) for op in graph.get_operations() for t in op.outputs}
    assert set(found.views) <= known
    for _, chain in found.views.values():
        assert all(op.graph is graph for op, _, _ in chain)
    assert found.tensors[0].shape.as_list() == [None, 32]
    assert found.sized.tensors[0].shape.as_list() == [64, 32]
    assert [t.name for t in found.tensors] == [t.name for t in found.sized.tensors]


def test_clones_keep_unknown_shapes():
    model, xs, specs, shapes, _ = mlp()
    traced = Traced(model, xs, specs, shapes, (again,), chain_from=256)
    clones = [op for op in traced.graph.get_operations() if op.name.startswith("optckpt/")]
    assert clones
    shapes = [t.shape.as_list() for op in clones if op.type == "Tanh" for t in op.outputs]
    assert shapes
    assert all(shape == [None, 32] for shape in shapes)


def test_shapes_of_a_copy_are_those_of_a_trace_with_sizes():
    for network in NETWORKS:
        check_shapes(network)


def check_shapes(network):
    model, xs, specs, shapes, _ = network()
    specs = [tf.TensorSpec(*s) if isinstance(s, tuple) else tf.TensorSpec(s) for s in specs]
    found = []

    def step(*args):
        loss = model(*args)
        tf.gradients(loss, list(xs))
        graph = tf.compat.v1.get_default_graph()
        at = {id(t): tf.TensorShape(s) for t, s in zip(args, shapes, strict=True)}
        copied = shadow(graph, at)
        found.append(copied)
        for op, copy in copied.copies.items():
            assert (copy.type, copy.device) == (op.type, op.device)
            assert [p.name for p in copy.control_inputs] == [p.name for p in op.control_inputs]
            # What depends on the data does so in the copy.
            if op.type in ("BroadcastGradientArgs", "FusedBatchNormV3", "ZerosLike"):
                continue
            for t in copy.outputs:
                if not tf_ops.is_opaque(t.dtype):
                    assert t.shape.is_fully_defined(), (network.__name__, op.type, t)
        return loss

    tf.function(step, autograph=False, input_signature=specs).get_concrete_function()
    (copied,) = found
    numbers = [copy._id for copy in copied.copies.values() if copy.inputs]
    calls = any(tf_ops.is_call(op) for op in copied.copies)
    assert calls or numbers == sorted(numbers)


def test_lists_in_loops_know_their_elements():
    w = variable(16, 16)

    def model(x):
        def body(i, h):
            return i + 1, tf.tanh(h @ w)

        return tf.reduce_sum(tf.while_loop(lambda i, h: i < 6, body, [0, x])[1])

    traced = Traced(model, [w], [[None, 16]], [(64, 16)], chain_from=256, count_from=0)
    found = traced.capture.graph
    # Each iteration leaves its activations in memory for the gradient.
    least = 6 * 64 * 16 * 4
    assert base_peak(traced.capture) - found.resident >= least
    assert base_peak(traced.capture) == pytest.approx(base_peak(traced.static), rel=0.12)
    for n in SIZES:
        traced.assert_identical(data(n, 16))


def test_shapes_that_do_not_go_together():
    w = variable(8, 8)

    def step(x, y):
        loss = tf.reduce_sum(tf.tanh(x @ w) * y)
        gradients = flat(tf.gradients(loss, [w]))
        at = {id(x): tf.TensorShape([16, 8]), id(y): tf.TensorShape([12, 8])}
        with pytest.raises(CaptureError, match=r"x \(16, 8\), y \(12, 8\).*do not go together"):
            capture(tf.compat.v1.get_default_graph(), [loss], gradients, shapes=at)
        return loss

    spec = tf.TensorSpec([None, 8])
    tf.function(step, autograph=False).get_concrete_function(spec, spec)


def test_shapes_set_by_hand_are_kept():
    w = variable(8, 8)

    def step(x):
        y = tf.reshape(tf.py_function(lambda t: t, [x], tf.float32), [-1, 8])
        y.set_shape([32, 8])
        h = tf.tanh(y @ w)
        copied = shadow(tf.compat.v1.get_default_graph(), {id(x): tf.TensorShape([32, 8])})
        assert copied.carried(h).shape.as_list() == [32, 8]
        assert copied.carried([h.op, (y,)]) == [copied.carried(h.op), (copied.carried(y),)]
        return h

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 8]))


def test_only_what_is_asked_for_is_copied():
    def step(x):
        a = tf.tanh(x)
        b = tf.exp(a)
        copied = shadow(b.graph, {id(x): tf.TensorShape([4])}, [a.op])
        assert set(copied.copies) == {x.op, a.op}
        assert copied.carried(a).shape.as_list() == [4]
        return b

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None]))


def test_v1_loops_and_reference_variables():
    batches = [data(n, 16, seed=n).numpy() for n in (1, 5, 100)]
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 16], "x")
        w = tf.compat.v1.get_variable("w", [16, 16], use_resource=False)
        tf.compat.v1.disable_control_flow_v2()
        try:
            h = tf.compat.v1.while_loop(
                lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h) * 1.5), [0, x]
            )[1]
        finally:
            tf.compat.v1.enable_control_flow_v2()
        h = tf.tanh(tf.tanh(h @ w) @ w)
        loss = tf.reduce_sum(h * h)
        plain = tf.gradients(loss, [w])
        gradients = tf.gradients(loss, [w], name="mine")
        at = {id(x): tf.TensorShape([64, 16])}
        found = capture(graph, [loss], gradients, shapes=at, chain_from=256, count_from=0)
        rewrite(found, again(found.graph))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for batch in batches:
                a, b = session.run([plain, gradients], {x: batch})
                np.testing.assert_array_equal(a[0], b[0])


def test_views_by_chance():
    """At the sizes of the copy all of these are views; at other sizes only some."""
    always = {
        "keep": lambda x: tf.transpose(x[:, None], [1, 0, 2]),
        "none": lambda x: tf.tile(x, [1, 1]),
        "unit": lambda x: tf.reduce_sum(tf.reshape(x, [-1, 1, 16]), 1),
        "whole": lambda x: tf.slice(x, [0, 0], [-1, 16]),
        "new": lambda x: x[:, tf.newaxis, ..., :],
        "rows": lambda x: x[0:1],
        "zeros": lambda x: tf.pad(x, [[0, 0], [0, 0]]),
    }
    chance = {
        "swap": lambda x: tf.transpose(x, [1, 0]),
        "often": lambda x: tf.tile(x, [tf.shape(x)[0], 1]),
        "sum": lambda x: tf.reduce_sum(x, 0),
        "first": lambda x: x[:, : 16 * tf.shape(x)[0]],
        "wide": lambda x: tf.broadcast_to(x, [tf.shape(x)[0], 16]),
        "pad": lambda x: tf.pad(x, [[0, 1 - tf.shape(x)[0]], [0, 0]]),
    }

    def step(x):
        for expected, makers in ((False, always), (True, chance)):
            for name, make in makers.items():
                out = make(x)
                copied = shadow(out.graph, {id(x): tf.TensorShape([1, 16])})
                op = out.op
                copy = copied.carried(op)
                assert is_view_by_chance(op, copy) is False or expected, name
                assert (not tf_ops.views(copy)) is expected, name
        return x

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([None, 16]))


def test_graphs_that_cannot_be_copied(caplog):
    """What is unknown may be small, so that such a graph can be captured nevertheless."""

    @function.Defun(tf.float32)
    def by_name(x):
        return tf.tanh(x)

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], "x")
        w = tf.compat.v1.get_variable("w", [64, 64], use_resource=False)
        y = by_name(tf.ones([4]))
        y.set_shape([4])
        total = tf.reduce_sum(x) + tf.reduce_sum(y)
        loss = tf.reduce_sum(tf.tanh(w @ w)) * tf.stop_gradient(total)
        assert shadow(graph, {id(x): tf.TensorShape([3, 4])}) is None
        assert "cannot be copied" in caplog.text
        at = {id(x): tf.TensorShape([3, 4])}
        assert capture(graph, [loss], tf.gradients(loss, [w]), shapes=at).sized is None
