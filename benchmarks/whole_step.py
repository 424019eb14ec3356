"""Whole steps in which each variable is updated as soon as its gradient is there: peaks, no more.

    python benchmarks/whole_step.py [--network vgg16] [--batch 4 --size 32]

The network is trained with each optimizer, plain and in `optckpt.whole_step` with a budget that
asks for nothing: no operation is executed again. Every run is a process of its own, with
TensorFlow's graph optimiser off; peaks are those that the allocator reports in any step but the
first. How much the plain step needs depends on how many operations TensorFlow runs at the same
time: once there are gradients, as many updates as it has threads between operations keep their
temporaries.
whole_step.md and whole_step.json are written into the folder of --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import described, facts

from optckpt.graph import write_text

OPTIMIZERS = ("SGD", "momentum", "Adam", "AdamW", "Adam, clipnorm")
THREADS = (2, 8)
STEPS = 5
CASES = ((4, 32), (16, 64))

Record = dict[str, Any]


def train(case: Record) -> Record:
    """Peaks (bytes) of the steps but the first, losses, a digest of all variables at the end."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    import optckpt
    from optckpt import models
    from optckpt.config import Config

    tf.config.threading.set_inter_op_parallelism_threads(case["threads"])
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    model = {"name": case["network"], "batch_size": case["batch"], "image_size": case["size"]}
    config = Config.model_validate({"model": model, "plans": {"cache": False}})
    assert config.model is not None
    network = models.build(config.model)
    variables = list(network.variables)
    optimizer = {
        "SGD": lambda: keras.optimizers.SGD(1e-2),
        "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
        "Adam": lambda: keras.optimizers.Adam(1e-3),
        "AdamW": lambda: keras.optimizers.AdamW(1e-3),
        "Adam, clipnorm": lambda: keras.optimizers.Adam(1e-3, clipnorm=1.0),
    }[case["optimizer"]]()
    optimizer.build(variables)

    def update() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = network.loss(*network.inputs)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def step() -> tf.Tensor:
        if not case["planned"]:
            return update()
        with optckpt.whole_step("1TiB", config=config) as scope:
            loss = update()
            scope.keep(loss)
        return loss

    losses, peaks = [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        losses.append(float(step()))
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    digest = hashlib.sha256()
    for v in (*variables, *optimizer.variables):
        digest.update(v.numpy().tobytes())
    resident = tf.config.experimental.get_memory_info("CPU:0")["current"]
    record = {"peaks": peaks[1:], "losses": losses, "digest": digest.hexdigest()}
    if case["planned"]:
        executions = optckpt.last_plan().schedule.executions
        record["re_executions"] = len(executions) - len(set(executions))
    return {**record, "resident": resident}


def run(case: Record) -> Record:
    """`train` in a process of its own. Raises RuntimeError with the end of what it wrote."""
    done = subprocess.run(
        [sys.executable, __file__, "--run", json.dumps(case)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(case: Record) -> Record:
    """The plain step beside the planned one; peaks in bytes."""
    plain, planned = (run({**case, "planned": p}) for p in (False, True))
    return {
        **case,
        "resident": planned["resident"],
        "plain_peaks": plain["peaks"],
        "peaks": planned["peaks"],
        "re_executions": planned["re_executions"],
        "equal": plain["digest"] == planned["digest"] and plain["losses"] == planned["losses"],
    }


HEAD = """\
| images | batch | optimizer | threads | resident, MiB | plain, MiB | early updates, MiB | less, % \
| executed again | equal |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(r: Record) -> str:
    """One row of the Markdown table."""
    low, high = min(r["plain_peaks"]), max(r["plain_peaks"])
    ours = max(r["peaks"])
    cells = [
        f"{r['size']}x{r['size']}", str(r["batch"]), r["optimizer"], str(r["threads"]),
        f"{r['resident'] / 2**20:.1f}", f"{low / 2**20:.1f} - {high / 2**20:.1f}",
        f"{ours / 2**20:.1f}", f"{100 * (1 - ours / low):.1f} - {100 * (1 - ours / high):.1f}",
        str(r["re_executions"]), "yes" if r["equal"] else "no",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def report(network: str, records: Sequence[Record], folder: Path) -> None:
    """Write whole_step.md and whole_step.json."""
    where = facts()
    rows = "\n".join(map(line, records))
    text = f"""\
# Early updates alone

Made by `python benchmarks/whole_step.py`. Machine: {described(where)}.

{network} is trained for {STEPS} steps, plain and in `optckpt.whole_step`, without recomputation:
what is saved is that no gradient waits for the others. Steps after the first; TensorFlow's graph
optimiser is off.

- **threads**: between operations (`inter_op_parallelism_threads`). The plain step runs as many
  updates at the same time, each with its temporaries, so that its peak differs from step to step.
- **resident**: variables, the optimizer's slots, images.
- **plain**: the lowest and the highest peak; **less**: against each of them.
- **equal**: in every bit: losses, weights and slots.

{HEAD}
{rows}
"""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "whole_step.md", text)
    data = {"format": "optckpt.whole-step-benchmark", "version": 1, "machine": where}
    write_text(folder / "whole_step.json", json.dumps({**data, "results": records}, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases one after the other and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="vgg16", help="(%(default)s)")
    parser.add_argument("--batch", type=int, help="together with --size, in the place of "
                        + ", ".join(f"{b} of {s}x{s}" for b, s in CASES))  # fmt: skip
    parser.add_argument("--size", type=int, help="height and width of an image, in pixels")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        print(json.dumps(train(json.loads(given.run))))
        return
    if (given.batch is None) != (given.size is None):
        parser.error("--batch and --size go together")
    records = []
    print(HEAD)
    for batch, size in CASES if given.size is None else ((given.batch, given.size),):
        for optimizer in OPTIMIZERS:
            for threads in THREADS:
                case = {"network": given.network, "batch": batch, "size": size}
                records.append(compared({**case, "optimizer": optimizer, "threads": threads}))
                print(line(records[-1]), flush=True)
    report(given.network, records, given.out)


if __name__ == "__main__":
    main()
