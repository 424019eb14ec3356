"""Sizes of inputs that a graph does not know: where they come from, and budgets kept at them."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fresh_process import PeakError
from tf_support import counted, grappler_off

import optckpt
from optckpt import sizes
from optckpt.config import Config, load_config, parse_config
from optckpt.errors import CaptureError, ConfigError

DIM = 64


def variables(n: int = 6, dim: int = DIM) -> list[tf.Variable]:
    rng = np.random.default_rng(0)
    return [tf.Variable((rng.normal(size=(dim, dim)) / 8).astype(np.float32)) for _ in range(n)]


def data(n: int, dim: int = DIM) -> tf.Tensor:
    numbers = np.random.default_rng(n).normal(size=(n, dim)).astype(np.float32)
    return counted(numbers)


def config(**more: Any) -> Config:
    return parse_config({"costs": {"model": "flops"}, "plans": {"cache": False}, **more})


@pytest.fixture
def planned(caplog):
    """What is logged of the sizes that functions are planned at."""
    caplog.set_level(logging.INFO, logger="optckpt.sizes")

    def found() -> list[str]:
        texts = [r.getMessage() for r in caplog.records if r.name == "optckpt.sizes"]
        caplog.clear()
        return texts

    return found


class Shapes:
    """Finds the sizes of a graph's inputs when it is traced, without planning anything."""

    def __init__(self, settings: Config | None = None) -> None:
        self.settings = settings or config()
        self.found: list[dict[str, list[int | None]]] = []

    def look(self, tensor: tf.Tensor) -> None:
        graph = tensor.graph
        by_id = {id(t): t for op in graph.get_operations() for t in op.outputs}
        shapes = sizes.of_inputs(graph, self.settings)
        self.found.append({by_id[k].name: shape.as_list() for k, shape in shapes.items()})

    @property
    def values(self) -> list[list[int | None]]:
        """The shapes found when the latest function was traced."""
        return list(self.found[-1].values())


# --- Where sizes come from ------------------------------------------------------------------------


def test_arguments_of_the_call():
    seen = Shapes()

    @tf.function(input_signature=[{"b": tf.TensorSpec([None, 3]), "a": tf.TensorSpec([None])}])
    def step(batch):
        seen.look(batch["a"])
        return batch["a"]

    step({"a": tf.ones([5]), "b": tf.ones([7, 3])})
    assert seen.found == [{"batch:0": [7, 3], "batch_1:0": [5]}]


def test_keyword_arguments_and_numpy_arrays():
    seen = Shapes()

    @tf.function(reduce_retracing=True)
    def step(x, *, scale, y):
        seen.look(x)
        return x * scale + y

    step(np.ones([4, 2]), scale=2.0, y=np.ones([4, 2]))
    assert seen.found == [{}]
    step(np.ones([3, 2]), scale=2.0, y=np.ones([3, 2]))
    # The largest that has been seen.
    assert seen.values == [[4, 2], [4, 2]]
    step(np.ones([9, 2]), scale=2.0, y=np.ones([9, 2]))
    assert len(seen.found) == 2


def test_the_largest_size_seen():
    seen = Shapes()

    @tf.function(reduce_retracing=True)
    def step(x):
        seen.look(x)
        return x

    step(tf.ones([64, 2]))
    step(tf.ones([37, 2]))
    assert seen.values == [[64, 2]]

    @tf.function(reduce_retracing=True)
    def other(x):
        seen.look(x)
        return x

    other(tf.ones([37, 2]))
    other(tf.ones([64, 2]))
    assert seen.values == [[64, 2]]


def test_specifications_have_no_sizes():
    seen = Shapes()

    @tf.function
    def step(x):
        seen.look(x)
        return x

    step.get_concrete_function(tf.TensorSpec([None, 2]))
    assert seen.found == [{}]


def test_known_sizes_are_not_looked_for():
    seen = Shapes(config(sizes={"batch": 5}))

    @tf.function
    def step(x, name):
        seen.look(x)
        return x

    step(tf.ones([3, 2]), tf.constant(["a", "b"]))
    assert seen.found == [{}]


def test_configuration_comes_before_the_call():
    seen = Shapes(config(sizes={"batch": 16, "inputs": {"y": [None, 9]}}))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2]),
            tf.TensorSpec([None, None]),
            tf.TensorSpec([3, None]),
        ]
    )
    def step(x, y, z):
        seen.look(x)
        return x

    step(tf.ones([4, 2]), tf.ones([4, 6]), tf.ones([3, 8]))
    assert seen.values == [[16, 2], [16, 9], [3, 8]]


def test_context_comes_first():
    seen = Shapes(config(sizes={"batch": 16}))
    spec = tf.TensorSpec([None, None])

    @tf.function(input_signature=[spec, spec])
    def step(x, y):
        seen.look(x)
        return x

    with sizes.at(inputs={"x": [32, None]}):
        step(tf.ones([4, 2]), tf.ones([4, 6]))
    assert seen.values == [[32, 2], [16, 6]]

    @tf.function(input_signature=[spec, spec])
    def positional(x, y):
        seen.look(x)
        return x

    with sizes.at(inputs=[[8, 1], [9, 2]]), sizes.at(inputs=[[7, 3]]):
        positional.get_concrete_function()
    assert seen.values == [[7, 3], [9, 2]]


def test_contexts_end():
    with pytest.raises(RuntimeError), sizes.at([5, 2]):
        raise RuntimeError
    test_specifications_have_no_sizes()


@pytest.mark.parametrize(
    "element",
    [
        {"x": [32, 2], "y": [32]},
        {"x": tf.TensorSpec([32, 2]), "y": tf.TensorShape([32])},
        {"x": np.ones([32, 2]), "y": np.ones([32])},
        ([32, 2], [32]),
        [tf.TensorShape([32, 2]), (32,)],
    ],
)
def test_elements_of_a_data_set(element):
    seen = Shapes()
    values = {"x": np.ones([10, 2]), "y": np.ones([10])}
    batches = tf.data.Dataset.from_tensor_slices(values).batch(4)

    @tf.function
    def of_iterator(iterator):
        batch = next(iterator)
        seen.look(batch["x"])
        return batch["x"]

    @tf.function
    def of_batch(step, batch):
        seen.look(batch["x"])
        return batch["x"]

    @tf.function
    def of_loop(data):
        total = tf.constant(0.0, tf.float64)
        for batch in data:
            seen.look(batch["x"])
            total += tf.reduce_sum(batch["x"])
        return total

    spec = batches.element_spec
    with sizes.at(element):
        of_iterator(iter(batches))
        assert seen.values == [[32, 2], [32]]
        of_batch.get_concrete_function(tf.TensorSpec([], tf.int64), spec)
        assert seen.values == [[32, 2], [32]]
        of_loop(batches)
        assert seen.values == [[32, 2], [32]]


def test_elements_of_another_structure_are_no_sizes():
    seen = Shapes()

    @tf.function
    def step(x, y):
        seen.look(x)
        return x

    with sizes.at([32, 3]):
        step.get_concrete_function(tf.TensorSpec([None, 2]), tf.TensorSpec([None]))
    assert seen.found == [{}]


def test_functions_within_functions():
    seen = Shapes()
    outside = tf.function(lambda x: x * 2)

    @tf.function(reduce_retracing=True)
    def inner(x, flag):
        seen.look(x)
        return x

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def outer(x):
        y = outside(tf.concat([x, x], 1))
        total = tf.constant(0.0)
        for _ in tf.range(2):
            seen.look(y[:1] * 0 + total)
            total += tf.reduce_sum(y)
        return inner(tf.reshape(y, [-1, 2]), True) + total

    outer(tf.ones([3, 4]))
    # The body of the loop captures y; the argument of the function within is computed from it.
    assert seen.found[0] == {next(iter(seen.found[0])): [3, 8]}
    assert seen.values == [[12, 2]]


def test_iterator_around_a_function():
    seen = Shapes()
    batches = tf.data.Dataset.from_tensor_slices(np.ones([10, 2])).batch(4)
    inner = tf.function(lambda x: (seen.look(x), x)[1], reduce_retracing=True, autograph=False)

    @tf.function
    def outer(iterator):
        return inner(next(iterator))

    with sizes.at([4, 2]):
        outer(iter(batches))
    assert seen.values == [[4, 2]]


def test_replicas_of_a_strategy():
    seen = Shapes()
    devices = [d.name for d in tf.config.list_logical_devices("CPU")][:1] * 1
    strategy = tf.distribute.MirroredStrategy(devices)
    batches = tf.data.Dataset.from_tensor_slices(np.ones([10, 2])).batch(4)

    def replica(x):
        seen.look(x)
        return x

    @tf.function
    def step(iterator):
        return strategy.run(tf.autograph.experimental.do_not_convert(replica), (next(iterator),))

    with sizes.at([4, 2]):
        step(iter(strategy.experimental_distribute_dataset(batches)))
    assert seen.values == [[4, 2]]


def test_contexts_of_other_threads_do_not_count():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with sizes.at([99, 2]):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(30)
    try:
        test_specifications_have_no_sizes()
    finally:
        leave.set()
        thread.join()


def test_placeholders_of_a_v1_graph():
    seen = Shapes(config(sizes={"batch": 16, "inputs": {"y": [7]}}))
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2], "x")
        y = tf.compat.v1.placeholder(tf.float32, None, "y")
        seen.look(x + tf.reduce_sum(y))
    assert seen.found == [{"x:0": [16, 2], "y:0": [7]}]


# --- Mistakes -------------------------------------------------------------------------------------


def test_unknown_sizes_ask_for_a_declaration():
    ws = variables(2)

    @tf.function
    def step(x):
        return optckpt.gradients(tf.reduce_sum(tf.tanh(x @ ws[0]) @ ws[1]), ws, budget="90%")

    with pytest.raises(
        CaptureError, match=r"input 'x' has shape \(None, 64\).*declare the largest"
    ):
        step.get_concrete_function(tf.TensorSpec([None, DIM]))
    batches = tf.data.Dataset.from_tensor_slices(np.ones([10, DIM], np.float32)).batch(4)
    iterate = tf.function(lambda iterator: step(next(iterator)))
    with pytest.raises(CaptureError, match=r"optckpt.sizes.at"):
        iterate(iter(batches))


def test_declared_sizes_that_contradict_the_input():
    seen = Shapes(config(sizes={"inputs": {"x": [4, 5, 6]}}))

    @tf.function
    def step(x):
        seen.look(x)
        return x

    with pytest.raises(ConfigError, match=r"\(4, 5, 6\) of input 'x' has 3 dimensions.*has 2"):
        step.get_concrete_function(tf.TensorSpec([None, 2]))


def test_what_is_no_shape():
    with pytest.raises(ConfigError, match=r"inputs\['x'\] has 'wide' where a shape"):
        sizes.at(inputs={"x": "wide"}).__enter__()
    with pytest.raises(ConfigError, match=r"elements has 1\.5 where a shape"):
        sizes.at({"x": 1.5}).__enter__()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sizes: {batch: 0}", "sizes.batch: "),
        ("sizes: {batch: many}", "sizes.batch: expected a whole number"),
        ("sizes: {inputs: [1, 2]}", "sizes.inputs: expected names of inputs with a shape each"),
        ("sizes: {inputs: {x: 3}}", "sizes.inputs: the shape of 'x' is to be a list of sizes"),
        ("sizes: {inputs: {x: [3, -1]}}", r"sizes.inputs: .*got \[3, -1\]"),
        ("sizes: {bach: 3}", "sizes.bach: unknown key; did you mean 'batch'"),
    ],
)
def test_mistakes_in_the_configuration(tmp_path, text, message):
    path = tmp_path / "optckpt.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"optckpt.yaml:1: {message}"):
        load_config(path)


def test_sizes_in_a_file(tmp_path):
    path = tmp_path / "optckpt.yaml"
    path.write_text("sizes:\n  batch: 64\n  inputs:\n    x: [64, null, 3]\n")
    found = load_config(path).sizes
    assert (found.batch, found.inputs) == (64, {"x": (64, None, 3)})


def test_larger_than_declared(caplog):
    seen = Shapes(config(sizes={"batch": 4}))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        seen.look(x)
        return x

    step(tf.ones([4, 2]))
    assert not caplog.records
    tf.function(step.python_function, input_signature=step.input_signature)(tf.ones([5, 2]))
    assert "'x' has shape (5, 2)" in caplog.text
    assert "more than the declared (4, 2)" in caplog.text


# --- Budgets, measured by the allocator -----------------------------------------------------------

LARGE = 256
BATCH = 1536


def loss_of(x: tf.Tensor, y: tf.Tensor, ws: list[tf.Variable]) -> tf.Tensor:
    h = x
    for w in ws:
        h = tf.nn.relu(h @ w) + tf.tanh(h)
    return tf.reduce_mean(tf.square(h - y))


def peak_of(step: Any, n: int) -> int:
    """The least of some peaks of a step, in bytes."""
    x, y = data(n, LARGE), data(n, LARGE)
    step(x, y)
    peaks = []
    for _ in range(3):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(x, y)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    return min(peaks)


def tracked() -> bool:
    tf.config.experimental.reset_memory_stats("CPU:0")
    keep = tf.ones([1 << 20])
    return bool(tf.config.experimental.get_memory_info("CPU:0")["peak"]) and keep is not None


@pytest.mark.fresh_process
@pytest.mark.parametrize("way", ["signature", "reduce_retracing", "declared", "whole step"])
def test_budget_is_kept_at_the_size_seen_and_below(way):
    if not tracked():
        pytest.skip("this device does not count its memory")
    ws = variables(8, LARGE)
    signature = [tf.TensorSpec([None, LARGE])] * 2

    @tf.function(input_signature=signature)
    def plain(x, y):
        loss = loss_of(x, y, ws)
        return [loss, *tf.gradients(loss, ws)]

    plain_peak = peak_of(plain, BATCH)
    now = tf.config.experimental.get_memory_info("CPU:0")["current"]
    budget = now + (plain_peak - now) * 6 // 10
    plans = []
    settings = config(
        solver={"time_limit": 3},
        sizes={"batch": BATCH} if way == "declared" else {},
    )

    def budgeted(x, y):
        if way == "whole step":
            with optckpt.whole_step(budget, config=settings, on_plan=plans.append) as whole:
                loss = loss_of(x, y, ws)
                gradients = tf.gradients(loss, ws)
                whole.keep([loss, *gradients])
            return [loss, *gradients]
        loss = loss_of(x, y, ws)
        found = optckpt.gradients(loss, ws, budget=budget, config=settings, on_plan=plans.append)
        return [loss, *found]

    budgeted = tf.autograph.experimental.do_not_convert(budgeted)
    if way == "reduce_retracing":
        step = tf.function(budgeted, reduce_retracing=True)
        # The second call traces the function for all sizes; it is planned at those of the first.
        step(data(BATCH, LARGE), data(BATCH, LARGE))
        step(data(BATCH - 300, LARGE), data(BATCH - 300, LARGE))
    else:
        step = tf.function(budgeted, input_signature=signature)
        first = 100 if way == "declared" else BATCH
        step(data(first, LARGE), data(first, LARGE))
    # The size that was traced first has a function of its own.
    largest = BATCH - 1 if way == "reduce_retracing" else BATCH
    for n in (largest, BATCH - 300, 1):
        peak = peak_of(step, n)
        if peak > budget:
            raise PeakError(f"{n}: {peak}, {budget} allowed")
    with grappler_off():
        for n in (BATCH, 33):
            x, y = data(n, LARGE), data(n, LARGE)
            for a, b in zip(step(x, y), plain(x, y), strict=True):
                np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert len(plans) == (2 if way == "reduce_retracing" else 1)
    assert len(plans[-1].schedule) > len(set(plans[-1].schedule.executions))
    assert plans[-1].predicted_peak <= budget < plans[-1].plain_peak
