from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from costs_support import STEP, capture_ops, capture_units, f32, measure, trace, training_step

from optckpt.costs import Cost, CostCache
from optckpt.costs.constants import Folder
from optckpt.costs.execute import CHAIN, Runner, eager_scope, run_operation
from optckpt.costs.flops import FREE
from optckpt.costs.inputs import Argument, UnmeasurableError, argument, synthesise
from optckpt.costs.signature import environment, make_program

CPU = "/device:CPU:0"


@pytest.fixture
def cache(tmp_path):
    cache = CostCache(tmp_path)
    yield cache
    cache.close()


@pytest.fixture
def tracked_memory():
    held = tf.random.stateless_normal([1 << 20], [1, 1])
    if not tf.config.experimental.get_memory_info("CPU:0")["current"]:
        pytest.skip("this TensorFlow keeps no statistics of the CPU allocator")
    del held


def seconds_of(capture, kind, **options):
    return measure(capture, **options).operations[capture.index(kind)].seconds


def messages(caplog, level=logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def signature_of(*ops) -> str:
    with eager_scope():
        return make_program(ops, Folder(run_operation)).signature(environment(CPU))


def only(ops, kind):
    (found,) = [op for op in ops if op.type == kind]
    return found


# What comes out


def test_all_of_a_training_step_is_measured(caplog):
    caplog.set_level(logging.DEBUG, logger="optckpt")
    capture = capture_ops(trace(training_step, *STEP))
    graph = measure(capture)
    assert graph.fingerprint == capture.graph.fingerprint
    for op in graph.operations:
        assert (op.seconds == 0.0) if op.kind in FREE else (0.0 < op.seconds < 1.0), op
    (line,) = [m for m in messages(caplog, logging.INFO)]
    assert " 0 from the cache, 0 operations estimated" in line


def test_more_work_takes_longer():
    def step(a, b):
        return tf.matmul(a, a), tf.matmul(b, b), tf.tanh(a), tf.tanh(b)

    ops = trace(step, f32(64, 64), f32(1024, 1024))
    graph = measure(capture_ops(ops))
    by_kind: dict[str, list[float]] = {}
    for op in graph.operations:
        by_kind.setdefault(op.kind, []).append(op.seconds)
    small, large = by_kind["MatMul"]  # 4096 times the work
    assert large > 10 * small
    small, large = by_kind["Tanh"]  # 256 times the work
    assert large > 5 * small


def test_dispatch_overhead_is_taken_off():
    class Trivial(Runner):
        def _overhead(self, function):
            return 1e3

    program = make_program([only(trace(tf.nn.relu, f32(8)), "Relu")], Folder())
    with eager_scope():
        assert Trivial(CPU).measure(program).seconds == 0.0
        runner = Runner(CPU)
        assert 0.0 < runner._overhead(False) < 0.01


def test_workspace_is_the_peak_beyond_inputs_and_outputs(tracked_memory):
    capture = capture_ops(trace(lambda x: tf.reduce_sum(tf.tanh(x), [0, 2]), f32(64, 32, 32, 16)))
    graph = measure(capture)
    spaces = {op.kind: op.workspace for op in graph.operations}
    assert spaces["Tanh"] == 0
    # A sum over axes that are apart is taken over a transposed copy, in a chunk of free memory that
    # is split only if it is twice as large.
    copy = 64 * 32 * 32 * 16 * 4
    assert copy <= spaces["Sum"] < 2 * copy


# Signatures


def test_equal_operations_are_measured_once(cache):
    def step(x):
        for _ in range(5):
            x = tf.tanh(x)
        return tf.sigmoid(x)

    capture = capture_ops(trace(step, f32(100, 100)))
    measure(capture, cache=cache)
    kinds = [json.loads(s[0])["calls"][0]["op"] for s in
             cache._execute("SELECT signature FROM costs", ())]  # fmt: skip
    assert sorted(kinds) == ["Sigmoid", "Tanh"]


def test_second_time_nothing_is_measured(cache, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="optckpt")
    first = measure(capture_ops(trace(training_step, *STEP)), cache=cache)

    def fail(self, program):
        raise AssertionError("measured again")

    monkeypatch.setattr(Runner, "measure", fail)
    again = measure(capture_ops(trace(training_step, *STEP)), cache=CostCache(cache.path.parent))
    assert [op.seconds for op in again.operations] == [op.seconds for op in first.operations]
    assert " 0 signatures measured" in messages(caplog, logging.INFO)[-1]


def test_signature_has_what_decides_the_cost():
    def product(a, b, transpose=False):
        return tf.matmul(a, b, transpose_b=transpose)

    def of(function, *args):
        return signature_of(only(trace(function, *args), "MatMul"))

    base = of(product, f32(4, 4), f32(4, 4))
    assert base == of(lambda b, a: tf.matmul(a, b, name="other"), f32(4, 4), f32(4, 4))
    half = tf.TensorSpec([4, 4], tf.float16)
    others = [
        of(product, f32(8, 4), f32(4, 4)),
        of(product, half, half),
        of(lambda a, b: product(a, b, transpose=True), f32(4, 4), f32(4, 4)),
    ]
    assert len({base, *others}) == 4
    data = json.loads(base)
    assert data["environment"]["device"] == "CPU"
    assert data["environment"]["tensorflow"] == tf.__version__
    assert data["environment"]["threads"] >= 1
    assert data["calls"][0]["inputs"] == [["float32", [4, 4], "normal"]] * 2


def test_axes_are_part_of_the_signature_and_data_are_not():
    def total(axis):
        return signature_of(only(trace(lambda x: tf.reduce_sum(x, axis), f32(8, 8)), "Sum"))

    assert total(0) != total(1)
    assert total(0) == total([0]) or "[0]" in total([0])

    def scaled(factor):
        return signature_of(only(trace(lambda x: x * factor, f32(8, 8)), "Mul"))

    assert scaled(2.0) == scaled(3.0)


# Inputs


def test_synthetic_inputs():
    normal = synthesise(Argument("float32", (300, 400), "normal"))
    assert normal.shape == (300, 400)
    assert normal.dtype == np.float32
    assert abs(normal.mean()) < 0.05
    assert 0.9 < normal.std() < 1.1
    assert synthesise(Argument("float32", (1000,), "positive")).min() >= 0.5
    index = synthesise(Argument("int64", (5000,), "index", 7))
    assert set(index.tolist()) == set(range(7))
    assert index.dtype == np.int64
    mask = synthesise(Argument("bool", (1000,), "mask"))
    assert 0.4 < mask.mean() < 0.6
    assert synthesise(Argument("bfloat16", (3, 0), "normal")).shape == (3, 0)
    assert synthesise(Argument("complex64", (), "normal")).shape == ()


def test_indices_are_in_range_and_constants_are_real():
    def step(table, ids, labels, data):
        return (
            tf.gather(table, ids, axis=1),
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.tanh(table)),
            tf.math.unsorted_segment_sum(data, ids, 11),
            tf.one_hot(ids, 13),
            tf.transpose(table, [1, 0]),
        )

    ids = tf.TensorSpec([20], tf.int32)
    ops = trace(step, f32(6, 9), ids, tf.TensorSpec([6], tf.int64), f32(20, 3))
    with eager_scope():
        folder = Folder(run_operation)

        def arg(kind, index):
            return argument(only(ops, kind), index, folder)

        assert arg("GatherV2", 1).bound == 9
        assert arg("SparseSoftmaxCrossEntropyWithLogits", 1).bound == 9
        assert arg("UnsortedSegmentSum", 1).bound == 11
        assert arg("OneHot", 0).bound == 13
        assert synthesise(arg("Transpose", 1)).tolist() == [1, 0]
    capture = capture_ops(ops)
    assert all(op.seconds > 0 for op in measure(capture).operations if op.kind not in FREE)


def test_embedding_from_a_variable_is_measured_as_a_gather(cache):
    table = tf.Variable(tf.zeros([50, 8]))
    ops = trace(lambda ids: tf.gather(table, ids), tf.TensorSpec([30], tf.int32))
    measure(capture_ops(ops), cache=cache)
    ((text,),) = cache._execute("SELECT signature FROM costs", ())
    call = json.loads(text)["calls"][0]
    assert call["op"] == "GatherV2"
    assert call["inputs"][:2] == [["float32", [50, 8], "normal"], ["int32", [30], "index", 50]]


def test_shapes_known_only_at_run_time_are_seen_by_running(caplog):
    caplog.set_level(logging.INFO, logger="optckpt")

    def step(x, scale):
        y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale)
        return tf.gradients(y, x)

    ops = trace(step, f32(8, 8, 8, 16), f32(16))
    assert only(ops, "FusedBatchNormGradV3").inputs[5].shape.rank is None
    assert seconds_of(capture_ops(ops), "FusedBatchNormGradV3") > 0
    assert " 0 operations estimated" in messages(caplog, logging.INFO)[-1]


# What cannot be measured alone


def test_stateful_and_resource_operations_are_estimated(caplog):
    caplog.set_level(logging.DEBUG, logger="optckpt.costs")
    variable = tf.Variable(tf.zeros([256, 256]))

    def step(x):
        variable.assign_add(x)
        return tf.random.uniform([256, 256]) + variable

    capture = capture_ops(trace(step, f32(256, 256)))
    graph = measure(capture)
    seconds = {op.kind: op.seconds for op in graph.operations}
    assert seconds["ReadVariableOp"] == 0.0
    assert 0 < seconds["RandomUniform"] < 0.1
    assert 0 < seconds["AssignAddVariableOp"] < 0.1
    text = "\n".join(messages(caplog, logging.DEBUG))
    assert "(RandomUniform) cannot be measured alone: it is stateful" in text
    assert "(AssignAddVariableOp) estimated" in text
    assert not messages(caplog)


def test_failing_operation_is_estimated_with_one_warning(caplog):
    def step(a, b, x):
        return tf.math.invert_permutation(a), tf.math.invert_permutation(b), tf.nn.relu(x)

    ints = [tf.TensorSpec([n], tf.int32) for n in (16, 24)]
    capture = capture_ops(trace(step, *ints, f32(8)))
    graph = measure(capture)
    assert all(op.seconds > 0 for op in graph.operations if op.kind not in FREE)
    assert len(messages(caplog)) == 1
    assert "InvertPermutation" in messages(caplog)[0]


def test_operation_too_large_for_this_machine_is_estimated_with_a_warning(caplog, cache):
    def step(a, b, c):
        return a + b, tf.nn.relu(c)

    ops = trace(step, f32(1 << 21, 1), f32(1, 1 << 21), f32(1 << 26, 1 << 20))
    graph = measure(capture_ops(ops), cache=cache)
    seconds = {op.kind: op.seconds for op in graph.operations}
    assert seconds["AddV2"] > 10.0
    assert seconds["Relu"] > 100.0
    assert len(messages(caplog)) == 2
    # Another day there may be more memory.
    stored = " ".join(s for (s,) in cache._execute("SELECT signature FROM costs", ()))
    assert "Relu" not in stored


_LIMITED = """
import logging, sys
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=logging.WARNING)
from costs_support import capture_ops, f32, trace
import tensorflow as tf
from optckpt.costs import cost
ops = trace(lambda a, b: (a + b, tf.nn.relu(a)), f32(8192, 1), f32(1, 8192))
graph = cost(capture_ops(ops), cache=None)
named = {op.kind: op.seconds for op in graph.operations}
assert named["AddV2"] > 0.001 and named["Relu"] > 0
"""


def test_operation_that_exhausts_the_device_is_estimated_with_a_warning(request):
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(request.path.parent)],
        env={**os.environ, "TF_MKL_ALLOC_MAX_BYTES": str(100 << 20)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if run.returncode < 0:
        pytest.skip("this TensorFlow dies of an exhausted CPU allocator")
    assert run.returncode == 0, run.stderr
    warnings = [line for line in run.stderr.splitlines() if line.startswith("WARNING:optckpt")]
    assert len(warnings) == 1
    assert "AddV2" in warnings[0]
    assert "OOM" in warnings[0]


def test_unexpected_output_shape_is_not_trusted(caplog):
    caplog.set_level(logging.DEBUG, logger="optckpt.costs")

    def step(x, dims):
        return tf.ensure_shape(tf.broadcast_to(x, dims), [64, 64]), tf.reshape(x, [64])

    ops = trace(step, f32(64), tf.TensorSpec([2], tf.int32))
    broadcast = only(ops, "BroadcastTo")
    broadcast.outputs[0].set_shape([64, 64])
    assert seconds_of(capture_ops(ops), "BroadcastTo") > 0
    assert "(BroadcastTo) estimated" in "\n".join(messages(caplog, logging.DEBUG))


def test_unknown_shape_of_an_argument_is_estimated():
    ops = trace(lambda x: tf.tanh(x), tf.TensorSpec([None, 8], tf.float32))
    with pytest.raises(UnmeasurableError, match="shape of input 0"):
        make_program([only(ops, "Tanh")], Folder())
    capture = capture_ops(ops)
    assert seconds_of(capture, "Tanh") > 0


def test_loops_cost_their_bodies_times_their_iterations():
    def loop(n):
        def run(x):
            return tf.while_loop(
                lambda i, x: i < n,
                lambda i, x: (i + 1, tf.matmul(x, x)),
                [0, x],
                maximum_iterations=n,
            )[1]

        capture = capture_ops(trace(run, f32(256, 256)))
        kind = next(op.kind for op in capture.graph.operations if "While" in op.kind)
        return capture, kind

    short, kind = loop(2)
    long, _ = loop(40)
    few = seconds_of(short, kind)
    many = seconds_of(long, kind)
    assert many > 4 * few > 0


def test_branches_and_calls_are_put_together_from_their_bodies():
    @tf.function
    def inner(x):
        return tf.tanh(tf.matmul(x, x))

    def step(x):
        return inner(tf.cond(x[0, 0] > 0, lambda: tf.matmul(x, x), lambda: x + 1.0))

    capture = capture_ops(trace(step, f32(256, 256)))
    graph = measure(capture)
    named = {op.kind: op for op in graph.operations}
    branch = named.get("StatelessIf") or named["If"]
    call = named.get("PartitionedCall") or named["StatefulPartitionedCall"]
    assert branch.seconds > 0
    assert call.seconds > 0
    # The product inside the call becomes its output in place.
    assert call.workspace == 0


def test_operation_on_a_device_that_is_not_here_is_measured_on_the_captured_one():
    def step(x):
        with tf.device("/device:GPU:7"):
            return tf.tanh(x)

    capture = capture_ops(trace(step, f32(32, 32)))
    assert seconds_of(capture, "Tanh") > 0


# Units


def test_unit_is_measured_as_a_whole(cache):
    def layer(x, w, b):
        y = tf.nn.bias_add(tf.nn.conv2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), w, 1,
                                        "VALID"), b)  # fmt: skip
        return y, tf.gradients(y, [w, b])

    ops = trace(layer, f32(8, 16, 16, 8), f32(3, 3, 8, 8), f32(8))
    forward = [op for op in ops if op.type in ("Pad", "Conv2D", "BiasAdd")]
    backward = [op for op in ops if op.type in ("BiasAddGrad", "Conv2DBackpropFilter")]
    capture = capture_units([forward, backward])
    graph = measure(capture, cache=cache)
    assert all(op.seconds > 0 for op in graph.operations)
    stored = [json.loads(s) for (s,) in cache._execute("SELECT signature FROM costs", ())]
    assert sorted("+".join(c["op"] for c in s["calls"]) for s in stored) == sorted(
        ["+".join(op.type for op in forward), "+".join(op.type for op in backward)]
    )
    (whole,) = [s for s in stored if len(s["calls"]) == 3]
    # The gradient of the filter reads the padded image too.
    assert whole["results"] == [[0, 0], [2, 0]]
    assert whole["calls"][1]["inputs"][0] == ["link", 0, 0]


def test_unit_that_fails_as_a_whole_is_the_sum_of_its_members(monkeypatch):
    def step(x):
        return tf.tanh(tf.matmul(tf.sigmoid(x), x))

    ops = [op for op in trace(step, f32(64, 64))
           if op.type in ("Sigmoid", "MatMul", "Tanh")]  # fmt: skip

    def fake(self, program):
        if len(program.calls) > 1:
            raise tf.errors.InternalError(None, None, "no")
        return {"Sigmoid": Cost(1.0, 0), "MatMul": Cost(2.0, 100), "Tanh": Cost(4.0, 7)}[
            program.name
        ]

    monkeypatch.setattr(Runner, "measure", fake)
    (unit,) = measure(capture_units([ops])).operations
    assert unit.seconds == 7.0
    # Sigmoid's and MatMul's results are inside, and MatMul needs 100 bytes beside them.
    assert unit.workspace == 2 * 64 * 64 * 4 + 100


def test_views_inside_a_call_keep_what_they_are_views_of(monkeypatch):
    @tf.function
    def inner(x):
        flat = tf.reshape(tf.sigmoid(x), [-1])
        other = tf.nn.relu(tf.exp(x))
        return tf.reshape(other, [-1]) * flat

    def fake(self, program):
        return Cost(1.0, 0)

    monkeypatch.setattr(Runner, "measure", fake)
    capture = capture_ops(trace(lambda x: inner(x), f32(10, 10)))
    (call,) = [op for op in measure(capture).operations if "PartitionedCall" in op.kind]
    assert call.seconds == 4.0
    # While exp runs: what sigmoid has made (through its view). Relu and the product are in place.
    assert call.workspace == 400


# In place


def fake_chain(each):
    def fake(self, program):
        plain = 0.010
        return Cost(plain + (CHAIN - 1) * each if program.chain is not None else plain, 64)

    return fake


@pytest.mark.parametrize(("each", "expected"), [(0.007, 0.007), (0.020, 0.010), (0.0001, 0.004)])
def test_operation_whose_input_dies_is_charged_in_place(monkeypatch, each, expected):
    ops = trace(lambda x: tf.tanh(tf.sigmoid(x)), f32(64))
    monkeypatch.setattr(Runner, "measure", fake_chain(each))
    capture = capture_ops([op for op in ops if op.type in ("Sigmoid", "Tanh")],
                          in_place=["Tanh"])  # fmt: skip
    graph = measure(capture)
    assert graph.operations[0].seconds == 0.010
    assert graph.operations[1].seconds == pytest.approx(expected)


def test_operation_whose_input_lives_on_is_charged_in_full(monkeypatch):
    def step(x):
        s = tf.sigmoid(x)
        return tf.tanh(s), tf.nn.relu(s)

    ops = [op for op in trace(step, f32(64)) if op.type in ("Sigmoid", "Tanh", "Relu")]
    monkeypatch.setattr(Runner, "measure", fake_chain(0.007))
    graph = measure(capture_ops(ops, in_place=["Tanh", "Relu"]))
    assert [op.seconds for op in graph.operations] == pytest.approx([0.010, 0.010, 0.007])
    kept = capture_ops(ops, in_place=["Tanh", "Relu"], outputs=[ops[0].outputs[0]])
    assert [op.seconds for op in measure(kept).operations] == [0.010] * 3


def test_chain_works_in_place_where_the_operation_can(tracked_memory):
    def step(x):
        return tf.tanh(x), tf.transpose(x)

    n = 1024
    ops = trace(step, f32(n, n))
    with eager_scope():
        folder, runner = Folder(run_operation), Runner(CPU)
        spaces = {
            kind: runner.measure(
                replace(make_program([only(ops, kind)], folder), chain=0)
            ).workspace
            for kind in ("Tanh", "Transpose")
        }
    # A chain that is not in place holds an input and an output at a time.
    assert spaces["Tanh"] < 4 * n * n <= spaces["Transpose"]


def test_costs_are_finite_and_add_up():
    graph = measure(capture_ops(trace(training_step, *STEP)))
    assert math.isfinite(graph.seconds)
    assert graph.seconds > 0
