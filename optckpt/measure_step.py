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
from dataclasses import replace
from typing import Any

from optckpt.config import Config, parse_config
from optckpt.errors import OptckptError

logger = logging.getLogger("optckpt.measure_step")

PEAK_STEPS = 3
"""Steps over which the highest peak is taken."""
TRAINED_STEPS = 2
"""Steps whose results are recorded; the variables are updated in between."""


class _Session:
    """The workload, and its step as it was traced."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.tf = tf
        self.config = Config()
        self.work: Any = None
        self.function: Any = None
        self.device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"

    def load(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create the variables and the batch."""
        from optckpt import workload

        self.config = parse_config(config)
        self.work = workload.load(self.config)
        return {"name": self.work.name}

    def build(self, plan: str | None) -> dict[str, Any]:
        """Trace the step under the plan in this file, or as TensorFlow makes it (None)."""
        begin = time.perf_counter()
        self.function = self.work.traced(plan, self.config)
        return {"seconds": time.perf_counter() - begin}

    def capture(self, path: str, plain_path: str) -> dict[str, Any]:
        """Trace the plain step, measure its costs, save two TrainingGraphs.

        One to plan under `path`, and the step before any rewriting under `plain_path`.
        """
        from optckpt import device
        from optckpt.pipeline import allocator_of, measure

        begin = time.perf_counter()
        found = self.work.captured(self.config)
        traced = time.perf_counter()
        graph = measure(found, self.config, progress=_report_costs)
        graph = replace(graph, name=self.work.name)
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
        """Train some steps and write what they give, and the state at the end, as .npz.

        Without the graph optimiser, whose fusions depend on the graph and move the last bits.
        """
        import numpy as np

        options = self.tf.config.optimizer
        options.set_experimental_options({"disable_meta_optimizer": True})
        try:
            kept = self.work.record(self.function, TRAINED_STEPS)
        finally:
            options.set_experimental_options({"disable_meta_optimizer": False})
        np.savez(path, **kept)
        return {"arrays": len(kept)}

    def duration(self, steps: int) -> dict[str, Any]:
        """Seconds of `steps` steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._run()
        return {"seconds": time.perf_counter() - begin}

    def _run(self) -> None:
        # Fetching the loss waits for it; results die here, so that the next step starts clean.
        result = self.function(*self.work.inputs)
        for part in self.tf.nest.flatten(result, expand_composites=True)[:1]:
            part.numpy()


def _report_costs(done: int, total: int, name: str) -> None:
    _reply({"progress": f"measuring operation {done} of {total}: {name}"})


def _reply(message: dict[str, Any]) -> None:
    _channel.write(json.dumps(message) + "\n")
    _channel.flush()


def _told(error: Exception) -> str:
    """The line that says what was too large, else the first that says something."""
    lines = [line.strip() for line in str(error).split("\n")]
    lines = [line for line in lines if line and line != "Graph execution error:"]
    return next((line for line in lines if "OOM" in line), lines[0] if lines else "no memory left")


def _answer(session: _Session, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"done": getattr(session, request.pop("do"))(**request)}
    except session.tf.errors.ResourceExhaustedError as e:
        return {"error": "out of memory", "message": _told(e)}
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
