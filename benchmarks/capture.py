"""What capture and rewrite add to tracing, in one table.

    python benchmarks/capture.py [--rounds 3] [--budget 50%] [MODEL ...]

MODEL is a reference network or a class of keras.applications (DenseNet121). Its step is traced anew
in each round, plain and within the budget along an optimal schedule, in turns in one process:

- gradients: the loss and its gradients, `optckpt.gradients`;
- whole step: with Adam's update, `optckpt.whole_step`;
- whole step, any batch: the same for an unknown batch size, as in `fit`.

Not counted are measuring (operations are costed by their FLOPs) and solving (once, in the first
round). The seconds are the least of the rounds. Tracing is without AutoGraph, which would make it
slower and the shares smaller. capture.md and capture.json are written into the folder of --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from machine import described, facts

import optckpt
from optckpt import models, pipeline
from optckpt import step as steps
from optckpt.config import Config, load_config
from optckpt.graph import write_text

CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = ("resnet_cifar10", "gpt", "mobilenetv2", "DenseNet121", "ResNet50")
WAYS = ("gradients", "whole step", "whole step, any batch")
SIZE, BATCH = 64, 16


@dataclass(frozen=True)
class Row:
    """Least seconds of some rounds, and what the graph was."""

    network: str
    way: str
    operations: int
    """TensorFlow operations in the plain graph."""
    clones: int
    plain: float
    """Seconds to trace the plain step."""
    traced: float
    """Seconds to trace the planned one, less those of measuring and solving."""
    capture: float
    rewrite: float
    """Seconds in it."""

    @property
    def share(self) -> float:
        """Of plain tracing, what is added to it."""
        return (self.traced - self.plain) / self.plain


class Network:
    """A loss of some inputs, and the variables that are trained."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loss: Callable[..., tf.Tensor]
        self.any_batch = name not in models.REGISTRY
        if not self.any_batch:
            params = load_config(CONFIGS / f"{name}.yaml").model
            assert params is not None
            step = models.build(params)
            self.loss, self.inputs, self.variables = step.loss, step.inputs, list(step.variables)
        else:
            model = getattr(keras.applications, name)(
                weights=None, input_shape=(SIZE, SIZE, 3), classes=10
            )
            self.inputs = (tf.zeros((BATCH, SIZE, SIZE, 3)), tf.zeros((BATCH, 10)))
            self.loss = lambda images, labels: tf.reduce_mean(
                keras.losses.categorical_crossentropy(labels, model(images, training=True))
            )
            self.variables = [v.value for v in model.trainable_variables]
        self.adam = keras.optimizers.Adam()
        self.adam.build(self.variables)

    def step(self, way: str, budget: str | None) -> Callable[..., tf.Tensor]:
        """What is to be traced: plain without a budget."""
        settings = {"costs": {"model": "flops"}, "plans": {"cache": False}}
        if way.endswith("any batch"):
            settings["sizes"] = {"batch": BATCH}
        config = Config.model_validate(settings)

        def gradients(*inputs: tf.Tensor) -> Any:
            loss = self.loss(*inputs)
            if budget is None:
                return tf.gradients(loss, self.variables)
            return optckpt.gradients(loss, self.variables, budget=budget, config=config)

        def update(*inputs: tf.Tensor) -> tf.Tensor:
            loss = self.loss(*inputs)
            found = tf.gradients(loss, self.variables)
            self.adam.apply_gradients(zip(found, self.variables, strict=True))
            return loss

        def whole(*inputs: tf.Tensor) -> tf.Tensor:
            if budget is None:
                return update(*inputs)
            with optckpt.whole_step(budget, config=config) as scope:
                loss = update(*inputs)
                scope.keep(loss)
            return loss

        return gradients if way == "gradients" else whole

    def specs(self, way: str) -> list[tf.TensorSpec]:
        """Of the inputs."""
        batch = slice(1, None) if way.endswith("any batch") else slice(0, None)
        return [
            tf.TensorSpec([None] * (len(t.shape) - len(t.shape[batch])) + t.shape[batch], t.dtype)
            for t in self.inputs
        ]


@contextmanager
def timed(module: Any, name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Within the context, what calls of the module's function take is added to seconds[name]."""
    function = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    with mock.patch.object(module, name, call):
        yield


def trace(network: Network, way: str, budget: str | None) -> tuple[dict[str, float], tf.Graph]:
    """Seconds of one tracing and of its parts, and the graph."""
    seconds: dict[str, float] = {}
    function = tf.function(network.step(way, budget), autograph=False)
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(timed(steps, "capture", seconds))
        for name in ("measure", "plan_once", "rewrite"):
            stack.enter_context(timed(pipeline, name, seconds))
        begin = time.perf_counter()
        concrete = function.get_concrete_function(*network.specs(way))
        seconds["all"] = time.perf_counter() - begin
    return seconds, concrete.graph


def row(network: Network, way: str, budget: str, rounds: int) -> Row:
    """Trace `rounds` times, plain and planned in turns."""
    plain, planned = [], []
    operations = clones = 0
    for _ in range(rounds):
        seconds, graph = trace(network, way, None)
        operations = len(graph.get_operations())
        plain.append(seconds["all"])
        planned.append(trace(network, way, budget)[0])
        executions = optckpt.last_plan().schedule.executions
        clones = len(executions) - len(set(executions))
    return Row(
        network=network.name,
        way=way,
        operations=operations,
        clones=clones,
        plain=min(plain),
        traced=min(s["all"] - s["measure"] - s["plan_once"] for s in planned),
        capture=min(s["capture"] for s in planned),
        rewrite=min(s["rewrite"] for s in planned),
    )


HEAD = """\
| network | step | operations | executed again | tracing, s | capture, s | rewrite, s | added, % |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(r: Row) -> str:
    """One line of the Markdown table."""
    cells = (
        r.network, r.way, str(r.operations), str(r.clones), f"{r.plain:.2f}", f"{r.capture:.2f}",
        f"{r.rewrite:.2f}", f"{100 * r.share:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def report(rows: Sequence[Row], budget: str, folder: Path) -> None:
    """Write capture.md and capture.json."""
    where = facts()
    table = "\n".join(map(line, rows))
    text = f"""\
# Capture and rewrite beside tracing

Made by `python benchmarks/capture.py`. Machine: {described(where)}.

Each step is traced plain and within {budget} of its plain peak along an optimal schedule, in turns
in one process; the least of some rounds counts. Networks of keras.applications: {BATCH} images of
{SIZE}x{SIZE}.

- **tracing**: of the plain step.
- **added**: what tracing the planned step takes more, without measuring and solving, as a share.
- **executed again**: units of the plan that run once more.

{HEAD}
{table}
"""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "capture.md", text)
    data = {"format": "optckpt.capture-benchmark", "version": 1, "machine": where}
    results = [{**asdict(r), "share": r.share} for r in rows]
    write_text(folder / "capture.json", json.dumps({**data, "results": results}, indent=1))


def main() -> None:
    """Print the table, a row as soon as it is known, and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="50%", help="of the plain peak (50%%)")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    rows = []
    print(HEAD)
    for name in given.models or MODELS:
        network = Network(name)
        for way in WAYS:
            if way.endswith("any batch") and not network.any_batch:
                continue
            rows.append(row(network, way, given.budget, given.rounds))
            print(line(rows[-1]), flush=True)
    report(rows, given.budget, given.out)


if __name__ == "__main__":
    main()
