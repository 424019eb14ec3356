"""What capture and rewrite cost beside tracing, in one table.

    python benchmarks/capture.py [--rounds 3] [MODEL ...]

MODEL is a reference network or a class of tf.keras.applications (DenseNet121). Each round traces
the loss and its gradients afresh, captures the graph and rewrites it for the schedule of `sqrt_n`
(without a budget, operations costed by their FLOPs); the seconds are the least of the rounds,
all in one process. Tracing is without AutoGraph, which would make it slower and the share smaller.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from optckpt import costs, models
from optckpt.backends.tensorflow import rewrite
from optckpt.config import Config, load_config
from optckpt.planner import make_plan
from optckpt.schedule import Schedule
from optckpt.solvers.registry import SolveOptions
from optckpt.step import capture_gradients

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = ("resnet_cifar10", "unet", "gpt", "vgg16", "mobilenetv2", "DenseNet121")

Loss = Callable[[], tf.Tensor]


@dataclass(frozen=True)
class Round:
    """Seconds of one round, and what the graph was."""

    tracing: float
    capture: float
    rewrite: float
    operations: int
    """TensorFlow operations in the graph before the rewrite."""
    units: int
    clones: int


def network(name: str) -> tuple[Loss, list[Any]]:
    """The loss of a network on a small synthetic batch, and its variables."""
    if name in models.REGISTRY:
        params = load_config(CONFIGS / f"{name}.yaml").model
        assert params is not None
        step = models.build(params)
        return lambda: step.loss(*step.inputs), list(step.variables)
    keras = getattr(tf.keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)
    images, labels = tf.zeros((4, 64, 64, 3)), tf.zeros((4, 10))

    def loss() -> tf.Tensor:
        found = keras(images, training=True)
        return tf.reduce_mean(tf.keras.losses.categorical_crossentropy(labels, found))

    return loss, [v.value for v in keras.trainable_variables]


def rounds(loss: Loss, variables: list[Any], count: int) -> list[Round]:
    """Trace, capture and rewrite `count` times."""
    settings = Config()
    schedules: dict[str, Schedule] = {}
    found: list[Round] = []

    def step() -> list[tf.Tensor]:
        start = time.perf_counter()
        y = loss()
        gradients = tf.gradients(y, variables)
        traced = time.perf_counter()
        operations = len(y.graph.get_operations())
        begin = time.perf_counter()
        captured = capture_gradients(y, gradients, settings)
        end = time.perf_counter()
        key = captured.graph.fingerprint
        if key not in schedules:
            graph = costs.cost(captured, "flops")
            schedules[key] = make_plan(graph, None, "sqrt_n", SolveOptions()).schedule
        report = rewrite(captured, schedules[key])
        found.append(
            Round(
                tracing=traced - start,
                capture=end - begin,
                rewrite=report.seconds,
                operations=operations,
                units=len(captured.units),
                clones=len(report.clones),
            )
        )
        return [g for g in gradients if g is not None]

    for _ in range(count):
        tf.function(step, autograph=False).get_concrete_function()
    return found


def row_text(name: str, found: list[Round]) -> str:
    """One line of the Markdown table."""
    tracing = min(r.tracing for r in found)
    capture = min(r.capture for r in found)
    rewriting = min(r.rewrite for r in found)
    cells = (
        name, str(found[0].operations), str(found[0].units), str(found[0].clones),
        f"{tracing:.3f}", f"{capture:.3f}", f"{rewriting:.3f}",
        f"{100 * (capture + rewriting) / tracing:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = """\
| network | operations | units | clones | tracing, s | capture, s | rewrite, s | share, % |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(HEAD)
    for name in arguments.models or MODELS:
        print(row_text(name, rounds(*network(name), arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
