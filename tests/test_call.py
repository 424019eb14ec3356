"""The call: semantics of tf.gradients, budgets, errors, checkpoints=, patch, plans."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import tensorflow as tf

import optckpt
from optckpt.config import Config, parse_config
from optckpt.errors import (
    BudgetError,
    CaptureError,
    ConfigError,
    InfeasibleBudgetError,
    OptckptError,
    OverBudgetError,
    PlanError,
)
from optckpt.solvers.heuristics import store_all

FLOPS = Config.model_validate({"costs": {"model": "flops"}, "memory": {"margin": 0.0}})
# Large beside what other tests may have left in memory: shares of the peak count that, too.
X = tf.constant(np.random.default_rng(0).normal(size=(8192, 64)).astype(np.float32))


def weights(layers: int = 8) -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.normal(size=(64, 64)).astype(np.float32) / 8, name=f"w{i}")
        for i in range(layers)
    ]


def mlp(x: tf.Tensor, ws: list) -> tf.Tensor:
    for w in ws:
        x = tf.tanh(x @ w) * 1.5
    return tf.reduce_sum(x * x)


def run(call, ws, *extra, forward=mlp):
    """Gradients of the loss with respect to `ws` by `call`, traced and executed."""

    @tf.function
    def step(x):
        return call(forward(x, ws), ws, *extra)

    return step(X)


def assert_identical(got, expected) -> None:
    got, expected = tf.nest.flatten(got, True), tf.nest.flatten(expected, True)
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def budgeted(budget, **kwargs):
    return lambda ys, xs: optckpt.gradients(ys, xs, budget=budget, config=FLOPS, **kwargs)


@pytest.mark.usefixtures("grappler_off")
def test_identical_under_a_budget_that_needs_recomputation():
    ws = weights()
    plain = run(tf.gradients, ws)
    assert_identical(run(budgeted("75%"), ws), plain)
    plan = optckpt.last_plan()
    assert len(plan.schedule) > len(set(plan.schedule.executions))
    assert plan.predicted_peak <= plan.budget < plan.plain_peak
    assert plan.budget == round(0.75 * plan.plain_peak)
    assert plan.overhead == pytest.approx(plan.certificate.cost)
    assert plan.certificate.bound <= plan.certificate.cost + 1e-12


def test_plain_peak_as_budget_recomputes_nothing():
    ws = weights()
    run(budgeted("80%"), ws)
    peak = optckpt.last_plan().plain_peak
    run(budgeted(peak), ws)
    plan = optckpt.last_plan()
    assert len(plan.schedule) == len(set(plan.schedule.executions))
    assert plan.overhead == 0
    assert plan.certificate.status == "optimal"


def test_least_memory_for_at_most_so_much_more_time():
    ws = weights()
    plain = run(tf.gradients, ws)
    peaks = []
    for share in (0.0, 0.1, 0.3):
        got = run(
            lambda ys, xs, share=share: optckpt.gradients(ys, xs, max_overhead=share, config=FLOPS),
            ws,
        )
        assert_identical(got, plain)
        plan = optckpt.last_plan()
        assert plan.overhead <= share
        assert plan.budget is None
        peaks.append(plan.live_peak)
    assert peaks[0] >= peaks[1] > peaks[2]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budget": "60%", "max_overhead": 0.1}, "either a budget or max_overhead"),
        ({"max_overhead": -0.1}, "at least 0"),
        ({"max_overhead": "10%"}, "share of the plain step's time"),
    ],
)
def test_max_overhead_that_cannot_be(given, text):
    with pytest.raises(BudgetError, match=text):
        run(lambda ys, xs: optckpt.gradients(ys, xs, config=FLOPS, **given), weights(2))


def test_budget_below_the_floor_names_floor_and_operation():
    ws = weights()
    run(budgeted("80%"), ws)
    floor = optckpt.last_plan().floor
    with pytest.raises(InfeasibleBudgetError) as caught:
        run(budgeted(floor - 1), ws)
    assert str(floor) in str(caught.value)
    assert "set by" in str(caught.value)
    assert caught.value.floor == floor


def gated(x: tf.Tensor, ws: list) -> tf.Tensor:
    """Blocks in which a small gradient is expanded into several large ones."""
    for a, b, c, out in zip(*[iter(ws)] * 4, strict=True):
        x = x + (tf.tanh(x @ a) * tf.sin(x @ b) * tf.sigmoid(x @ c)) @ out
    return tf.reduce_mean(x * x)


@pytest.mark.usefixtures("grappler_off")
@pytest.mark.fresh_process
def test_a_budget_that_only_repeated_backward_operations_meet():
    rng = np.random.default_rng(2)
    shapes = [(64, 2048)] * 3 + [(2048, 64)]
    ws = [tf.Variable(rng.normal(size=s).astype(np.float32) / 32) for s in shapes]

    configs = {
        repeat: parse_config(
            {
                "costs": {"model": "flops"},
                "memory": {"margin": 0.0},
                "solver": {"order": "fixed", "repeat": repeat},
            }
        )
        for repeat in ("forward", "auto", "all")
    }

    def call(budget, repeat):
        config = configs[repeat]
        return lambda ys, xs: optckpt.gradients(ys, xs, budget=budget, config=config)

    plain = run(tf.gradients, ws, forward=gated)
    floors = {}
    for repeat in configs:
        with pytest.raises(InfeasibleBudgetError) as caught:
            run(call(1, repeat), ws, forward=gated)
        floors[repeat] = caught.value.floor
        assert ("even if backward operations" in str(caught.value)) == (repeat != "forward")
    assert floors["auto"] == floors["all"] < 0.9 * floors["forward"]

    budget = floors["forward"] - 1
    with pytest.raises(InfeasibleBudgetError, match=r"try solver\.repeat: all"):
        run(call(budget, "forward"), ws, forward=gated)
    peaks = []

    @tf.function
    def step(x):
        return call(budget, "auto")(gated(x, ws), ws)

    for _ in range(2):
        tf.config.experimental.reset_memory_stats("CPU:0")
        got = step(X)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        assert_identical(got, plain)
        del got
    plan = optckpt.last_plan()
    assert plan.certificate.repeats == "all"
    assert plan.floor <= plan.live_peak <= budget < floors["forward"]
    assert peaks[-1] < floors["forward"]


def test_heuristic_over_budget_names_its_peak():
    ws = weights()
    run(budgeted(None, strategy="sqrt_n"), ws)
    peak = optckpt.last_plan().predicted_peak
    floor = optckpt.last_plan().floor
    assert floor < peak
    with pytest.raises(OverBudgetError) as caught:
        run(budgeted(floor, strategy="sqrt_n"), ws)
    assert str(caught.value.peak) in str(caught.value)
    assert caught.value.peak > floor


class TestSemanticsOfTfGradients:
    """Same results as tf.gradients for every form of argument."""

    pytestmark = pytest.mark.usefixtures("grappler_off")

    def both(self, build):
        """build(call) -> result inside a function; compared between tf.gradients and ours."""

        def result(call, **kwargs):
            # No arguments: tf.function would strip the decorators of functions passed to it.
            return tf.function(functools.partial(build, functools.partial(call, **kwargs)))()

        plain = result(tf.gradients)
        result(optckpt.gradients, config=FLOPS)
        # A share of the peak could be below the floor: it counts what other tests left in memory.
        plan = optckpt.last_plan()
        budget = (plan.floor + 9 * plan.plain_peak) // 10
        results = [plain, result(optckpt.gradients, config=FLOPS, budget=budget)]
        assert type(results[0]) is type(results[1])
        assert_identical(results[1], results[0])
        return results[1]

    def test_single_x(self):
        ws = weights()
        result = self.both(lambda g: g(mlp(X, ws), ws[3]))
        assert isinstance(result, list)
        assert len(result) == 1

    def test_x_is_a_tensor_of_the_graph(self):
        ws = weights()

        def build(g):
            x = tf.identity(X)
            return g(mlp(x, ws), [x, ws[0]])

        self.both(build)

    def test_several_ys_and_grad_ys(self):
        ws = weights()

        def build(g):
            a = tf.tanh(X @ ws[0])
            b = a
            for w in ws[1:]:
                b = tf.tanh(b @ w) * 1.5
            return g([a, b], ws, grad_ys=[tf.ones_like(a) * 3, tf.ones_like(b) * 0.5])

        self.both(build)

    def test_stop_gradients(self):
        ws = weights()

        def build(g):
            a = tf.tanh(X @ ws[0])
            return g(mlp(a, ws[1:]), [ws[1], a], stop_gradients=[a])

        self.both(build)

    def test_disconnected_is_none(self):
        ws = weights()
        other = tf.Variable(1.0)

        @tf.function
        def step():
            grads = optckpt.gradients(mlp(X, ws), [ws[0], other], budget="90%", config=FLOPS)
            assert grads[1] is None
            return grads[0]

        step()

    def test_everything_disconnected_gives_nones(self):
        other = tf.Variable(1.0)

        @tf.function
        def step():
            grads = optckpt.gradients(tf.reduce_sum(X), [other], budget=10, config=FLOPS)
            assert grads == [None]
            return tf.constant(0)

        step()

    def test_unconnected_gradients_zero(self):
        ws = weights()
        other = tf.Variable(tf.ones((3, 2)))
        result = self.both(
            lambda g: g(
                mlp(X, ws), [ws[0], other], unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        )
        np.testing.assert_array_equal(result[1], np.zeros((3, 2), np.float32))

    def test_indexed_slices(self):
        table = tf.Variable(tf.random.stateless_normal((100, 64), (1, 2)))
        ws = weights()
        ids = tf.constant(np.arange(512) % 7)

        def build(g):
            (grad,) = g(mlp(tf.gather(table, ids), ws), [table])
            assert isinstance(grad, tf.IndexedSlices)
            return [grad]

        self.both(build)

    def test_nested_xs_keep_their_structure(self):
        ws = weights()

        @tf.function
        def step():
            xs = {"first": ws[0], "rest": [ws[1], (ws[2],)]}
            return optckpt.gradients(mlp(X, ws), xs, budget="90%", config=FLOPS)

        result = step()
        expected = run(tf.gradients, ws)
        assert set(result) == {"first", "rest"}
        assert_identical([result["first"], result["rest"][0], result["rest"][1][0]], expected[:3])


class TestRefusals:
    def test_eager_mode(self):
        ws = weights()
        with pytest.raises(CaptureError, match=r"tf\.function"):
            optckpt.gradients(mlp(X, ws), ws, budget="80%")

    def test_unknown_batch_size_names_the_argument(self):
        ws = weights()

        @tf.function(input_signature=[tf.TensorSpec((None, 64), name="images")])
        def step(images):
            return optckpt.gradients(mlp(images, ws), ws, budget="80%", config=FLOPS)

        # A call would tell the sizes.
        with pytest.raises(CaptureError, match="images"):
            step.get_concrete_function()

    def test_unreadable_budget(self):
        with pytest.raises(BudgetError, match="lots"):
            run(budgeted("lots"), weights())

    def test_unknown_strategy(self):
        with pytest.raises(OptckptError, match=r"nonsense.*sqrt_n"):
            run(budgeted("80%", strategy="nonsense"), weights())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"budget": "lots"}, "lots"),
            ({"strategy": "nonsense"}, "unknown strategy 'nonsense'"),
            ({"strategy": 7}, "strategy= takes a name .* got int"),
            ({"checkpoints": 7}, "checkpoints= takes .* got int"),
            ({"checkpoints": "everything"}, "unknown checkpoints='everything'"),
            ({"plan": {}}, "plan= takes a Plan or the path of one, got dict"),
            ({"plan": "none.json"}, "cannot read the plan none.json"),
            ({"plan": "none.json", "budget": 1000}, "leave out budget= or plan="),
            ({"plan": "none.json", "max_overhead": 0.1}, "leave out max_overhead= or plan="),
            ({"plan": "none.json", "strategy": "sqrt_n"}, "leave out strategy= or plan="),
            ({"plan": "none.json", "checkpoints": "memory"}, "leave out checkpoints= or plan="),
            ({"config": "none.yaml"}, "cannot read the configuration none.yaml"),
        ],
    )
    def test_arguments_are_checked_before_anything_is_done(self, arguments, message):
        with tf.Graph().as_default() as graph:
            x = tf.constant([1.0])
            y = tf.tanh(x)
            before = len(graph.get_operations())
            with pytest.raises(OptckptError, match=message):
                optckpt.gradients(y, [x], **arguments)
            with pytest.raises(OptckptError, match=r"checkpoints= takes .* list of tensors"):
                optckpt.gradients(y, [x], checkpoints=y)
            assert len(graph.get_operations()) == before

    def test_unknown_checkpoints(self):
        with pytest.raises(OptckptError, match="everything"):
            run(budgeted("80%", checkpoints="everything"), weights())

    def test_empty_collection(self):
        with pytest.raises(OptckptError, match="add_to_collection"):
            run(budgeted(None, checkpoints="collection"), weights())


class TestConfiguration:
    def test_budget_from_the_environment_and_the_working_folder(self, tmp_path, monkeypatch):
        ws = weights()
        text = "budget: {}\ncosts: {{model: flops}}\nmemory: {{margin: 0.0}}\n"
        (tmp_path / "optckpt.yaml").write_text(text.format("90%"))
        (tmp_path / "other.yaml").write_text(text.format("80%"))
        monkeypatch.chdir(tmp_path)
        run(optckpt.gradients, ws)
        plan = optckpt.last_plan()
        assert plan.budget == round(0.9 * plan.plain_peak)
        monkeypatch.setenv("OPTCKPT_CONFIG", str(tmp_path / "other.yaml"))
        run(optckpt.gradients, ws)
        assert optckpt.last_plan().budget == round(0.8 * plan.plain_peak)

    def test_argument_wins(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("budget: 80%\ncosts: {model: unit}\n")
        run(lambda ys, xs: optckpt.gradients(ys, xs, budget="90%", config=path), weights())
        plan = optckpt.last_plan()
        assert plan.budget == round(0.9 * plan.plain_peak)

    def test_missing_file(self, tmp_path):
        path = tmp_path / "absent.yaml"
        with pytest.raises(ConfigError, match=r"absent\.yaml"):
            run(lambda ys, xs: optckpt.gradients(ys, xs, config=path), weights())

    def test_without_any_budget_the_device_limit_holds(self):
        from optckpt.device import memory_limit

        run(budgeted(None), weights())
        assert optckpt.last_plan().budget == memory_limit("/device:CPU:0")
        assert optckpt.last_plan().overhead == 0


class TestCheckpoints:
    """OpenAI's modes mean what they meant there."""

    pytestmark = pytest.mark.usefixtures("grappler_off")

    @pytest.mark.parametrize("mode", ["memory", "speed"])
    def test_modes(self, mode):
        ws = weights(12)
        assert_identical(run(budgeted(None, checkpoints=mode), ws), run(tf.gradients, ws))
        plan = optckpt.last_plan()
        assert plan.strategy == {"memory": "sqrt_n", "speed": "speed"}[mode]
        assert plan.budget is None
        assert plan.predicted_peak < plan.plain_peak

    def test_list_of_tensors(self):
        ws = weights()
        acts = []

        def forward(x, ws):
            acts.clear()
            for w in ws:
                x = tf.tanh(x @ w)
                acts.append(x)
            return tf.reduce_sum(x * x)

        def keep(ys, xs):
            return optckpt.gradients(ys, xs, checkpoints=[acts[2], acts[5]], config=FLOPS)

        assert_identical(run(keep, ws, forward=forward), run(tf.gradients, ws, forward=forward))
        plan = optckpt.last_plan()
        assert plan.strategy == "explicit"
        # What is kept is computed once; its neighbours twice.
        repeated = len(plan.schedule) - len(set(plan.schedule.executions))
        assert 0 < repeated < 2 * len(ws)

    def test_tensor_that_is_not_in_the_forward_graph(self):
        ws = weights()

        def keep(ys, xs):
            stray = tf.tanh(tf.ones(X.shape), name="stray")
            return optckpt.gradients(ys, xs, checkpoints=[stray], config=FLOPS)

        with pytest.raises(OptckptError, match="stray"):
            run(keep, ws)

    def test_collection_in_a_v1_session(self):
        values = [w.numpy() for w in weights()]
        x_value = X.numpy()

        def run_v1(call):
            with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
                y = x = tf.compat.v1.placeholder(tf.float32, x_value.shape)
                ws = [tf.constant(v) for v in values]
                for i, w in enumerate(ws):
                    y = tf.tanh(y @ w)
                    if i == 4:
                        tf.compat.v1.add_to_collection("checkpoints", y)
                grads = session.run(call(tf.reduce_sum(y * y), ws), {x: x_value})
                return grads, [op.name for op in graph.get_operations()]

        expected, _ = run_v1(tf.gradients)
        got, names = run_v1(lambda y, xs: optckpt.gradients_collection(y, xs, config=FLOPS))
        clones = [n for n in names if n.startswith("optckpt/")]
        assert "optckpt/Tanh_2_again" in clones
        assert "optckpt/Tanh_4_again" not in clones  # the one that is kept
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


class TestPatch:
    def test_replaces_and_restores(self):
        from tensorflow.python.ops import gradients as module

        before = (tf.gradients, tf.compat.v1.gradients, module.gradients)
        ws = weights()
        with optckpt.patch(budget="80%", config=FLOPS):
            assert tf.gradients is not before[0]
            run(tf.gradients, ws)
        assert (tf.gradients, tf.compat.v1.gradients, module.gradients) == before
        plan = optckpt.last_plan()
        assert plan.budget == round(0.8 * plan.plain_peak)

    def test_signatures_are_those_of_tensorflow(self):
        before = [inspect.signature(f) for f in (tf.gradients, tf.compat.v1.gradients)]
        seen = []

        def keep_all(graph, budget, options):
            seen.append(budget)
            return store_all(graph, budget, options)

        def call(ys, xs):
            stops = [ys.op.inputs[0]]
            assert tf.gradients(ys, xs, None, "g", False, None, stops) == [None] * len(xs)
            assert tf.compat.v1.gradients(ys, xs, None, "g", True, False, None, stops) == [
                None
            ] * len(xs)
            found = tf.gradients(name="mine", xs=xs, ys=ys)
            assert {g.op.name.split("/")[0] for g in found} == {"mine"}
            return found

        with optckpt.patch(budget=1 << 40, config=FLOPS, strategy=keep_all):
            patched = [inspect.signature(f) for f in (tf.gradients, tf.compat.v1.gradients)]
            with optckpt.patch(budget=1 << 39, config=FLOPS, strategy=keep_all):
                run(call, weights())
            with pytest.raises(TypeError, match="colocate_gradients_with_ops"):
                tf.gradients([], [], colocate_gradients_with_ops=True)
        assert patched == before
        assert set(seen) == {1 << 39}

    def test_restores_after_an_error(self):
        before = tf.gradients
        with pytest.raises(RuntimeError, match="inside"), optckpt.patch():
            raise RuntimeError("inside")
        assert tf.gradients is before

    def test_v1_optimizer(self):
        plans = []
        values = [w.numpy() for w in weights()]
        x_value = X.numpy()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            ws = [
                tf.compat.v1.get_variable(f"w{i}", initializer=v, use_resource=True)
                for i, v in enumerate(values)
            ]
            loss = mlp(tf.constant(x_value), ws)
            with optckpt.patch(budget="80%", config=FLOPS, on_plan=plans.append):
                train = tf.compat.v1.train.GradientDescentOptimizer(1e-7).minimize(loss)
            session.run(tf.compat.v1.global_variables_initializer())
            losses = []
            for _ in range(3):
                losses.append(session.run(loss))
                session.run(train)
        assert len(plans) == 1
        assert losses[2] < losses[1] < losses[0]


class TestPlans:
    def test_saved_plan_applies_identically(self, tmp_path):
        ws = weights()
        graphs = []

        def step_with(**kwargs):
            def call(ys, xs):
                grads = optckpt.gradients(ys, xs, config=FLOPS, **kwargs)
                graphs.append(
                    [(o.type, [i.name for i in o.inputs]) for o in ys.graph.get_operations()]
                )
                return grads

            return run(call, ws)

        first = step_with(budget="75%")
        plan = optckpt.last_plan()
        plan.save(tmp_path / "plan.json")
        second = step_with(plan=tmp_path / "plan.json")
        assert optckpt.last_plan() == plan
        assert graphs[0] == graphs[1]
        assert_identical(second, first)

    def test_refused_on_another_graph(self):
        run(budgeted("80%"), weights(8))
        plan = optckpt.last_plan()
        with pytest.raises(PlanError, match="another graph"):
            run(lambda ys, xs: optckpt.gradients(ys, xs, plan=plan, config=FLOPS), weights(9))

    def test_callback_gets_the_plan(self):
        seen = []
        run(budgeted("80%", on_plan=seen.append), weights())
        assert seen == [optckpt.last_plan()]
