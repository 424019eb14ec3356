"""Where parts with a budget of their own have an end: second derivatives, forward mode, XLA."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import tensorflow as tf
from part_support import QUICK, X, same, stack, weights

import optckpt
from optckpt import part as part_module
from optckpt.errors import CaptureError
from optckpt.schedule import Certificate, Schedule, Solution
from optckpt.simulate import simulate

pytestmark = pytest.mark.usefixtures("grappler_off")

SECOND = r"fn.* has a budget of its own, and second derivatives.*not available.*optckpt\.gradients"
SMALL = X[:64]


def part_of(ws):
    def fn(x):
        return stack(x, ws)

    return optckpt.budgeted(strategy="store_all", config=QUICK)(fn)


def penalty(part, x, outer_sources, inner_source):
    """A gradient penalty, as of WGAN-GP."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(part(x) ** 2)
        slope = inner.gradient(loss, inner_source)
        value = tf.reduce_sum(slope**2)
    return outer.gradient(value, outer_sources)


@pytest.mark.parametrize("graph", [False, True])
class TestSecondDerivatives:
    @pytest.mark.parametrize("outer", ["x", "w"])
    @pytest.mark.parametrize("inner", ["x", "w"])
    def test_are_refused(self, graph, outer, inner):
        ws = weights(2)
        part = part_of(ws)

        def step(x):
            of = {"x": x, "w": ws[0]}
            return penalty(part, x, of[outer], of[inner])

        with pytest.raises(CaptureError, match=SECOND):
            (tf.function(step) if graph else step)(SMALL)

    def test_by_a_function_that_took_the_first(self, graph):
        """In a graph TensorFlow differentiates such a function before anybody asks."""
        ws = weights(2)
        part = part_of(ws)

        def first(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(part(x) ** 2)
            return loss, tape.gradient(loss, x)

        step = tf.function(first) if graph else first
        with tf.GradientTape(persistent=True) as tape:
            loss, slope = step(SMALL)
            other = tf.reduce_sum(slope**2)
        same(tape.gradient(loss, ws), gradient(lambda x: stack(x, ws), SMALL, ws))
        with pytest.raises((CaptureError, tf.errors.InvalidArgumentError), match=SECOND):
            tape.gradient(other, ws)

    def test_tapes_that_ask_for_none(self, graph):
        ws = weights(2)
        other = tf.Variable(2.0)
        part = part_of(ws)

        def step(x):
            with tf.GradientTape(persistent=True) as outer:
                outer.watch(x)
                with tf.GradientTape(persistent=True) as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(part(part(x)) ** 2)
                slopes = inner.gradient(loss, [x, *ws])
                again = inner.gradient(loss, ws)
                beside = loss * other + other**2
            return slopes, again, outer.gradient(beside, [other, *ws])

        slopes, again, of_beside = (tf.function(step) if graph else step)(SMALL)
        expected = gradient(lambda x: stack(stack(x, ws), ws), SMALL, ws)
        same(again, expected)
        same(slopes[1:], expected)
        same(of_beside[1:], [2 * g for g in expected])

    def test_jacobian_and_parts_in_parts(self, graph):
        ws = weights(3)
        inside = part_of(ws[:2])
        part = optckpt.budgeted(strategy="store_all", config=QUICK)(
            lambda x: stack(inside(x), ws[2:])
        )

        def jacobian(fn):
            def step(x):
                with tf.GradientTape() as tape:
                    rows = tf.reduce_sum(fn(x), 0)[:3]
                return tape.jacobian(rows, ws[0])

            return (tf.function(step) if graph else step)(SMALL)

        expected = jacobian(tf.function(lambda x: stack(x, ws)))
        tf.debugging.assert_near(jacobian(part), expected, rtol=1e-4, atol=1e-5)


def gradient(fn, x, sources):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(fn(x) ** 2)
        return tape.gradient(loss, sources)

    return tf.function(step)(x)


IMAGES = tf.reshape(X, (256, 8, 8, 16))


def convolutions(x, kernels):
    for kernel in kernels:
        x = tf.tanh(tf.nn.conv2d(x, kernel, 1, "SAME")) * 1.5
    return x


@pytest.fixture
def cuts(monkeypatch):
    """All parts that are cut, in order."""
    found = []
    cut = part_module.cut
    monkeypatch.setattr(part_module, "cut", lambda *a: found.append(cut(*a)) or found[-1])
    return found


def bytes_kept(halves):
    kept = halves.forward.outputs[len(halves.trace.results) :]
    rows = IMAGES.shape[0]
    return sum(
        t.dtype.size * math.prod(rows if n is None else n for n in t.shape.as_list()) for t in kept
    )


@pytest.mark.parametrize("rows", [len(IMAGES), None])
@pytest.mark.parametrize("share", [0.6, 0.75])
def test_nothing_is_kept_for_its_shape(share, rows, cuts):
    """The gradient of a convolution looks at the shape of its input."""
    kernels = [tf.Variable(tf.reshape(w[:36], (3, 3, 16, 16))) for w in weights(8)]
    plans = []
    part = optckpt.budgeted(f"{share:.0%}", config=QUICK, on_plan=plans.append)(
        lambda x: convolutions(x, kernels)
    )
    signature = [tf.TensorSpec([rows, *IMAGES.shape[1:]])]
    got = tf.function(lambda x: gradient(part, x, kernels), input_signature=signature)(IMAGES)
    same(got, gradient(lambda x: convolutions(x, kernels), IMAGES, kernels))
    # The result and, when the backward pass begins, its slope and its gradient are there besides.
    size = IMAGES.shape.num_elements() * 4
    assert 0 < bytes_kept(cuts[-1]) <= plans[-1].budget - 3 * size
    assert not any(op.type == "ShapeN" for op in cuts[-1].backward.graph.get_operations())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("of", ["x", "w"])
def test_forward_mode_is_refused(graph, of):
    ws = weights(2)
    part = part_of(ws)
    part(SMALL)

    def step(x):
        primal = {"x": x, "w": ws[0]}[of]
        with tf.autodiff.ForwardAccumulator(primal, tf.ones_like(primal)) as forward:
            y = part(x)
        return forward.jvp(y)

    with pytest.raises(CaptureError, match=r"'fn' has a budget.*ForwardAccumulator"):
        (tf.function(step) if graph else step)(SMALL)


@pytest.mark.parametrize("kind", ["cond", "while", "map"])
def test_in_branches_and_loops(kind):
    ws = weights(2)

    def step(fn):
        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                if kind == "cond":
                    y = tf.cond(tf.reduce_sum(x) > 0, lambda: fn(x), lambda: fn(x) * 2.0 + x)
                elif kind == "while":
                    y = x
                    for _ in tf.range(3):
                        y = fn(y)
                else:
                    y = tf.map_fn(fn, tf.reshape(x, (4, 16, 64)))
                loss = tf.reduce_sum(y**2)
            return loss, tape.gradient(loss, [x, *ws])

        return run(SMALL)

    same(step(part_of(ws)), step(tf.function(lambda x: stack(x, ws))))


@pytest.mark.parametrize("kind", ["call", "cond", "while"])
def test_a_variable_assigned_between_the_passes(kind):
    """What reads it by its handle is executed once: a plan that makes all again leaves it out."""
    ws = weights(3)
    v = tf.Variable(ws[0])
    plans = []

    def fn(x):
        if kind == "call":
            y = tf.function(lambda y: tf.tanh(y @ v))(x)
        elif kind == "cond":
            y = tf.cond(tf.reduce_sum(x) < 1e9, lambda: tf.tanh(x @ v), lambda: x)
        else:
            y = tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y @ v)), (0, x), None, 1
            )[1]
        for w in ws:
            y = tf.sin(y @ w) * y
        return y

    def step(part):
        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(part(x) ** 2)
            v.assign(v * -0.5)
            return tape.gradient(loss, [v, *ws])

        v.assign(ws[0])
        return run(SMALL)

    part = optckpt.budgeted(strategy=everything_again, config=QUICK, on_plan=plans.append)(fn)
    same(step(part), step(tf.function(fn)))
    assert len(plans[0].schedule) > len(set(plans[0].schedule.executions))


def everything_again(graph, budget, options):
    """A strategy that makes all that may be made again before each backward operation."""
    sequence = []
    for o, op in enumerate(graph.operations):
        if not op.forward:
            sequence += [
                p
                for p in range(o)
                if graph.operations[p].repeatable and graph.operations[p].forward
            ]
        sequence.append(o)
    schedule = Schedule(tuple(sequence))
    cost = simulate(graph, schedule).overhead
    return Solution(
        schedule,
        Certificate(solver="again", status="feasible", cost=cost, bound=0.0, seconds=0.0),
    )


def test_a_function_that_xla_compiles_is_refused():
    part = part_of(weights(2))

    @tf.function(jit_compile=True)
    def compiled(x):
        return part(x)

    with pytest.raises(CaptureError, match=r"'fn' has a budget.*jit_compile=True"):
        compiled(SMALL)


def test_a_function_with_a_part_fails_to_be_compiled_later():
    part = part_of(weights(2))
    traced = tf.function(lambda x: part(x) * 1.0)
    traced(SMALL)
    compiled = tf.function(lambda x: traced(x) + 1.0, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="planned_without_XLA"):
        compiled(SMALL)


def test_the_graph_around_a_part_ends_with_its_function():
    ws = weights(2)
    part = part_of(ws)

    def traced():
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(part(x))
            return tape.gradient(loss, ws)

        return weakref.ref(step.get_concrete_function(SMALL).graph)

    graphs = [traced() for _ in range(2)]
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]
