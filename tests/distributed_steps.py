"""One process of a distributed training run: `python -m tests.distributed_steps SPEC OUT`.

SPEC is JSON: `strategy` ("mirrored": two logical CPUs; "workers": as TF_CONFIG says) and `runs`, a
list of {"way", "budget"}. Each run trains a small network afresh for some steps; OUT.npz gets its
losses and variables, OUT.json what was planned and what is in the graph. All run without the graph
optimiser, so that equal means equal in every bit.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import optckpt
from optckpt import reuse
from optckpt.config import Config

STEPS = 3
ROWS, WIDTH = 2048, 192
PARTIAL = 896
"""Rows of a batch, of which the last one of an epoch has fewer."""
CONFIG = Config.model_validate(
    {
        "costs": {"model": "flops"},
        "plans": {"cache": False},
        "solver": {"gap": 0.05, "time_limit": 10.0},
    }
)
X = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(ROWS, 1)).astype(np.float32)


def main() -> None:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(level=logging.WARNING)
    if spec["strategy"] == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    arrays: dict[str, np.ndarray] = {}
    found = []
    for number, run in enumerate(spec["runs"]):
        watch = _Watch()
        train = fit if run["way"].startswith("fit") else custom
        losses, values = train(strategy, run["way"], run.get("budget"), watch)
        arrays[f"{number}/losses"] = np.array(losses, np.float32)
        for i, value in enumerate(values):
            arrays[f"{number}/{i}"] = value
        found.append(watch.report())
    np.savez(out.with_suffix(".npz"), **arrays)
    out.with_suffix(".json").write_text(json.dumps(found))


_solve = reuse.Problem.solve


class _Watch:
    """What is planned, and the graph of the step."""

    def __init__(self) -> None:
        self.plans: list[optckpt.Plan] = []
        self.solves = 0
        self.graph: Any = None

        def counted(problem: reuse.Problem, start: Any = None) -> optckpt.Plan:
            self.solves += 1
            return _solve(problem, start)

        reuse.Problem.solve = counted  # type: ignore[method-assign]

    def see(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()

    def report(self) -> dict[str, Any]:
        operations = self.graph.get_operations()
        again = [op for op in operations if "_again" in op.name]
        originals = {op: op.name.rpartition("optckpt/")[2].partition("_again")[0] for op in again}
        misplaced = [
            op.name
            for op, name in originals.items()
            if op.device != self.graph.get_operation_by_name(name).device
        ]
        return {
            "solves": self.solves,
            "sources": [plan.source for plan in self.plans],
            "schedules": [list(plan.schedule.executions) for plan in self.plans],
            "clones": dict(Counter(op.device[-5:] for op in again)),
            "misplaced": misplaced,
            "collectives": [op.type for op in operations if op.type.startswith("Collective")],
        }


def custom(strategy: Any, way: str, budget: str | None, watch: _Watch) -> tuple[list[Any], Any]:
    """A loop of one's own. `way`: plain, gradients or whole, with Adam; after "-each", with an
    all-reduce per variable."""
    kind, _, each = way.partition("-")
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            tf.Variable(
                rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 14,
                aggregation=tf.VariableAggregation.MEAN,
            )
            for _ in range(8)
        ]
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(weights)

    def loss_of(x: Any) -> Any:
        for w in weights:
            x = tf.tanh(x @ w) * 1.5
        return tf.reduce_mean(x * x)

    def update(gradients: Any) -> None:
        if each:
            for w, g in zip(weights, gradients, strict=True):
                w.assign_sub(0.1 * g)
        else:
            optimizer.apply_gradients(zip(gradients, weights, strict=True))

    def replica(x: Any) -> Any:
        watch.see()
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = x * (1.0 + tf.cast(number, tf.float32))
        options = {"budget": budget, "config": CONFIG, "on_plan": watch.plans.append}
        if kind == "gradients":
            loss = loss_of(x)
            update(optckpt.gradients(loss, weights, **options))
            return loss
        if kind == "whole":
            with optckpt.whole_step(**options) as step:
                with tf.GradientTape() as tape:
                    loss = loss_of(x)
                update(tape.gradient(loss, weights))
                step.keep(loss)
            return loss
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        update(tape.gradient(loss, weights))
        return loss

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        losses = strategy.run(replica, args=(x,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, None)

    losses = [step(tf.constant(X)).numpy() for _ in range(STEPS)]
    return losses, [w.numpy() for w in weights]


def fit(strategy: Any, way: str, budget: str | None, watch: _Watch) -> tuple[list[Any], Any]:
    """Keras' own fit. `way`: with "-partial", of arrays whose last batch is smaller."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    with strategy.scope():
        stack = [
            layer
            for i in range(4)
            for layer in (
                layers.Dense(WIDTH, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dropout(0.1, seed=i),
            )
        ]
        model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *stack, layers.Dense(1)])
        model.compile(tf.keras.optimizers.Adam(1e-3), loss="mse", metrics=["mae"])
    stock = model.train_step

    def train_step(data: Any) -> Any:
        watch.see()
        return stock(data)

    model.train_step = train_step
    half = ROWS // 4

    def rows(context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(half, drop_remainder=True)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).repeat()

    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        # Keras 3 cannot fit by itself here: it reduces a tuple before the first step, and means
        # of scalars along their first axis after each.
        with strategy.scope():
            model._symbolic_build(data_batch=(X[:half], Y[:half]))
        model._maybe_symbolic_build = lambda iterator=None, data_batch=None: None
        model.train_step = lambda data: tf.nest.map_structure(
            lambda value: tf.reshape(value, [1]), train_step(data)
        )
    if budget is not None:
        optckpt.keras.apply(model, budget, config=CONFIG, on_plan=watch.plans.append)
    if "-partial" in way:
        history = model.fit(X, Y, batch_size=PARTIAL, epochs=STEPS, verbose=0, shuffle=False)
    else:
        history = model.fit(
            strategy.distribute_datasets_from_function(rows),
            steps_per_epoch=2,
            epochs=STEPS,
            verbose=0,
            shuffle=False,
        )
    return history.history["loss"], [w.numpy() for w in model.weights]


if __name__ == "__main__":
    main()
