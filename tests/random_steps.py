"""Small random training steps: what they are made of is drawn from a seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from tf_support import Scheduler, flat, grappler_off, normal, weight

from optckpt.backends.sums import keep_orders
from optckpt.backends.tensorflow import RewriteReport, rewrite
from optckpt.frontends.tensorflow import capture
from optckpt.frontends.tf_traced import as_traced

ROWS, WIDTH = 16, 32
SIDE, CHANNELS = 8, 8
RATE = 0.02

MODES = ("one loss", "several losses", "two calls", "second order")


class RandomStep:
    """Training steps of a random model on a matrix, an image and indices."""

    def __init__(self, seed: int, operations: int = 14, unknown: bool = False) -> None:
        """`unknown`: whether the first dimension of the arguments is left open in the trace."""
        self.seed = seed
        self.unknown = unknown
        self.mode = MODES[seed % len(MODES)]
        self.operations = operations
        self.share = (0.5, 0.9, 0.1)[seed // len(MODES) % 3]
        """Of operations on matrices."""
        self.reports: list[RewriteReport] = []
        self._weights: list[tf.Variable] = []
        self._cursor = 0
        rng = np.random.RandomState(seed)
        self.arguments = [
            tf.constant(normal(ROWS, WIDTH, seed=seed)),
            tf.constant(normal(2, SIDE, SIDE, CHANNELS, seed=seed + 1)),
            tf.constant(rng.randint(0, 20, [ROWS]).astype("int32")),
        ]
        self._model(*self.arguments)
        self._start = [v.numpy() for v in self._weights]

    def weight(self, *shape: int) -> tf.Tensor:
        """The next variable of the model."""
        if self._cursor == len(self._weights):
            self._weights.append(weight(*shape, seed=self._cursor))
        self._cursor += 1
        return self._weights[self._cursor - 1]

    def run(
        self,
        schedulers: Sequence[Scheduler | Literal["sums only"] | None] = (None, None),
        steps: int = 2,
        optimizer: bool = False,
    ) -> list[np.ndarray]:
        """Losses and gradients of some training steps from the same start.

        A scheduler for each call of gradients in a step; None: left as tf.gradients made it;
        "sums only": the same, but no sum adds in an order that depends on timing.
        """
        self.reports = []
        for v, value in zip(self._weights, self._start, strict=True):
            v.assign(value)

        def step(*arguments: tf.Tensor) -> list[tf.Tensor]:
            losses = self._model(*arguments)
            calls: list[Callable[[], list[tf.Tensor]]]
            if self.mode == "one loss":
                calls = [lambda: [tf.add_n(losses)]]
            elif self.mode == "several losses":
                calls = [lambda: losses]
            elif self.mode == "two calls":
                calls = [lambda: losses[:2], lambda: losses[2:]]
            else:
                calls = [lambda: losses, lambda: [penalty(first)]]
            first: list[tf.Tensor] = []
            outputs = list(losses)
            sums = [tf.zeros_like(v) for v in self._weights]
            for call, scheduler in zip(calls, schedulers, strict=False):
                ys = call()
                with as_traced(tf.compat.v1.get_default_graph()):
                    gradients = tf.gradients(ys, self._weights)
                first = flat(gradients)
                if scheduler is not None:
                    found = capture(
                        tf.compat.v1.get_default_graph(), ys, first, shapes=self._shapes(arguments)
                    )
                    if scheduler == "sums only":
                        keep_orders(found, (), "optckpt")
                    else:
                        self.reports.append(rewrite(found, scheduler(found.graph)))
                outputs += [*ys, *first]
                for i, g in enumerate(gradients):
                    if g is not None:
                        sums[i] += tf.convert_to_tensor(g)
            for v, g in zip(self._weights, sums, strict=True):
                v.assign_sub(RATE * g)
            return outputs

        function = tf.function(step, autograph=False, input_signature=self._signature())
        found = []
        with contextlib.nullcontext() if optimizer else grappler_off():
            for _ in range(steps):
                found += [t.numpy() for t in function(*self.arguments)]
        return found + [v.numpy() for v in self._weights]

    def _signature(self) -> list[tf.TensorSpec] | None:
        if not self.unknown:
            return None
        return [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in self.arguments]

    def _shapes(self, arguments: Sequence[tf.Tensor]) -> dict[int, tf.TensorShape] | None:
        if not self.unknown:
            return None
        return {id(t): real.shape for t, real in zip(arguments, self.arguments, strict=True)}

    def train(
        self, context: Callable[[], contextlib.AbstractContextManager[Any]], steps: int = 3
    ) -> list[np.ndarray]:
        """Losses of some steps whose updates are drawn from the seed, and all variables after them.

        `context` is entered around each step, forward pass and updates included, once or twice in
        one function; what it yields has a method `keep` if it wants to know what is returned.
        """
        for v, value in zip(self._weights, self._start, strict=True):
            v.assign(value)
        optimizers = [Updates(self.seed + i, self._weights) for i in range(2)]
        rng = np.random.RandomState(self.seed)
        twice, gathered = rng.rand() < 0.3, rng.rand() < 0.5
        bank = tf.Variable(tf.zeros([ROWS, WIDTH]))

        def one(*arguments: tf.Tensor) -> list[tf.Tensor]:
            with context() as whole:
                losses = self._model(*arguments)
                halves = [losses[:2], losses[2:]] if self.mode == "two calls" else [losses]
                outputs = list(losses)
                for i, ys in enumerate(halves):
                    if i and gathered:
                        # Through the weights that the first call has updated.
                        ys = self._model(*arguments)[2:]
                    gradients = tf.gradients(ys, self._weights)
                    if self.mode == "second order":
                        loss = penalty(flat(gradients))
                        gradients = tf.gradients([*ys, loss], self._weights)
                        ys = [*ys, loss]
                    outputs += [*ys, *optimizers[i].apply(gradients)]
                bank.assign(0.5 * bank + tf.reduce_mean(tf.add_n(losses)))
                if whole is not None:
                    whole.keep(outputs)
            return outputs

        def step(x: tf.Tensor, image: tf.Tensor, ids: tf.Tensor) -> list[tf.Tensor]:
            bank.assign_add(0.01 * x)
            x = tf.tanh(x + bank)
            outputs = one(x, image, ids)
            return outputs + one(x * 0.5, image, ids) if twice else outputs

        function = tf.function(step, autograph=False)
        found = []
        with grappler_off():
            for _ in range(steps):
                found += [t.numpy() for t in function(*self.arguments)]
        slots = [v for optimizer in optimizers for v in optimizer.slots]
        return found + [v.numpy() for v in (*self._weights, bank, *slots)]

    def _model(self, x: tf.Tensor, image: tf.Tensor, ids: tf.Tensor) -> list[tf.Tensor]:
        self._cursor = 0
        rng = np.random.RandomState(self.seed)
        matrices, images = [tf.tanh(x)], [tf.tanh(image)]
        for _ in range(self.operations):
            on_matrix = rng.rand() < self.share
            pool, kinds = (matrices, MATRIX) if on_matrix else (images, IMAGE)
            kind = kinds[rng.randint(len(kinds))]
            pool.append(kind(Draw(self, rng, pool, ids)))
        losses = []
        for pool in (matrices, images):
            losses.append(tf.reduce_mean(tf.square(tf.add_n(pool[-3:]))))
            losses.append(tf.reduce_mean(tf.abs(tf.tanh(pool[-1]) * pool[0])))
        if rng.rand() < 0.5 and self._weights:
            losses.append(1e-2 * tf.add_n([tf.nn.l2_loss(v) for v in self._weights]))
        return losses


class Updates:
    """An optimizer that treats each variable in a way of its own, drawn from a seed."""

    def __init__(self, seed: int, variables: Sequence[tf.Variable]) -> None:
        self.variables = variables
        self.slots: list[tf.Variable] = [tf.Variable(0.0)]
        self._of: dict[int, list[tf.Variable]] = {}
        rng = np.random.RandomState(seed)
        self._rules = [RULES[rng.randint(len(RULES))] for _ in variables]
        self._order = rng.permutation(len(variables))
        self._clip = rng.rand() < 0.2
        self._late = rng.rand() < 0.3

    def slot(self, variable: tf.Variable, number: int = 0) -> tf.Variable:
        """A variable of the same shape, zero at first."""
        own = self._of.setdefault(id(variable), [])
        while len(own) <= number:
            # Variables can be made in the first trace only; the plain and the planned step differ.
            with tf.init_scope():
                own.append(tf.Variable(tf.zeros(variable.shape)))
            self.slots.append(own[-1])
        return own[number]

    def apply(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Update the variables; returns what was read of some of them afterwards."""
        count = self.slots[0]
        count.assign_add(1.0)
        gradients = list(gradients)
        if self._clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        if self._late:
            gradients = [None if g is None else tf.identity_n([g])[0] for g in gradients]
        found = []
        for i in self._order:
            v, g = self.variables[i], gradients[i]
            if g is not None:
                self._rules[i](self, v, g)
                if i % 3 == 0:
                    found.append(tf.reduce_sum(v))
        return found


def _sgd(o: Updates, v: tf.Variable, g: Any) -> None:
    if isinstance(g, tf.IndexedSlices):
        v.scatter_sub(tf.IndexedSlices(RATE * g.values, g.indices))
    else:
        v.assign_sub(RATE * g)


def _momentum(o: Updates, v: tf.Variable, g: Any) -> None:
    m = o.slot(v)
    m.assign(0.9 * m + tf.convert_to_tensor(g))
    v.assign_sub(RATE * (0.9 * m + g))


def _fused_adam(o: Updates, v: tf.Variable, g: Any) -> None:
    tf.raw_ops.ResourceApplyAdam(
        var=v.handle, m=o.slot(v).handle, v=o.slot(v, 1).handle, beta1_power=0.9, beta2_power=0.99,
        lr=1e-3, beta1=0.9, beta2=0.99, epsilon=1e-3, grad=tf.convert_to_tensor(g),
    )  # fmt: skip


def _adam(o: Updates, v: tf.Variable, g: Any) -> None:
    m, s = o.slot(v), o.slot(v, 1)
    g = tf.convert_to_tensor(g)
    m.assign_add((g - m) * 0.1)
    s.assign_add((tf.square(g) - s) * 0.01)
    v.assign_sub(1e-3 * m * o.slots[0] / (tf.sqrt(s) + 1e-3))


def _averaged(o: Updates, v: tf.Variable, g: Any) -> None:
    before = v.read_value()
    v.assign_sub(RATE * tf.convert_to_tensor(g))
    o.slot(v).assign(0.9 * o.slot(v) + 0.05 * (v + before))


def _now_and_then(o: Updates, v: tf.Variable, g: Any) -> None:
    g = tf.convert_to_tensor(g)
    sums = o.slot(v)
    sums.assign_add(g)

    def update() -> tf.Tensor:
        v.assign_sub(RATE * sums)
        sums.assign(tf.zeros_like(sums))
        return tf.constant(True)

    tf.cond(o.slots[0] % 2.0 < 1.0, update, lambda: tf.constant(False))


def _perturbed(o: Updates, v: tf.Variable, g: Any) -> None:
    g = tf.convert_to_tensor(g)
    v.assign_add(0.01 * tf.sign(g))
    norm = tf.reduce_sum(tf.square(v))
    v.assign_sub(0.01 * tf.sign(g) + RATE * g * tf.math.rsqrt(norm + 1.0))


RULES: list[Callable[[Updates, tf.Variable, Any], None]] = [
    _sgd, _momentum, _fused_adam, _adam, _averaged, _now_and_then, _perturbed,
]  # fmt: skip


def penalty(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """A loss on gradients."""
    terms = [tf.reduce_sum(tf.square(g)) for g in gradients if g.dtype.is_floating]
    return tf.add_n([tf.constant(0.0), *terms])


class Draw:
    """What an operation is made from."""

    def __init__(
        self, step: RandomStep, rng: np.random.RandomState, pool: list[tf.Tensor], ids: tf.Tensor
    ) -> None:
        self.weight = step.weight
        self.rng = rng
        self.pool = pool
        self.ids = ids

    def one(self) -> tf.Tensor:
        """A tensor made before, mostly a late one."""
        return self.pool[max(0, len(self.pool) - int(self.rng.geometric(0.5)))]

    def many(self, *counts: int) -> list[tf.Tensor]:
        """As many tensors as one of `counts`."""
        return [self.one() for _ in range(counts[self.rng.randint(len(counts))])]


def _sum(d: Draw) -> tf.Tensor:
    terms = d.many(3, 3, 4, 5, 9, 10, 11)
    return tf.add_n(terms) * len(terms) ** -0.5


def _sum_of_fresh(d: Draw) -> tf.Tensor:
    terms = [(tf.tanh, tf.sin, tf.nn.relu, tf.identity)[d.rng.randint(4)](t) for t in d.many(3, 4)]
    return tf.add_n(terms) * 0.5


def _several_readers(d: Draw) -> tf.Tensor:
    t = d.one()
    return tf.tanh(t) * tf.sigmoid(t) + tf.sin(t) * 0.5 + tf.square(t) * 0.1


def _residual(d: Draw) -> tf.Tensor:
    return d.one() + 0.5 * tf.nn.relu(d.one()) + 0.3 * d.one()


def _dense(d: Draw) -> tf.Tensor:
    return tf.nn.bias_add(d.one() @ d.weight(WIDTH, WIDTH), d.weight(WIDTH))


def _shared_weight(d: Draw) -> tf.Tensor:
    w = d.weight(WIDTH, WIDTH)
    h = d.one()
    for _ in range(3):
        h = tf.tanh(h @ w)
    return h


def _dense_concat(d: Draw) -> tf.Tensor:
    return tf.concat(d.many(2, 3)[:2], 1) @ d.weight(2 * WIDTH, WIDTH)


def _gated(d: Draw) -> tf.Tensor:
    a, b, c = tf.split(d.one() @ d.weight(WIDTH, 3 * WIDTH), 3, axis=1)
    return a * tf.sigmoid(b) + tf.nn.gelu(c)


def _rows(d: Draw) -> tf.Tensor:
    a, b = tf.split(d.one(), 2, axis=0)
    return tf.concat([tf.exp(-tf.square(a)), tf.cos(b)[::-1]], 0)


def _sum_of_rows(d: Draw) -> tf.Tensor:
    t = d.one()
    half = tf.add_n([t[:8], t[8:], tf.tanh(t[4:12])])
    return tf.concat([half, tf.sin(half)], 0)


def _attention(d: Draw) -> tf.Tensor:
    t = d.one()
    q, k, v = (t @ d.weight(WIDTH, WIDTH) for _ in range(3))
    return t + tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 4.0) @ v


def _layer_norm(d: Draw) -> tf.Tensor:
    t = d.one()
    mean, variance = tf.nn.moments(t, [-1], keepdims=True)
    return (t - mean) * tf.math.rsqrt(variance + 1e-3) * d.weight(WIDTH)


def _embedding(d: Draw) -> tf.Tensor:
    return d.one() + tf.gather(d.weight(20, WIDTH), d.ids)


def _gather(d: Draw) -> tf.Tensor:
    return tf.gather(d.one(), [0, 2, 2, 5] * 4)


def _einsum(d: Draw) -> tf.Tensor:
    return tf.einsum("ab,bc->ac", tf.reshape(d.one(), [ROWS, WIDTH]), d.weight(WIDTH, WIDTH))


def _views(d: Draw) -> tf.Tensor:
    t = tf.reshape(tf.expand_dims(tf.transpose(d.one()), 0), [WIDTH, ROWS])
    return tf.transpose(tf.identity(tf.sin(t)))


def _where(d: Draw) -> tf.Tensor:
    a, b = d.one(), d.one()
    return tf.where(a > 0.1, b * 0.5, tf.minimum(a, tf.stop_gradient(b)))


def _top(d: Draw) -> tf.Tensor:
    best, where = tf.math.top_k(d.one(), WIDTH)
    return tf.tanh(best) * tf.cast(where % 3, tf.float32) * 0.5


def _dropout(d: Draw) -> tf.Tensor:
    t = d.one()
    keep = tf.random.stateless_uniform([ROWS, WIDTH], [1, int(d.rng.randint(99))]) < 0.7
    return tf.where(keep, t / 0.7, tf.zeros_like(t))


def _low_precision(d: Draw) -> tf.Tensor:
    w = tf.cast(d.weight(WIDTH, WIDTH), tf.bfloat16)
    terms = [tf.cast(t, tf.bfloat16) for t in d.many(3)]
    return tf.cast(tf.add_n(terms) @ w, tf.float32) * 0.5


def _wide(d: Draw) -> tf.Tensor:
    terms = [tf.cast(t, tf.float64) for t in d.many(3)]
    return tf.cast(tf.tanh(tf.add_n(terms)), tf.float32)


def _conv(d: Draw) -> tf.Tensor:
    return tf.nn.conv2d(d.one(), d.weight(3, 3, CHANNELS, CHANNELS), 1, "SAME")


def _conv_bias(d: Draw) -> tf.Tensor:
    h = tf.nn.bias_add(_conv(d), d.weight(CHANNELS))
    return tf.nn.relu(h) if d.rng.rand() < 0.5 else h


def _conv_pad(d: Draw) -> tf.Tensor:
    h = tf.pad(d.one(), [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.nn.conv2d(h, d.weight(3, 3, CHANNELS, CHANNELS), 1, "VALID")


def _depthwise(d: Draw) -> tf.Tensor:
    return tf.nn.depthwise_conv2d(d.one(), d.weight(3, 3, CHANNELS, 1), [1, 1, 1, 1], "SAME")


def _branches(d: Draw) -> tf.Tensor:
    t = d.one()
    parts = [
        tf.nn.conv2d(t, d.weight(1, 1, CHANNELS, CHANNELS), 1, "SAME"),
        tf.nn.conv2d(t, d.weight(3, 3, CHANNELS, CHANNELS), 1, "SAME"),
        tf.nn.avg_pool2d(t, 3, 1, "SAME"),
    ]
    h = tf.concat(parts, -1)
    return tf.nn.relu(tf.nn.conv2d(h, d.weight(1, 1, 3 * CHANNELS, CHANNELS), 1, "SAME"))


def _fused_norm(d: Draw) -> tf.Tensor:
    h, _, _ = tf.compat.v1.nn.fused_batch_norm(d.one(), d.weight(CHANNELS), d.weight(CHANNELS))
    return tf.nn.relu(h) if d.rng.rand() < 0.5 else h


def _norm(d: Draw) -> tf.Tensor:
    t = d.one()
    mean, variance = tf.nn.moments(t, [0, 1, 2])
    return tf.nn.swish(tf.nn.batch_normalization(t, mean, variance, None, None, 1e-3))


def _pool(d: Draw) -> tf.Tensor:
    return tf.nn.max_pool2d(d.one(), 3, 1, "SAME")


def _down_and_up(d: Draw) -> tf.Tensor:
    t = tf.nn.avg_pool2d(d.one(), 2, 2, "SAME")
    t = tf.nn.relu(tf.nn.conv2d(t, d.weight(3, 3, CHANNELS, CHANNELS), 1, "SAME"))
    return tf.repeat(tf.repeat(t, 2, axis=1), 2, axis=2)


def _squeeze_and_excite(d: Draw) -> tf.Tensor:
    t = d.one()
    s = tf.sigmoid(tf.reduce_mean(t, [1, 2]) @ d.weight(CHANNELS, CHANNELS))
    return t * s[:, None, None, :]


def _channels(d: Draw) -> tf.Tensor:
    a, b = tf.split(d.one(), 2, axis=-1)
    return tf.concat([tf.tanh(b), a * tf.sigmoid(b)], -1)


def _relu(d: Draw) -> tf.Tensor:
    return tf.nn.relu(d.one())


Kind = Callable[[Draw], Any]
COMMON: list[Kind] = [_sum, _sum_of_fresh, _several_readers, _residual]
MATRIX: list[Kind] = [
    *COMMON, _dense, _shared_weight, _dense_concat, _gated, _rows, _sum_of_rows, _attention,
    _layer_norm, _embedding, _gather, _einsum, _views, _where, _top, _dropout, _low_precision,
    _wide,
]  # fmt: skip
IMAGE: list[Kind] = [
    *COMMON, _conv, _conv_bias, _conv_pad, _depthwise, _branches, _fused_norm, _norm, _pool,
    _down_and_up, _squeeze_and_excite, _channels, _relu,
]  # fmt: skip
