"""The strategy `milp`: Checkmate's stage-by-stage formulation, for small graphs.

Follows Jain et al., "Checkmate: breaking the memory wall with optimal tensor
rematerialization" (MLSys 2020), extended to operations with several outputs, workspace,
non-repeatable operations, outputs that must survive and outputs that take over an input's
memory. Each base operation is preceded by `SWEEPS` sweeps over the operations before it; in a
sweep every operation runs at most once, in base order. With one sweep this is Checkmate's class
of schedules; it is not all of them: now and then it pays to execute an operation, use and drop
what it wrote, and go back to an operation before it without a base operation in between, and
that takes a second sweep.

The MIP shares no formulation with `optimal` and serves to check it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Certificate, Schedule, Solution, Status
from optckpt.simulate import simulate
from optckpt.solvers.engine import MipModel, solve_mip
from optckpt.solvers.floor import static_floor
from optckpt.solvers.loss_cut import loss_cut_bound
from optckpt.solvers.registry import Progress, SolveOptions

MAX_OPERATIONS = 60
SWEEPS = 2
PAIRS = 6
"""Readers of a buffer up to which each pair of them has a row."""
TRIES = 4
"""Solutions a few bytes above the budget are followed by another try with less memory."""
STEP = 1000.0
ROOM_BITS = 14
"""The budget in a memory row is a number of so many bits at most, before the point."""
SIZE_BITS = 16
"""Sizes are rounded down to so many bits behind it: HiGHS was seen to cut off the optimum where a
memory row had coefficients of 1e-7. Smaller sizes fit more, so bounds stay valid."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Part of the schedule: re-executions of operations below `start`, then base operations."""

    start: int
    """The first base operation of the stage."""
    end: int
    """Base operations below this number run at the end of the sweep (`start`: none does)."""
    again: bool = True
    """Whether operations may be executed again."""


def sweeps_by_operation(n: int, sweeps: int) -> list[Sweep]:
    """A stage for each of `n` base operations and the end, `sweeps` sweeps per stage."""
    return [
        Sweep(j, j + 1 if q == sweeps - 1 and j < n else j)
        for j in range(n + 1)
        for q in range(sweeps)
    ]


class Checkmate:
    """The model: R[r,i] runs i in sweep r, S[r,t] holds t before it, FREE[r,i,t] frees t.

    `run` and `hold` have R and S as columns, by sweep; `hold` has one more entry, the end. `again`
    are the operations that may be executed again, all repeatable ones by default.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        budget: int,
        sweeps: Sequence[Sweep],
        again: Collection[int] | None = None,
    ) -> None:
        self.graph = graph
        room = budget - graph.resident
        # Solvers allow for absolute errors; numbers are exact where they have few bits.
        bits = max(0, room.bit_length() - ROOM_BITS)
        unit = max(0, bits - SIZE_BITS)

        def scaled(bytes_: int) -> float:
            return float(bytes_ >> unit) / 2.0 ** (bits - unit)

        self.room = room / 2.0**bits
        self.size = [scaled(b.size) for b in graph.buffers]
        self.workspace = [scaled(op.workspace) for op in graph.operations]
        self.model = MipModel()
        self.sweeps = sweeps
        self.plain = graph.seconds or 1.0
        self.run: list[dict[int, int]] = []
        self.hold: list[dict[int, int]] = []
        self.behind: dict[tuple[int, int], list[int]] = {}
        ops = graph.operations
        for sweep in sweeps:
            run = {}
            for i in range(sweep.end):
                if i >= sweep.start:
                    run[i] = self.fixed(1.0)
                elif sweep.again and ops[i].repeatable and (again is None or i in again):
                    run[i] = self.model.add_column(cost=ops[i].seconds / self.plain * STEP)
            self.run.append(run)
            self.hold.append(
                {
                    t: self.model.add_column()
                    for t, p in enumerate(graph.producer)
                    if p < sweep.start
                }
            )
        outputs = set(graph.outputs)
        self.hold.append({t: self.fixed(float(t in outputs)) for t in range(len(graph.buffers))})
        for r in range(len(self.sweeps)):
            self.add_dependencies(r)
            self.add_memory(r)

    def fixed(self, value: float) -> int:
        column = self.model.add_column()
        self.model.lower[column] = self.model.upper[column] = value
        return column

    def add_dependencies(self, r: int) -> None:
        graph, run, hold = self.graph, self.run[r], self.hold[r]
        for i, column in run.items():
            for t in graph.operations[i].reads:
                self.model.add_row(self.present(r, t, {column: -1.0}), lower=0.0)
        for t, column in self.hold[r + 1].items():
            if graph.producer[t] < self.sweeps[r].end:
                self.model.add_row(self.present(r, t, {column: -1.0}), lower=0.0)
        for t, column in hold.items():
            # The old copy of what is computed anew would be of no use in this sweep.
            again = run.get(graph.producer[t])
            if again is not None:
                self.model.add_row({column: 1.0, again: 1.0}, upper=1.0)

    def present(self, r: int, t: int, terms: dict[int, float]) -> dict[int, float]:
        """`terms` plus S[r,t] + R[r, producer of t]."""
        for column in (self.hold[r].get(t), self.run[r].get(self.graph.producer[t])):
            if column is not None:
                terms[column] = 1.0
        return terms

    def add_memory(self, r: int) -> None:
        graph, run = self.graph, self.run[r]
        model = self.model
        size = self.size
        held = {c: size[t] for t, c in self.hold[r].items()}
        before = model.add_column(upper=float("inf"), integer=False)
        model.add_row({**held, before: -1.0}, lower=0.0, upper=0.0)
        for i, column in run.items():
            op = graph.operations[i]
            written = sum(size[t] for t in op.writes)
            during = {before: 1.0, column: written + self.workspace[i]}
            after = model.add_column(upper=float("inf"), integer=False)
            balance = {before: 1.0, column: written, after: -1.0}
            taken: dict[int, float] = {}
            for t in dict.fromkeys((*op.reads, *op.writes)):
                free = self.add_free(r, i, t)
                balance[free] = -size[t]
                if t in op.inplace and op.writes and size[t] == size[op.writes[0]]:
                    take = model.add_column()
                    model.add_row({free: 1.0, take: -1.0}, lower=0.0)
                    taken[take] = 1.0
                    during[take] = -size[t]
            model.add_row(balance, lower=0.0, upper=0.0)
            if len(taken) > 1:
                model.add_row(taken, upper=1.0)
            model.add_row(during, upper=self.room)
            before = after

    def add_free(self, r: int, i: int, t: int) -> int:
        """FREE[r,i,t]: i runs, nothing behind it in the sweep reads t, the next holds it not."""
        free = self.model.add_column(integer=False)
        self.model.add_row({self.run[r][i]: 1.0, free: -1.0}, lower=0.0)
        for column in (self.hold[r + 1].get(t), *self.read_behind(r, i, t)):
            if column is not None:
                self.model.add_row({column: 1.0, free: 1.0}, upper=1.0)
        return free

    def read_behind(self, r: int, i: int, t: int) -> list[int]:
        """Columns of which one is 1 if t is read in sweep r behind i, all of them 0 if it may not.

        Of many readers there would be a row for each pair. So each but the last has a column that
        is no less than R of itself and of those behind it: the same relaxation.
        """
        run = self.run[r]
        readers = [k for k in self.graph.readers[t] if k in run]
        first = bisect_right(readers, i)
        if len(readers) <= PAIRS:
            return [run[k] for k in readers[first:]]
        if (r, t) not in self.behind:
            columns = [run[readers[-1]]]
            for k in reversed(readers[:-1]):
                column = self.model.add_column(integer=False)
                for less in (run[k], columns[-1]):
                    self.model.add_row({column: 1.0, less: -1.0}, lower=0.0)
                columns.append(column)
            self.behind[r, t] = columns[::-1]
        return self.behind[r, t][first : first + 1]

    def held(self, values: list[float]) -> list[dict[int, float]]:
        """S as a solution has it: by sweep, and for the end, buffer -> value."""
        return [{t: values[column] for t, column in hold.items()} for hold in self.hold]

    def schedule(self, values: list[float]) -> Schedule:
        return Schedule(
            tuple(i for run in self.run for i, column in run.items() if values[column] > 0.5)
        )


def milp(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule with at most two sweeps between base operations, by one MIP.

    Bound and "optimal" hold for that class of schedules. That none of the class fits proves
    nothing about others: the status is "infeasible" only if the static floor or the loss cut
    proves it, else "stopped", with the loss cut's bound for any order.

    Raises:
        OptckptError: if the graph has more than MAX_OPERATIONS operations.
    """
    started = time.monotonic()
    n = len(graph.operations)
    if n > MAX_OPERATIONS:
        raise OptckptError(
            f"strategy 'milp' is for graphs of at most {MAX_OPERATIONS} operations, this one has "
            f"{n}; use strategy 'optimal'"
        )
    covers = f"base order, at most {SWEEPS} sweeps between base operations"
    base = Schedule.base(graph)
    plain = simulate(graph, base)
    if budget is None or plain.peak <= budget:
        seconds = time.monotonic() - started
        certificate = Certificate("milp", "optimal", 0.0, 0.0, seconds, seconds, "any order")
        return Solution(base, certificate)
    if static_floor(graph).bytes > budget:
        seconds = time.monotonic() - started
        return Solution(None, Certificate("milp", "infeasible", None, 0.0, seconds, None))
    room, bound = budget, 0.0
    schedule, overhead = None, None
    for k in range(TRIES):
        checkmate = Checkmate(graph, room, sweeps_by_operation(n, SWEEPS))
        result = solve_mip(
            checkmate.model,
            time_limit=max(0.1, options.time_limit - (time.monotonic() - started)),
            gap=options.gap / 2 * STEP,
            seed=options.seed,
        )
        if room == budget:
            # What is solved for less memory bounds nothing.
            none_of_class = result.status == "infeasible"
            bound = 0.0 if none_of_class else max(0.0, result.bound / STEP)
        if result.values is None:
            break
        simulation = simulate(graph, checkmate.schedule(result.values))
        if simulation.peak <= budget:
            schedule, overhead = checkmate.schedule(result.values), simulation.overhead
            break
        # The engine's tolerance on whole numbers is worth some bytes, and so is rounding.
        room -= max(2 * (simulation.peak - budget), (budget - graph.resident) >> (22 - 2 * k))
    status: Status
    if none_of_class:
        left = options.time_limit - (time.monotonic() - started)
        any_order = loss_cut_bound(graph, budget, time_limit=max(0.1, left))
        proven = any_order == float("inf")
        status = "infeasible" if proven else "stopped"
        bound, covers = 0.0 if proven else any_order, "any order"
    elif overhead is None:
        status = "stopped"
    else:
        bound = min(bound, overhead)
        status = "optimal" if overhead - bound <= max(options.gap, 1e-6) else "feasible"
    seconds = time.monotonic() - started
    if options.progress is not None:
        options.progress(Progress(seconds, overhead, bound))
    return Solution(
        schedule,
        Certificate(
            "milp", status, overhead, bound, seconds,
            None if schedule is None else seconds, covers,
        ),
    )  # fmt: skip
