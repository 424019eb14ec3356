"""One real training step in a process of its own, driven by requests on standard input.

Run as `python -m optckpt.measure_step` by `optckpt.step_process`. A process measures one
version of the step: its allocator has seen nothing else, and if it runs out of memory nothing
else dies. Requests and replies are JSON objects, one a line; a reply is {"done": ...} or
{"error": kind, "message": ...}, and {"progress": text} may come before it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optckpt.config import Config, parse_config
from optckpt.errors import OptckptError

logger = logging.getLogger("optckpt.measure_step")

PEAK_STEPS = 3
"""Steps over which the highest peak is taken."""
TRAINED_STEPS = 2
"""Steps whose gradients are recorded; the weights are updated in between."""
LEARNING_RATE = 1e-3


class _Session:
    """The model, and the step as it was traced."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.tf = tf
        self.config = Config()
        self.model: Any = None
        self.function: Any = None
        self.device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"

    def load(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the model's variables and its batch."""
        from optckpt import models

        self.config = parse_config(config)
        self.model = models.build(self.config.model)
        return {}

    def build(self, plan: str | None) -> dict[str, Any]:
        """Trace the step under the plan in this file, or as tf.gradients makes it (None)."""
        compute: Callable[[Any, Any], Any]
        if plan is None:
            compute = self.tf.gradients
        else:
            from optckpt import gradients

            def compute(ys: Any, xs: Any) -> Any:
                return gradients(ys, xs, plan=plan, config=self.config)

        begin = time.perf_counter()
        self.function = self._traced(compute)
        return {"seconds": time.perf_counter() - begin}

    def capture(self, path: str, plain_path: str) -> dict[str, Any]:
        """Trace the plain step, measure its costs, save two TrainingGraphs.

        One to plan under `path`, and the step before any rewriting under `plain_path`.
        """
        from optckpt import device
        from optckpt.pipeline import allocator_of, measure
        from optckpt.step import capture_gradients

        seen: list[Any] = []

        def compute(ys: Any, xs: Any) -> Any:
            result = self.tf.gradients(ys, xs)
            seen.append(capture_gradients(ys, result, self.config))
            return result

        begin = time.perf_counter()
        self._traced(compute)
        traced = time.perf_counter()
        found = seen[0]
        graph = measure(found, self.config, progress=_report_costs)
        graph = replace(graph, name=self.model.name)
        graph.save(path)
        found.plain(graph).save(plain_path)
        allocator = allocator_of(found)
        return {
            "allocator": None if allocator is None else allocator.to_json(),
            "device": found.device,
            "limit": device.memory_limit(found.device),
            "trace_seconds": traced - begin,
            "cost_seconds": time.perf_counter() - traced,
        }

    def peak(self, warmup: int) -> dict[str, Any]:
        """Highest allocator peak (bytes) over some steps; None where it is not tracked."""
        memory = self.tf.config.experimental
        for _ in range(warmup):
            self._run()
        peaks = []
        for _ in range(PEAK_STEPS):
            try:
                memory.reset_memory_stats(self.device)
            except ValueError:
                return {"peak": None}
            self._run()
            peaks.append(memory.get_memory_info(self.device)["peak"])
        return {"peak": max(peaks) or None}

    def gradients(self, path: str) -> dict[str, Any]:
        """Train some steps and write their losses and gradients, and the state, as .npz.

        Without the graph optimiser, whose fusions depend on the graph and move the last bits.
        """
        import numpy as np

        tf = self.tf
        kept: dict[str, Any] = {}
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        try:
            for step in range(TRAINED_STEPS):
                loss, gradients = self.function(*self.model.inputs)
                kept[f"{step}/loss"] = loss.numpy()
                for i, (variable, value) in enumerate(
                    zip(self.model.variables, gradients, strict=True)
                ):
                    if value is None:
                        continue
                    for j, part in enumerate(tf.nest.flatten(value, expand_composites=True)):
                        kept[f"{step}/gradient{i}.{j}"] = part.numpy()
                    if isinstance(value, tf.IndexedSlices):
                        # TensorFlow's scatter adds rows of one index in no fixed order.
                        dense = np.zeros(variable.shape, variable.dtype.as_numpy_dtype)
                        np.add.at(dense, value.indices.numpy(), value.values.numpy())
                        value = dense
                    variable.assign_sub(LEARNING_RATE * value)
        finally:
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
        for i, variable in enumerate(self.model.state):
            kept[f"state{i}"] = variable.numpy()
        np.savez(path, **kept)
        return {"arrays": len(kept)}

    def duration(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._run()
        return {"seconds": time.perf_counter() - begin}

    def _traced(self, compute: Callable[[Any, Any], Any]) -> Any:
        model = self.model

        def step(*inputs: Any) -> Any:
            loss = model.loss(*inputs)
            return loss, compute(loss, list(model.variables))

        function = self.tf.function(step, autograph=False)
        function.get_concrete_function(*model.inputs)
        return function

    def _run(self) -> None:
        # Fetching the loss waits for it; results die here, so that the next step starts clean.
        result = self.function(*self.model.inputs)
        for part in self.tf.nest.flatten(result, expand_composites=True)[:1]:
            part.numpy()


def _report_costs(done: int, total: int, name: str) -> None:
    _reply({"progress": f"measuring operation {done} of {total}: {name}"})


def _reply(message: dict[str, Any]) -> None:
    _channel.write(json.dumps(message) + "\n")
    _channel.flush()


def _answer(session: _Session, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": getattr(session, request.pop("do"))(**request)}
    except session.tf.errors.ResourceExhaustedError as e:
        return {"error": "out of memory", "message": str(e).split("\n")[0]}
    except OptckptError as e:
        return {"error": "refused", "message": str(e)}
    except Exception as e:
        logger.exception("the step failed")
        return {"error": "failed", "message": f"{type(e).__name__}: {e}".split("\n")[0]}


def main() -> None:
    """Answer requests until the input ends."""
    session = _Session()
    for line in sys.stdin:
        _reply(_answer(session, json.loads(line)))


if __name__ == "__main__":
    # What libraries print must not get between the replies.
    _channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main()
