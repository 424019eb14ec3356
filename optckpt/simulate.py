"""The referee: exact peak, profile and cost of a schedule. Knows no solver.

Memory model. An execution needs every buffer it reads in memory and puts the buffers it
writes there. A copy of a buffer lives from the execution that computes it to the last
execution that reads it before the buffer is computed again; the last copy of a graph output
lives to the end. During an execution the memory holds all live copies, the buffers being
written (also those nobody will read), and the workspace. If one of the operation's `inplace`
inputs dies there and is as large as `writes[0]`, the output takes over its memory and costs
nothing extra. Resident bytes are there throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from optckpt.errors import ScheduleError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule does. Sizes are bytes, times are seconds."""

    profile: tuple[int, ...]
    """Bytes in memory during each execution, resident included."""
    peak: int
    """Largest value of the profile (the resident bytes if there is no execution)."""
    peak_step: int
    """First step at which the peak is reached (-1 if there is no execution)."""
    seconds: float
    """Time of all executions."""
    extra_seconds: float
    """Time of the re-executions alone."""
    overhead: float
    """extra_seconds / time of the plain step (0 if the plain step takes no time)."""
    counts: tuple[int, ...]
    """How often each operation is executed."""

    @property
    def re_executions(self) -> int:
        """Number of executions beyond the first of each operation."""
        return sum(self.counts) - len(self.counts)


def simulate(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    """Simulate `schedule` on `graph` in O(executions + edges read).

    Raises:
        ScheduleError: names the step, the operation and the buffer, if an input is not in
            memory, a control dependency is not met, an operation is missing, or one that must
            not be repeated (any more) is.
    """
    ops = graph.operations
    sizes = [b.size for b in graph.buffers]
    counts = [0] * len(ops)
    # Copies are numbered in order of creation; copy[b] is the current copy of buffer b.
    copy = [-1] * len(sizes)
    last_use: list[int] = []
    read_copies: list[list[int]] = []
    for step, o in enumerate(schedule.executions):
        if not 0 <= o < len(ops):
            raise ScheduleError(f"step {step}: the graph has no operation number {o}")
        op = ops[o]
        if counts[o] and not op.repeatable:
            raise ScheduleError(
                f"step {step}: operation {op.name!r} ({op.kind}) must not be executed again"
            )
        if counts[o]:
            for a in op.repeat_before:
                if counts[a]:
                    raise ScheduleError(
                        f"step {step}: operation {op.name!r} must not be executed again after "
                        f"{ops[a].name!r}, which overwrites what it reads"
                    )
        for a in op.after:
            if not counts[a]:
                raise ScheduleError(
                    f"step {step}: operation {op.name!r} must run after {ops[a].name!r}, "
                    "which has not run yet"
                )
        used = []
        for b in op.reads:
            c = copy[b]
            if c < 0:
                raise ScheduleError(
                    f"step {step}: operation {op.name!r} reads buffer "
                    f"{graph.buffers[b].name!r}, which is not in memory"
                )
            last_use[c] = step
            used.append(c)
        read_copies.append(used)
        for b in op.writes:
            copy[b] = len(last_use)
            last_use.append(step)
        counts[o] += 1
    for o, n in enumerate(counts):
        if not n:
            raise ScheduleError(
                f"step {len(schedule)} (end): operation {ops[o].name!r} has not been executed"
                + (
                    f"; it writes buffer {graph.buffers[ops[o].writes[0]].name!r}"
                    if ops[o].writes
                    else ""
                )
            )
    end = len(schedule.executions)
    for b in graph.outputs:
        last_use[copy[b]] = end

    profile: list[int] = []
    live = graph.resident
    seconds = 0.0
    next_copy = 0
    for step, o in enumerate(schedule.executions):
        op = ops[o]
        written = 0
        unread = 0
        for b in op.writes:
            written += sizes[b]
            if last_use[next_copy] == step:
                unread += sizes[b]
            next_copy += 1
        dying = 0
        taken_over = 0
        for b, c in dict(zip(op.reads, read_copies[step], strict=True)).items():
            if last_use[c] == step:
                dying += sizes[b]
                if b in op.inplace and op.writes and sizes[b] == sizes[op.writes[0]]:
                    taken_over = sizes[b]
        profile.append(live + written + op.workspace - taken_over)
        live += written - unread - dying
        seconds += op.seconds
    plain = graph.seconds
    extra = sum(op.seconds * (n - 1) for op, n in zip(ops, counts, strict=True))
    peak = max(profile, default=graph.resident)
    return Simulation(
        profile=tuple(profile),
        peak=peak,
        peak_step=profile.index(peak) if profile else -1,
        seconds=seconds,
        extra_seconds=extra,
        overhead=extra / plain if plain > 0 else 0.0,
        counts=tuple(counts),
    )
