"""The strategy `retention`: retention intervals on a staged timeline, by constraint programming.

After MOCCASIN: B. Bartan, H. Li, H. Teague, C. Lott and B. Dilkina, "Moccasin: efficient tensor
rematerialization for neural networks" (ICML 2023). Every buffer has at most C retention intervals,
from an execution of its operation to its last use before the next; the first one is given, the
others are optional. Stage j of the timeline holds re-executions of operations before j, in base
order, then base operation j. What an execution reads lies in a retention interval; the intervals'
bytes are at most the budget at all times (a cumulative constraint); the re-executed time is
minimised, with O(C n) variables instead of the O(n^2) of stage-by-stage formulations.

Extended to several outputs, workspace, and operations that must not be repeated. An output that
may take over an input's memory is charged from the next event on, which is too little where it
does not. So the model bounds its class of schedules from below, and every solution is judged by
the simulator; what exceeds the budget is refused. CP-SAT starts from the best schedule of the
heuristics and runs in a process of its own.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers import worker_setup
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.heuristics import chen_greedy, speed, sqrt_n
from optckpt.solvers.knapsack import knapsack
from optckpt.solvers.loss_cut import loss_cut_bound
from optckpt.solvers.preprocess import Problem, preprocess
from optckpt.solvers.recompute import best_of
from optckpt.solvers.registry import SolveOptions

logger = logging.getLogger("optckpt.solvers.retention")

EXECUTIONS = 2
"""C: how often an operation is executed at most."""
COST_UNITS = 10_000_000
"""Units of the objective that the plain step takes; rounding down keeps bounds valid."""
HEURISTICS_SHARE = 0.1
"""Share of the time limit for each heuristic, and for the loss cut."""
GRACE = 1.0
"""Seconds beyond its time limit after which the process is killed."""


def re_executions(problem: Problem, schedule: Schedule) -> list[tuple[int, int]] | None:
    """The (operation, stage) of all re-executions; None if a stage's are not in base order."""
    unit_of = {members[-1]: unit for unit, members in enumerate(problem.members)}
    found: list[tuple[int, int]] = []
    base = 0
    for o in schedule.executions:
        unit = unit_of.get(o)
        if unit is None:
            continue
        if unit == base:
            base += 1
        else:
            found.append((unit, base))
    ascending = all(a[1] < b[1] or a[0] < b[0] for a, b in pairwise(found))
    return found if ascending else None


def from_re_executions(problem: Problem, copies: list[tuple[int, int]]) -> Schedule:
    """The schedule with these (operation, stage); what nobody reads is left out."""
    events = [(stage, o) for o, stage in copies] + [(o, o) for o in range(problem.n)]
    return Schedule(problem.expand(drop_dead(problem, [o for _, o in sorted(events)])))


class _Search:
    """CP-SAT in a process of its own; messages come in while it searches."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.process = worker_setup.start("retention_worker.py")
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert self.process.stdin is not None
        try:
            pickle.dump(request, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self.process.stdin.close()
        except OSError:
            self.messages.put(None)
            return
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        try:
            while True:
                self.messages.put(pickle.load(self.process.stdout))
        except (EOFError, pickle.UnpicklingError, OSError):
            self.messages.put(None)
        finally:
            self.process.stdout.close()

    def until(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Messages until the search ends, or until `deadline` (of time.monotonic).

        Raises:
            OptckptError: if OR-Tools fails.
        """
        while True:
            try:
                message = self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                logger.warning("CP-SAT overran its time limit and was stopped")
                return
            if message is None:
                raise OptckptError(
                    "the process that runs OR-Tools ended without an answer; check that ortools "
                    f"can be imported by {sys.executable}"
                )
            if "error" in message:
                raise OptckptError(f"OR-Tools failed: {message['error']}")
            yield message
            if "end" in message:
                return

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def retention(
    graph: TrainingGraph,
    budget: int | None,
    options: SolveOptions,
    *,
    executions: int = EXECUTIONS,
) -> Solution:
    """The cheapest schedule of at most `executions` executions per operation, by CP-SAT.

    Where nothing fits, the lowest peak found. The bound is CP-SAT's, for schedules of this class
    only, as the certificate says, or the loss cut's, for any order, where that is no lower;
    "optimal" means optimal among what the bound is valid for.

    Raises:
        OptckptError: if `executions` is below 1, or OR-Tools cannot be run.
    """
    if executions < 1:
        raise OptckptError(f"executions must be at least 1, got {executions}")
    started = time.monotonic()
    deadline = started + options.time_limit
    base = Schedule.base(graph)
    plain = simulate(graph, base).peak
    bound = 0.0

    def candidates() -> Iterator[Schedule]:
        nonlocal bound
        yield base
        if budget is None or plain <= budget:
            return
        quick = replace(options, time_limit=HEURISTICS_SHARE * options.time_limit, progress=None)
        hint: tuple[int, float, Schedule] | None = None
        for heuristic in (chen_greedy, sqrt_n, speed, knapsack):
            if time.monotonic() > deadline:
                return
            schedule = heuristic(graph, budget, quick).schedule
            if schedule is None or max(simulate(graph, schedule).counts) > executions:
                continue
            yield schedule
            result = simulate(graph, schedule)
            rank = (max(0, result.peak - budget), result.overhead, schedule)
            if hint is None or rank[:2] < hint[:2]:
                hint = rank
        problem = preprocess(graph)
        room = budget - graph.resident
        unit = math.gcd(*problem.size, *problem.workspace) or 1
        if room <= 0 or time.monotonic() > deadline:
            return
        search = _Search(
            {
                "n": problem.n,
                "reads": problem.reads,
                "writes": problem.writes,
                "takes": problem.takes,
                "producer": problem.producer,
                "repeatable": problem.repeatable,
                "size": [s // unit for s in problem.size],
                "workspace": [s // unit for s in problem.workspace],
                "cost": [int(c * COST_UNITS) for c in problem.cost],
                "budget": room // unit,
                "executions": executions,
                "hint": None if hint is None else re_executions(problem, hint[2]),
                "until": time.time() + deadline - time.monotonic(),
                "threads": options.threads or min(8, os.cpu_count() or 1),
                "seed": options.seed,
                "gap": options.gap / 2 * COST_UNITS,
            }
        )
        try:
            for message in search.until(deadline + GRACE):
                if "bound" in message:
                    bound = max(bound, message["bound"] / COST_UNITS)
                if "copies" in message:
                    yield from_re_executions(problem, message["copies"])
        finally:
            search.kill()

    solution = best_of("retention", graph, budget, candidates(), options.time_limit + GRACE)
    cert = solution.certificate
    if cert.cost is None or cert.status == "over-budget":
        return solution
    covers = f"base order, at most {executions} executions of an operation, one sweep per stage"
    if cert.cost <= options.gap:
        # No cost is below zero, which closes the gap and holds in any order.
        bound, covers = 0.0, cert.valid_for
    elif budget is not None and (left := deadline - time.monotonic()) > 0:
        any_order = loss_cut_bound(
            graph, budget, time_limit=min(left, HEURISTICS_SHARE * options.time_limit)
        )
        if any_order >= bound:
            bound, covers = any_order, "any order"
    bound = min(bound, cert.cost)
    optimal = cert.cost - bound <= max(options.gap, 1e-6)
    return Solution(
        solution.schedule,
        replace(
            cert,
            status="optimal" if optimal else "feasible",
            bound=bound,
            valid_for=covers,
            seconds=time.monotonic() - started,
        ),
    )
