"""Recomputation that survives XLA, and budgets under jit_compile=True."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_support import assert_same, flat, normal, random_schedule, weight

import optckpt
from optckpt.backends.tensorflow import rewrite
from optckpt.backends.xla_figures import Compiled, XlaFigures, read_compiled
from optckpt.backends.xla_ties import _tie, _true_after, operand_to_tie, rewrite_for_xla
from optckpt.config import Config
from optckpt.errors import CaptureError, OverBudgetError
from optckpt.frontends import synthetic
from optckpt.frontends.tensorflow import Capture, capture
from optckpt.graph import TrainingGraph
from optckpt.planner import make_plan
from optckpt.schedule import Certificate, Plan, Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.recompute import always_kept, schedule_from_kept
from optckpt.solvers.registry import SolveOptions, solve

MIB = 1024 * 1024
FLOPS = Config.model_validate(
    {"costs": {"model": "flops"}, "solver": {"time_limit": 2.0}, "plans": {"cache": False}}
)

Model = tuple[Callable[..., tf.Tensor], list[tf.Variable], tuple[np.ndarray, ...]]


def mlp(depth: int = 8, width: int = 128, rows: int = 512) -> Model:
    ws = [weight(width, width, seed=i) for i in range(depth)]
    bs = [weight(width, seed=i) for i in range(depth)]

    def loss(x: tf.Tensor) -> tf.Tensor:
        for w, b in zip(ws, bs, strict=True):
            x = tf.tanh(x @ w + b)
        return tf.reduce_mean(tf.square(x))

    return loss, [*ws, *bs], (normal(rows, width),)


def resnet(channels: int = 16, blocks: int = 2) -> Model:
    ws = [weight(3, 3, channels, channels, seed=i) for i in range(2 * blocks)]
    scales = [tf.Variable(tf.ones([channels])) for _ in ws]
    offsets = [tf.Variable(tf.zeros([channels])) for _ in ws]

    def unit(x: tf.Tensor, i: int) -> tf.Tensor:
        y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scales[i], offsets[i])
        return tf.nn.conv2d(tf.nn.relu(y), ws[i], 1, "SAME")

    def loss(x: tf.Tensor) -> tf.Tensor:
        for i in range(0, len(ws), 2):
            x = x + unit(unit(x, i), i + 1)
        return tf.reduce_mean(tf.square(x))

    return loss, [*ws, *scales, *offsets], (normal(4, 32, 32, channels),)


def transformer(width: int = 128, blocks: int = 1) -> Model:
    table = weight(64, width, seed=99)
    ws = [weight(width, width, seed=i) for i in range(4 * blocks)]

    def loss(tokens: tf.Tensor) -> tf.Tensor:
        x = tf.nn.embedding_lookup(table, tokens)
        for i in range(0, len(ws), 4):
            q, k, v = (tf.tensordot(x, ws[i + j], 1) for j in range(3))
            shares = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * width**-0.5)
            shares = tf.nn.experimental.stateless_dropout(shares, 0.2, seed=[i, 7])
            mean, variance = tf.nn.moments(x, [-1], keepdims=True)
            x = x + tf.nn.gelu(
                tf.tensordot((shares @ v - mean) * tf.math.rsqrt(variance + 1e-5), ws[i + 3], 1)
            )
        return tf.reduce_mean(tf.square(x))

    tokens = np.random.RandomState(0).randint(0, 64, (4, 128)).astype("int32")
    return loss, [table, *ws], (tokens,)


class Step:
    """A step that XLA compiles, plain or along a schedule."""

    def __init__(
        self,
        model: Model,
        scheduler: Callable[[TrainingGraph], Schedule] | None = None,
        apply: Callable[..., Any] = rewrite_for_xla,
        predict: bool = True,
    ) -> None:
        loss, xs, self.inputs = model
        self.capture: Capture | None = None
        self.schedule: Schedule | None = None
        self.figures: Compiled | None = None

        def step(*args: tf.Tensor) -> list[tf.Tensor]:
            y = loss(*args)
            outputs = flat(tf.gradients(y, xs))
            if scheduler is not None:
                found = capture(tf.compat.v1.get_default_graph(), [y], outputs)
                self.schedule = scheduler(found.graph)
                if predict:
                    self.figures = XlaFigures(found, None).compiled(self.schedule)
                apply(found, self.schedule)
                self.capture = found
            return [y, *outputs]

        self.function = tf.function(step, autograph=False, jit_compile=True)

    def __call__(self) -> list[np.ndarray]:
        return [t.numpy() for t in self.function(*self.inputs)]

    def compiled(self) -> Compiled:
        inputs = [tf.constant(x) for x in self.inputs]
        return read_compiled(
            self.function.experimental_get_compiler_ir(*inputs)(
                stage="optimized_hlo_proto_serialized"
            )
        )

    def products_again(self) -> int:
        """How many matrix products and convolutions the schedule executes again."""
        assert self.capture is not None
        assert self.schedule is not None
        graph = self.capture.graph
        return sum(
            count - 1
            for count, op in zip(
                simulate(graph, self.schedule).counts, graph.operations, strict=True
            )
            if any(word in op.kind for word in ("MatMul", "Conv2D"))
        )


def square_root(graph: TrainingGraph) -> Schedule:
    solution = solve(graph.with_costs([1.0] * len(graph.operations)), None, "sqrt_n")
    assert solution.schedule is not None
    return solution.schedule


@pytest.mark.parametrize(
    ("model", "scheduler"),
    [
        (mlp, square_root),
        (mlp, random_schedule(3)),
        (resnet, square_root),
        (transformer, square_root),
    ],
)
def test_the_compiler_executes_again_what_the_schedule_does(
    model: Callable[[], Model], scheduler: Callable[[TrainingGraph], Schedule]
) -> None:
    network = model()
    plain, again = Step(network), Step(network, scheduler)
    for a, b in zip(plain(), again(), strict=True):
        # XLA fuses otherwise where a result has other readers; the last bits may follow.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(a).max())
    assert again.figures is not None
    assert again.products_again() > 0
    assert again.figures.products == plain.compiled().products + again.products_again()


def test_products_and_activations_give_the_same_bits_in_less_memory() -> None:
    network = mlp(depth=16)
    plain, again = Step(network), Step(network, square_root)
    assert_same(plain(), again())
    assert again.figures is not None
    assert again.figures.temporary < 0.7 * plain.compiled().temporary
    # What is predicted is what is compiled.
    assert again.figures == again.compiled()


def test_without_ties_xla_merges_what_is_executed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should this fail, ties are no longer needed."""
    monkeypatch.setattr("optckpt.backends.tensorflow.bar_xla", lambda *_: None)
    network = mlp()
    plain, again = Step(network), Step(network, square_root, rewrite, predict=False)
    plain()
    again()
    assert again.products_again() > 0
    assert again.compiled().products == plain.compiled().products


@pytest.mark.fresh_process
def test_the_allocator_reports_what_is_predicted() -> None:
    network = mlp(depth=12, width=256, rows=1024)
    plans: list[Plan] = []
    loss, xs, (x,) = network

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        y = loss(x)
        return [y, *optckpt.gradients(y, xs, budget="75%", config=FLOPS, on_plan=plans.append)]

    function = tf.function(step, jit_compile=True, autograph=False)
    x = tf.constant(x)
    for _ in range(2):
        function(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    result = function(x)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    plan = plans[0]
    assert len(plans) == 1
    assert plan.budget is not None
    assert 0 < peak <= plan.predicted_peak + MIB <= plan.budget + MIB
    assert plan.budget < plan.plain_peak
    assert plan.overhead > 0
    assert_same([t.numpy() for t in result], Step(network)())


class Wasteful:
    """A compiler that needs a fifth more than what is simulated, and notes what it compiles."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.asked: list[Schedule] = []

    def peak(self, graph: TrainingGraph, schedule: Schedule) -> int:
        self.asked.append(schedule)
        return simulate(graph, schedule).peak * 6 // 5


def keep_the_last(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """Keeps as many buffers as fit, the latest first."""
    for n in range(len(graph.buffers)):
        schedule = schedule_from_kept(graph, always_kept(graph) | set(range(n, len(graph.buffers))))
        result = simulate(graph, schedule)
        if budget is None or result.peak <= budget:
            break
    status = "feasible" if budget is None or result.peak <= budget else "over-budget"
    return Solution(schedule, Certificate("last", status, result.overhead, 0.0, 0.0))


def test_a_slow_compiler_is_not_asked_for_a_small_gain() -> None:
    graph = synthetic.chain(40)
    slow, fast = Wasteful(is_slow=True), Wasteful(is_slow=False)
    for reporter in (slow, fast):
        plan = make_plan(graph, "80%", keep_the_last, allocator=reporter)
        assert plan.budget is not None
        assert plan.live_peak < plan.predicted_peak <= plan.budget < plan.plain_peak
    assert len(set(slow.asked)) < len(set(fast.asked))


def test_a_budget_below_what_xla_needs_is_refused() -> None:
    plans: list[Plan] = []

    def step(x: tf.Tensor, **options: Any) -> Any:
        return optckpt.gradients(forward(x), W, config=FLOPS, **options)

    tf.function(
        lambda x: step(x, checkpoints="memory", on_plan=plans.append), autograph=False
    ).get_concrete_function(X)
    given = replace(plans[0], budget=MIB)
    with pytest.raises(
        OverBudgetError, match=r"compiled by XLA.*budget of 1\.0 MiB.*jit_compile=F"
    ):
        tf.function(lambda x: step(x, plan=given), autograph=False, jit_compile=True)(X)
    fits = replace(plans[0], budget=1 << 40)
    tf.function(lambda x: step(x, plan=fits), autograph=False, jit_compile=True)(X)


# --- Ties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "uint8", "bool"]
)
def test_a_tie_keeps_every_bit(dtype: str) -> None:
    kind = tf.as_dtype(dtype)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.25, 1e-40])
    values = odd if kind.is_floating or kind.is_complex else np.arange(8)
    with np.errstate(all="ignore"):
        x = tf.constant(values.astype(kind.as_numpy_dtype))

    @tf.function(jit_compile=True)
    def tied(x: tf.Tensor, evidence: tf.Tensor) -> tf.Tensor:
        return _tie(x, _true_after([evidence], []))

    for element in x:
        assert tied(x, tf.reshape(element, [1])).numpy().tobytes() == x.numpy().tobytes()


@settings(derandomize=True, deadline=None, max_examples=3)
@given(st.integers(0, 10_000))
def test_gradients_that_are_not_finite_change_nothing(seed: int) -> None:
    loss, xs, (x,) = mlp(depth=4)
    rng = np.random.RandomState(seed)
    x[rng.randint(len(x)), 0] = rng.choice([np.inf, -np.inf, np.nan])
    network = loss, xs, (x,)
    assert_same(Step(network)(), Step(network, random_schedule(seed), predict=False)())


def _operation(make: Callable[[], Any]) -> tf.Operation:
    with tf.Graph().as_default():
        made = make()
        return (made[0] if isinstance(made, Sequence) else made).op


LARGE = [64, 64]


@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (lambda x, y: x @ y[:, :8], 1),
        (lambda x, y: y[:8] @ x, 0),
        (lambda x, y: x + y, 0),
        (lambda x, y: tf.pow(x, 2.0), 0),
        (lambda x, y: 0.5 * x, 1),
        (lambda x, y: tf.reduce_sum(x, axis=1), 0),
        (lambda x, y: tf.gather(x, tf.argmax(y)), 1),
        (lambda x, y: tf.cast(tf.argmax(y), tf.float32), 0),
        (lambda x, y: tf.range(tf.cast(y[0, 0], tf.int32)), None),
        (
            lambda x, y: tf.compat.v1.nn.fused_batch_norm(tf.reshape(x, [1, 8, 8, 64]), y[0], y[1]),
            0,
        ),
    ],
)
def test_what_is_tied(make: Callable[..., Any], tied: int | None) -> None:
    def build() -> Any:
        x, y = (tf.compat.v1.placeholder(tf.float32, LARGE) for _ in range(2))
        return make(x, y)

    assert operand_to_tie(_operation(build), 1024) == tied


def test_of_a_random_operation_the_key_is_tied() -> None:
    with tf.Graph().as_default() as graph:
        tf.random.stateless_uniform([64], seed=[1, 2])
    op = next(o for o in graph.get_operations() if o.type == "StatelessRandomUniformV2")
    i = operand_to_tie(op, 1024)
    assert i is not None
    assert op.op_def.input_arg[i].name == "key"


# --- Where XLA is, and where it is not -----------------------------------------------------------

W = [weight(128, 128, seed=i) for i in range(6)]
X = tf.constant(normal(512, 128))


def forward(x: tf.Tensor) -> tf.Tensor:
    for w in W:
        x = tf.tanh(x @ w)
    return tf.reduce_mean(tf.square(x))


def budgeted(x: tf.Tensor) -> list[tf.Tensor]:
    return list(optckpt.gradients(forward(x), W, config=FLOPS, checkpoints="memory"))


def plain(x: tf.Tensor) -> list[tf.Tensor]:
    return list(tf.gradients(forward(x), W))


def products(function: Any) -> int:
    return read_compiled(
        function.experimental_get_compiler_ir(X)(stage="optimized_hlo_proto_serialized")
    ).products


@pytest.fixture(scope="module")
def reference() -> tuple[int, list[np.ndarray]]:
    function = tf.function(plain, jit_compile=True)
    return products(function), [t.numpy() for t in function(X)]


def in_a_tape(x: tf.Tensor) -> list[tf.Tensor]:
    with optckpt.GradientTape(checkpoints="memory", config=FLOPS) as tape:
        y = forward(x)
    return list(tape.gradient(y, W))


def in_a_whole_step(x: tf.Tensor) -> list[tf.Tensor]:
    with optckpt.whole_step(checkpoints="memory", config=FLOPS):
        found = tf.gradients(forward(x), W)
        for w, g in zip(W, found, strict=True):
            w.assign_sub(0.0 * g)
    return list(found)


def in_two_calls(x: tf.Tensor) -> list[tf.Tensor]:
    y = forward(x)
    parts = [optckpt.gradients(y, ws, config=FLOPS, checkpoints="memory") for ws in (W[:3], W[3:])]
    return [g for part in parts for g in part]


def in_an_inner_function(x: tf.Tensor) -> list[tf.Tensor]:
    return list(tf.function(budgeted)(x))


def in_a_loop(x: tf.Tensor) -> list[tf.Tensor]:
    nothing = [tf.zeros(w.shape) for w in W]
    _, found = tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, budgeted(x)), [tf.constant(0), nothing]
    )
    return list(found)


@pytest.mark.parametrize(
    "step",
    [budgeted, in_a_tape, in_a_whole_step, in_two_calls, in_an_inner_function, in_a_loop],
)
@pytest.mark.parametrize("traced", ["by a call", "before"])
def test_ways_in(step: Any, traced: str, reference: tuple[int, list[np.ndarray]]) -> None:
    function = tf.function(step, jit_compile=True, autograph=False)
    if traced == "before":
        function.get_concrete_function(X)
    result = [t.numpy() for t in function(X)]
    for a, b in zip(reference[1], result, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max())
    assert products(function) > reference[0]


def test_a_variable_may_be_an_argument() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor, scale: tf.Variable) -> Any:
        y = forward(x) * tf.reduce_sum(scale)
        return optckpt.gradients(y, W, config=FLOPS, checkpoints="memory")

    assert len(step(X, tf.Variable([1.0]))) == len(W)


def test_an_unknown_size_is_refused_by_name() -> None:
    spec = tf.TensorSpec([None, 128], name="images")
    function = tf.function(budgeted, jit_compile=True, autograph=False, input_signature=[spec])
    with pytest.raises(CaptureError, match=r"'images' has shape \(None, 128\).*jit_compile=False"):
        function(X)


@pytest.mark.parametrize("as_concrete", [False, True])
def test_what_was_planned_without_xla_does_not_run_with_it(as_concrete: bool) -> None:
    inner: Any = tf.function(budgeted, autograph=False)
    inner(X)
    if as_concrete:
        inner = inner.get_concrete_function(X)
    outer = tf.function(lambda x: inner(x), jit_compile=True, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="optckpt/planned_without_XLA__trace"):
        outer(X)
    inner(X)


def test_what_was_planned_for_xla_does_not_run_without_it() -> None:
    inner = tf.function(budgeted, autograph=False)
    tf.function(lambda x: inner(x), jit_compile=True, autograph=False)(X)
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned by optckpt for XLA"):
        inner(X)


def test_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor) -> Any:
        return strategy.run(budgeted, (x,))

    assert len(step(X)) == len(W)


@pytest.mark.parametrize("kind", ["autoclustering", True])
def test_auto_clustering_is_refused(kind: Any) -> None:
    tf.config.optimizer.set_jit(kind)
    try:
        with pytest.raises(CaptureError, match=r"optimizer\.set_jit.*set_jit\(False\)"):
            tf.function(budgeted, autograph=False)(X)
        # What is compiled as a whole is not clustered.
        tf.function(budgeted, autograph=False, jit_compile=True)(X)
    finally:
        tf.config.optimizer.set_jit(False)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("2", True), ("0", False)])
def test_auto_clustering_by_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, refused: bool
) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", f"--tf_xla_cpu_global_jit --tf_xla_auto_jit={value}")
    function = tf.function(budgeted, autograph=False)
    if not refused:
        function.get_concrete_function(X)
        return
    with pytest.raises(CaptureError, match=f"TF_XLA_FLAGS=--tf_xla_auto_jit={value}"):
        function(X)


def test_marked_operations_are_refused() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        with tf.xla.experimental.jit_scope():
            y = forward(x)
        return optckpt.gradients(y, W, config=FLOPS, checkpoints="memory")

    with pytest.raises(CaptureError, match=r"jit_scope.*tf\.function\(jit_compile=True\)"):
        step(X)


def test_the_old_way_to_compile_is_refused() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        return tf.xla.experimental.compile(budgeted, [x])

    with pytest.raises(CaptureError, match=r"XLACompileContext.*tf\.function\(jit_compile=True\)"):
        step(X)


@pytest.mark.parametrize("jit_compile", [True, False, "auto"])
def test_inside_of_a_keras_step(jit_compile: Any) -> None:
    import keras

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers_of_mine = [keras.layers.Dense(128, "tanh") for _ in range(6)]

        def call(self, x: tf.Tensor) -> tf.Tensor:
            for layer in self.layers_of_mine:
                x = layer(x)
            return x

        def train_step(self, data: Any) -> Any:
            x, y = data
            loss = tf.reduce_mean(tf.square(self(x) - y))
            variables = self.trainable_variables
            found = optckpt.gradients(
                loss, [v.value for v in variables], config=FLOPS, checkpoints="memory"
            )
            self.optimizer.apply_gradients(zip(found, variables, strict=True))
            return {"mine": loss}

    model = Model()
    model.compile(optimizer="sgd", jit_compile=jit_compile)
    losses = model.fit(X, X, batch_size=512, epochs=2, verbose=0).history["mine"]
    assert losses[1] < losses[0]
