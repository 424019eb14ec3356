"""Mixed-integer programs through OR-Tools, in a process of its own.

A worker process keeps OR-Tools apart from TensorFlow (both bring their own protobuf and
Abseil), can be killed when a solver overruns its time limit or the user presses Ctrl-C, and
leaves this process free to search meanwhile. It is started once and used again; models
travel as plain lists.

MathOpt with HiGHS is the way in, by measurement with OR-Tools 9.15. Handing over 18,000
nonzeros as flat lists takes MathOpt about 5 ms (ModelBuilder's proto, row by row: 11 ms), which
is nothing beside the solve; MathOpt lets HiGHS' options through, and ModelBuilder's requests were
refused for HiGHS and SCIP alike. On the relaxations of `stage_cuts` the two proved the same
bounds within a factor of four in time, either way (U-Net, 6 cuts: HiGHS 5.3 s, SCIP 5.4 s;
4-block transformer, 9 cuts: 15.7 s and 7.2 s; ResNet-50, 6 cuts: 1.9 s and 3.6 s; CIFAR ResNet,
9 cuts: 1.7 s and 6.3 s). Both keep to one thread. On the largest, of more than 2000 open columns,
SCIP without cutting planes gets further: DenseNet-121, 7 cuts, after 25 s 37.47 and 74.28 of
(unknown, at least) 37.65 and 74.34, HiGHS 37.34 and 73.95, and it has solutions to decode.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from optckpt.errors import OptckptError
from optckpt.solvers import worker_setup

logger = logging.getLogger("optckpt.solvers.engine")

Engine = Literal["highs", "scip"]
INFINITY = float("inf")
GRACE = 0.5
"""Seconds beyond its time limit after which a solver is killed."""


@dataclass
class MipModel:
    """Minimise cost . x subject to row_lower <= A x <= row_upper, lower <= x <= upper."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add_column(self, cost: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """A variable in [0, upper]; returns its index."""
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(
        self, terms: dict[int, float], lower: float = -INFINITY, upper: float = INFINITY
    ) -> None:
        """lower <= sum of coefficient * column over `terms` (column -> coefficient) <= upper."""
        r = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        columns = sorted(terms)
        self.row.extend([r] * len(columns))
        self.column.extend(columns)
        self.value.extend([terms[c] for c in columns])


@dataclass(frozen=True, slots=True)
class MipResult:
    """What a solver found out within its limits."""

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    """unknown: neither a solution nor a proof of infeasibility."""
    values: list[float] | None
    bound: float
    """Proven lower bound on the objective, solver tolerances already subtracted."""
    duals: list[float] | None = None
    """Of a linear program: the rows' dual values, as exact as the solver's arithmetic."""


class _Worker:
    """One running worker process."""

    def __init__(self) -> None:
        self.process = worker_setup.start("engine_worker.py")
        self.owner = os.getpid()

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def kill(self) -> None:
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        pickle.dump(request, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self.process.stdin.flush()

    def answered(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0.0)[0])

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The reply, or None if there is none within `timeout` seconds."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, timeout))
        if not ready:
            return None
        reply: dict[str, Any] = pickle.load(self.process.stdout)
        return reply


_idle: list[_Worker] = []
_lock = threading.Lock()


def warm_up() -> None:
    """Start a worker now, so that OR-Tools loads while the caller does something else."""
    worker = _take()
    with _lock:
        _idle.append(worker)


def _take() -> _Worker:
    with _lock:
        while _idle:
            worker = _idle.pop()
            if worker.alive():
                return worker
    return _Worker()


@atexit.register
def _shut_down() -> None:
    with _lock:
        while _idle:
            _idle.pop().kill()


class Solve:
    """A model being solved in a worker; `result` waits for it, `cancel` ends it."""

    def __init__(
        self,
        model: MipModel,
        *,
        time_limit: float,
        gap: float = 0.0,
        seed: int = 0,
        engine: Engine = "highs",
        hint: list[float] | None = None,
        relax: bool = False,
        nodes: int | None = None,
    ) -> None:
        """Hand `model` to a worker; with `relax`, its variables need not be integer.

        `time_limit` is in seconds, `gap` is absolute, `hint` (values of all columns) is for SCIP,
        `nodes` limits the search tree.
        """
        self._deadline = time.monotonic() + time_limit + GRACE
        self._worker: _Worker | None = _take()
        request = {
            **vars(model),
            "integer": [False] * len(model.integer) if relax else model.integer,
            "time_limit": time_limit,
            "gap": gap,
            "seed": seed,
            "engine": engine,
            "hint": hint,
            "nodes": nodes,
        }
        try:
            self._worker.send(request)
        except BaseException:
            self.cancel()
            raise

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        worker = self._worker
        return worker is None or worker.answered()

    def result(self) -> MipResult:
        """Wait for the solver.

        Raises:
            OptckptError: if OR-Tools is missing or fails.
        """
        assert self._worker is not None
        try:
            reply = self._worker.receive(self._deadline - time.monotonic())
        except EOFError:
            self.cancel()
            raise OptckptError(
                "the process that runs OR-Tools ended without an answer; check that ortools "
                f"can be imported by {sys.executable}"
            ) from None
        except BaseException:
            self.cancel()
            raise
        if reply is None:
            # The certificate says what was reached; there is nothing a person could do.
            logger.info("a solver overran its time limit and was stopped")
            self.cancel()
            return MipResult("unknown", None, -INFINITY)
        with _lock:
            _idle.append(self._worker)
        self._worker = None
        if "error" in reply:
            raise OptckptError(f"OR-Tools failed: {reply['error']}")
        if reply["infeasible"]:
            return MipResult("infeasible", None, INFINITY)
        bound = reply["bound"]
        # Both solvers accept solutions and prune nodes within about 1e-6 of the objective.
        bound -= 1e-6 * max(1e-3, abs(bound)) if abs(bound) < INFINITY else 0.0
        values = reply["values"]
        if values is None:
            return MipResult("unknown", None, bound)
        return MipResult(
            "optimal" if reply["optimal"] else "feasible", values, bound, reply["duals"]
        )

    def cancel(self) -> None:
        """End the solver; the worker is killed."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def solve_mip(model: MipModel, **limits: Any) -> MipResult:
    """Solve `model` and wait; the keywords are those of `Solve`."""
    run = Solve(model, **limits)
    try:
        return run.result()
    finally:
        run.cancel()
