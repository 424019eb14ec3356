"""`fit` of networks of keras.applications, plain and within a budget, in one table.

    python benchmarks/keras_applications.py [CASE ...] [--share 0.5] [--calibrate seen]

A CASE is a class of keras.applications, perhaps with image size and batch size:
MobileNetV2:96:16. Each is trained for two epochs of three batches and a half (Adam, random images,
classes=10, no pretrained weights), first plain, then within the budget: a share of the plain run's
measured peak, or 1.1 x the floor where that is higher. Every run has a process of its own, with
TensorFlow's graph optimiser off. Before each batch the allocator's statistics are reset; its peak
is read after it. Compared are the losses of all batches, and all variables at the end: weights,
moving averages, the optimizer's.

Each run's figures are appended at once to keras_applications.jsonl in the folder of --cache; what
is there is not run again, so that an interrupted benchmark goes on where it stopped. At the end
keras_applications.md and .json are written into the folder of --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import described, facts

from optckpt.graph import write_text

CASES = ("ResNet50:96:16", "MobileNetV2:96:16", "DenseNet121:64:16", "EfficientNetB0:96:16")
SIZE, BATCH = 96, 16
EPOCHS, FULL_BATCHES = 2, 3
ABOVE_FLOOR = 1.1
CALIBRATE: dict[str, bool | str] = {"seen": "seen", "true": True, "false": False}
TIME_LIMIT = 120.0
"""Of the solver, in seconds: more than it needs, should the machine be busy."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What one process trains."""

    model: str
    """A class of keras.applications."""
    size: int
    """Height and width of an image, in pixels."""
    batch: int
    kind: str
    """plain; probe: one step, to learn the floor; planned: within the budget."""
    budget: int | None = None
    """Bytes."""
    calibrate: bool | str = "seen"
    """Of a planned run, as in `optckpt.keras.apply`."""

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


def parse_case(text: str) -> Run:
    """MODEL[:SIZE[:BATCH]]. Raises ValueError if it is not."""
    name, *numbers = text.split(":")
    if len(numbers) > 2 or not name.isidentifier():
        raise ValueError(f"{text!r} is not MODEL:SIZE:BATCH")
    size, batch = (int(n) for n in [*numbers, *(str(d) for d in (SIZE, BATCH)[len(numbers) :])])
    return Run(name, size, batch, "plain")


# --- In a process of its own ------------------------------------------------------------------


def train(run: Run, weights: Path) -> Record:
    """Train as `run` says; all variables are saved to `weights`, one after the other.

    Sizes are bytes. `losses` and `peaks` have one entry for each batch, `cpu_seconds` is the median
    of the full batches after the first.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    import optckpt.keras
    from optckpt.config import Config

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    keras.utils.set_random_seed(0)
    shape = (run.size, run.size, 3)
    model = getattr(keras.applications, run.model)(weights=None, input_shape=shape, classes=10)
    count = run.batch * FULL_BATCHES + run.batch // 2
    random = np.random.default_rng(0)
    images = random.standard_normal((count, *shape), dtype=np.float32)
    labels = random.integers(0, 10, count)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    if run.kind != "plain":
        settings = {"plans": {"cache": False}, "solver": {"time_limit": TIME_LIMIT}}
        optckpt.keras.apply(
            model,
            run.budget,
            calibrate=run.calibrate if run.kind == "planned" else False,
            strategy="store_all" if run.kind == "probe" else None,
            config=Config.model_validate(settings),
        )

    losses: list[float] = []
    peaks: list[int] = []
    seconds: list[float] = []

    class Watch(keras.callbacks.Callback):
        begin = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            tf.config.experimental.reset_memory_stats("CPU:0")
            self.begin = time.process_time()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds.append(time.process_time() - self.begin)
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
            losses.append(float(logs["loss"]))

    epochs, steps = (1, 1) if run.kind == "probe" else (EPOCHS, None)
    model.fit(
        images, labels, run.batch, epochs, verbose=0, callbacks=[Watch()], steps_per_epoch=steps
    )
    variables = [*model.variables, *model.optimizer.variables]
    np.save(weights, np.concatenate([v.numpy().astype(np.float64).ravel() for v in variables]))
    per_epoch = len(losses) // epochs
    full = [s for k, s in enumerate(seconds) if k and (k + 1) % per_epoch]
    record: Record = {
        "losses": losses,
        "peaks": peaks,
        "cpu_seconds": statistics.median(full) if full else None,
    }
    if run.kind != "plain":
        plan = optckpt.keras.plan(model)
        once = len(set(plan.schedule.executions))
        record |= {
            "operations": once,
            "floor": plan.floor,
            "plain_peak": plan.plain_peak,
            "predicted_peak": plan.predicted_peak,
            "overhead": plan.overhead,
            "gap": plan.certificate.gap,
            "status": plan.certificate.status,
            "planning_seconds": plan.certificate.seconds,
            "re_executions": len(plan.schedule) - once,
            "calibrated": plan.calibrated,
        }
    return record


# --- The cases --------------------------------------------------------------------------------


class Results:
    """The runs so far, and the folder in which they are kept."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / "keras_applications.jsonl"
        self._records: dict[str, Record] = {}
        if self._path.exists():
            for text in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(text)
                    self._records[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    print(f"left out: a line of {self._path} cannot be read", file=sys.stderr)

    def weights(self, run: Run) -> Path:
        """Where the variables are after `run`."""
        return self._folder / f"{run.key}.npy"

    def of(self, run: Run, fresh: bool = False) -> Record:
        """The figures of `run`, which is run if they are not known (`fresh`: in any case).

        Raises RuntimeError with the end of what it wrote if it fails.
        """
        known = self._records.get(run.key)
        if known is not None and self.weights(run).exists() and not fresh:
            return known
        done = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps(asdict(run)), str(self.weights(run))],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{run} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
        record = {"key": run.key, **asdict(run), **json.loads(done.stdout.splitlines()[-1])}
        self._records[run.key] = record
        # A benchmark that was killed while writing has left half a line.
        before = self._path.read_bytes()[-1:] if self._path.exists() else b""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if before in (b"", b"\n") else "\n") + json.dumps(record) + "\n")
        return record


def compared(
    plain: Run, share: float, results: Results, calibrate: bool | str, fresh: bool = False
) -> Record:
    """Plain beside planned. Sizes are bytes; the largest of the peaks after the first batch is the
    peak of a run, because in the first one the step is traced, measured and planned.
    """
    without = results.of(plain, fresh)
    probe = results.of(replace(plain, kind="probe"), fresh)
    plain_peak = max(without["peaks"][1:])
    budget = max(round(share * plain_peak), round(ABOVE_FLOOR * probe["floor"]))
    planned = replace(plain, kind="planned", budget=budget, calibrate=calibrate)
    within = results.of(planned, fresh)
    a, b = (np.load(results.weights(run)) for run in (plain, planned))
    return {
        "model": plain.model,
        "size": plain.size,
        "batch": plain.batch,
        "plain_peak": plain_peak,
        "budget": budget,
        "floor": within["floor"],
        "predicted_peak": within["predicted_peak"],
        "peak": max(within["peaks"][1:]),
        "first_peak": within["peaks"][0],
        "met": max(within["peaks"][1:]) <= budget,
        "calibrate": calibrate,
        "losses_equal": without["losses"] == within["losses"],
        "weights_equal": bool(np.array_equal(a, b)),
        "largest_difference": float(np.max(np.abs(a - b))),
        "losses": within["losses"],
        "cpu_time_ratio": within["cpu_seconds"] / without["cpu_seconds"],
        **{k: within[k] for k in ("operations", "re_executions", "overhead", "gap", "status")},
        **{k: within[k] for k in ("planning_seconds", "calibrated", "peaks")},
    }


HEAD = """\
| network | images | batch | plain peak, MiB | floor, MiB | budget, MiB | share, % | peak, MiB \
| met | extra time, % | CPU time ratio | executed again | losses equal | variables equal |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(r: Record) -> str:
    """One row of the Markdown table."""

    def mib(count: int) -> str:
        return f"{count / 2**20:.1f}"

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    cells = [
        r["model"], f"{r['size']}x{r['size']}", str(r["batch"]), mib(r["plain_peak"]),
        mib(r["floor"]), mib(r["budget"]), f"{100 * r['budget'] / r['plain_peak']:.0f}",
        mib(r["peak"]), yes(r["met"]), f"{100 * r['overhead']:.1f}", f"{r['cpu_time_ratio']:.2f}",
        f"{r['re_executions']} of {r['operations']}", yes(r["losses_equal"]),
        yes(r["weights_equal"]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def report(records: Sequence[Record], calibrate: bool | str, folder: Path) -> None:
    """Write keras_applications.md and keras_applications.json."""
    where = facts()
    rows = "\n".join(map(line, records))
    text = f"""\
# `fit` of keras.applications within a budget

Made by `python benchmarks/keras_applications.py`. Machine: {described(where)}.

Each network (`weights=None`, `classes=10`) is trained with Adam for {EPOCHS} epochs of
{FULL_BATCHES} full batches and a half one, plain and with
`optckpt.keras.apply(model, budget, calibrate={calibrate!r})`, in processes of their own,
TensorFlow's graph optimiser off. The budget covers the whole step: variables, the optimizer's
slots and its update, images and labels.

- **plain peak**, **peak**: the highest that the allocator reported after any batch but the first,
  its statistics reset before each.
- **met**: whether all of these batches were within the budget; with calibrate="seen" a step that is
  seen above it is planned again.
- **floor**: no schedule needs less.
- **budget**, **share**: in bytes, and of the plain peak; {ABOVE_FLOOR} x floor where that is more.
- **extra time**: predicted from the operations' measured times; **CPU time ratio**: planned /
  plain, of the median full batch, all threads, in different processes.
- **executed again**: operations of the plan that run once more.
- **equal**: in every bit: the losses of all batches; weights, moving averages and slots at the end.

{HEAD}
{rows}
"""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "keras_applications.md", text)
    data = {"format": "optckpt.keras-benchmark", "version": 1, "machine": where}
    write_text(
        folder / "keras_applications.json", json.dumps({**data, "results": records}, indent=1)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not known yet and write the report; 0 if all cases ended, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    parser.add_argument("--share", type=float, default=0.5, help="of the plain peak (%(default)s)")
    parser.add_argument(
        "--calibrate", choices=CALIBRATE, default="seen", help="as in apply (%(default)s)"
    )
    parser.add_argument("--cache", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--fresh", action="store_true", help="run again what is known")
    parser.add_argument("--run", nargs=2, metavar=("RUN", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        run, weights = given.run
        print(json.dumps(train(Run(**json.loads(run)), Path(weights))))
        return 0
    try:
        cases = [parse_case(text) for text in given.cases]
    except ValueError as e:
        parser.error(str(e))
    results = Results(given.cache)
    calibrate = CALIBRATE[given.calibrate]
    records = []
    print(HEAD)
    for case in cases:
        try:
            records.append(compared(case, given.share, results, calibrate, given.fresh))
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            break
        except RuntimeError as e:
            print(e, file=sys.stderr)
            continue
        print(line(records[-1]), flush=True)
    report(records, calibrate, given.out)
    return 0 if len(records) == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
