"""The strategy `rotor`: the optimal persistent checkpoints of a heterogeneous chain.

Follows O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly and A. Shilova, "Optimal checkpointing
for heterogeneous chains: how to train deep neural networks with limited memory" (arXiv 1911.13214,
2019), the algorithm of the library rotor. The forward graph is cut into stages at its articulation
points (on a pure chain every operation is a stage); stage k reads its input x_k. A stage is
executed forward keeping nothing, or its input (a checkpoint), or all that its backward phase
reads.

C(s, t, m), the least time to bring the backward pass from behind stage t to before stage s with m
bytes besides the input of s, is the smaller of

    checkpoint:  min over s < r <= t of  forward(s..r-1) + C(r, t, m - x_r) + C(s, r-1, m),
    keep all:    forward(s) + C(s+1, t, m - x_{s+1} - extra(s)),

each where m suffices for what is executed; C(k, k, m) executes what the phase of stage k reads,
then the phase. With K stages and L levels of memory: O(K^3 L) time, O(K^2 L) memory.

It differs from the paper in what it charges for gradients and what is no part of the chain (all
that is in memory at the time), in that first executions cost nothing extra and later ones run
only what is needed, and in that an operation which reads the value between two stages belongs to
the later one, so that no stage is computed again for its own output. See `chain_stages`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.chain_stages import Stage, chain_stages
from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.recompute import best_of
from optckpt.solvers.registry import SolveOptions
from optckpt.solvers.segments import articulation_points

LEVELS = 1000
"""Levels of memory up to the budget; fewer on long chains."""
MAX_CELLS = 24_000_000
"""Entries of the table of C."""
MAX_STAGES = 400
"""Longer chains are cut at fewer of their articulation points, evenly."""
FEW_STAGES = 50
"""So many are tried first, for a quick answer."""
SLACK = 1 / 16
"""Sizes are rounded up to levels: so much more than the budget may fit in truth."""
MOST_ABOVE = 30
"""Schedules tried that fit only because of that."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@compiled
def _diagonal(  # type: ignore[no-untyped-def]
    table, length, unit, own, with_extra, first_kept, first_freed, first_all,
    again_kept, again_freed, again_all, phase, background, advance_seconds, all_seconds,
):  # fmt: skip
    """Fill the rows C(s, s + length, .) of `table`; all with a smaller difference are there.

    Needs are bytes; `own` and `with_extra` are the levels held for x_s and x_{s+1} + extra(s).
    """
    count = len(own)
    levels = table.shape[1]
    for s in range(count - length):
        t = s + length
        row = table[s * count - s * (s - 1) // 2 + length]
        is_first = t == count - 1
        need = max(phase[s], first_all[s] if is_first else background[t] + again_all[s])
        below = table[(s + 1) * count - (s + 1) * s // 2 + length - 1]
        shift = with_extra[s]
        seconds = 0.0 if is_first else all_seconds[s]
        for m in range(max(-(-need // unit), shift), levels):
            row[m] = seconds + below[m - shift]
        seconds = 0.0
        need = 0
        for r in range(s + 1, t + 1):
            j = r - 1
            if is_first:
                need = max(need, first_kept[j] if j == s else first_freed[j])
            else:
                need = max(need, background[t] + (again_kept[j] if j == s else again_freed[j]))
                seconds += advance_seconds[j]
            shift = own[r]
            right = table[r * count - r * (r - 1) // 2 + t - r]
            left = table[s * count - s * (s - 1) // 2 + j - s]
            for m in range(max(-(-need // unit), shift), levels):
                row[m] = min(row[m], seconds + right[m - shift] + left[m])


class Table:
    """C(s, t, m) for all s <= t and m = 0..`levels` times `unit` bytes; seconds of re-executions.

    What is held is rounded up to whole levels, so that a schedule that fits here does fit.
    """

    def __init__(self, stages: list[Stage], unit: int, levels: int) -> None:
        self.stages, self.unit = stages, unit
        count = len(stages)
        self.entries: Floats = np.full((count * (count + 1) // 2, levels + 1), np.inf)
        after = [*(s.input for s in stages[1:]), 0]

        def in_levels(sizes: list[int]) -> Ints:
            return np.array([-(-size // unit) for size in sizes], np.int64)

        self.own = in_levels([s.input for s in stages])
        self.with_extra = in_levels([s.extra + x for s, x in zip(stages, after, strict=True)])

    def row(self, s: int, t: int) -> Floats:
        count = len(self.stages)
        found: Floats = self.entries[s * count - s * (s - 1) // 2 + t - s]
        return found

    def fill(self, deadline: float) -> bool:
        """Compute all entries; False if `deadline` (of time.monotonic) came first."""
        stages = self.stages
        for k, stage in enumerate(stages):
            seconds = 0.0 if k == len(stages) - 1 else stage.needed.seconds
            self.row(k, k)[max(0, -(-stage.needed.need // self.unit)) :] = seconds
        needs = [
            np.array(column, np.int64)
            for column in zip(
                *(
                    (
                        s.first_kept.need, s.first_freed.need, s.first_all.need,
                        s.again_kept.need, s.again_freed.need, s.again_all.need,
                        s.phase.need, s.background,
                    )
                    for s in stages
                ),
                strict=True,
            )
        ]  # fmt: skip
        times = [
            np.array([s.again_freed.seconds for s in stages]),
            np.array([s.again_all.seconds for s in stages]),
        ]
        for length in range(1, len(stages)):
            if time.monotonic() > deadline:
                return False
            interruptible(
                _diagonal,
                self.entries, length, self.unit, self.own, self.with_extra, *needs, *times,
            )  # fmt: skip
        return True

    def schedule(self, level: int) -> Schedule:
        """The cheapest schedule within `level` levels; there must be one."""
        executions: list[int] = []
        # Of a task (s, t, m), t < s stands for the phase of stage s.
        tasks = [(0, len(self.stages) - 1, level)]
        while tasks:
            s, t, m = tasks.pop()
            stages = self.stages
            if t < s:
                executions += stages[s].phase.operations
                continue
            if s == t:
                executions += stages[s].needed.operations
                tasks.append((s, s - 1, m))
                continue
            is_first = t == len(stages) - 1
            r = self._checkpoint(s, t, m)
            if r == s:
                run = stages[s].first_all if is_first else stages[s].again_all
                executions += run.operations
                tasks += [(s, s - 1, m), (s + 1, t, m - int(self.with_extra[s]))]
                continue
            for stage in stages[s:r]:
                run = stage.first_freed if is_first else stage.again_freed
                executions += run.operations
            tasks += [(s, r - 1, m), (r, t, m - int(self.own[r]))]
        return Schedule(tuple(executions))

    def _checkpoint(self, s: int, t: int, m: int) -> int:
        """The r that attains C(s, t, m); s itself if all is kept."""
        stages, unit = self.stages, self.unit
        is_first = t == len(stages) - 1
        behind = 0 if is_first else stages[t].background
        run = stages[s].first_all if is_first else stages[s].again_all
        best, best_seconds = s, math.inf
        rest = m - int(self.with_extra[s])
        if rest >= 0 and max(stages[s].phase.need, behind + run.need) <= m * unit:
            best_seconds = self.row(s + 1, t)[rest] + (0.0 if is_first else run.seconds)
        seconds = 0.0
        for r in range(s + 1, t + 1):
            stage = stages[r - 1]
            if is_first:
                run = stage.first_kept if r == s + 1 else stage.first_freed
            else:
                run = stage.again_kept if r == s + 1 else stage.again_freed
                seconds += run.seconds
            if behind + run.need > m * unit:
                break
            rest = m - int(self.own[r])
            if rest >= 0:
                total = seconds + self.row(r, t)[rest] + self.row(s, r - 1)[m]
                if total < best_seconds:
                    best, best_seconds = r, total
        return best


def _schedules(
    graph: TrainingGraph, stages: list[Stage], room: int, deadline: float, *, lowest: bool
) -> Iterator[Schedule]:
    """The cheapest schedule within `room` bytes, and some that may fit because sizes are rounded.

    With `lowest`, that of the lowest peak instead. Nothing if `deadline` comes first.
    """
    if room <= 0:
        return
    count = len(stages)
    divisor = math.gcd(
        *(b.size for b in graph.buffers), *(op.workspace for op in graph.operations), 0
    )
    levels = max(16, min(LEVELS, MAX_CELLS // (count * (count + 1) // 2)))
    unit = max(1, divisor, -(-room // levels))
    top = room // unit
    exact = unit == divisor
    table = Table(stages, unit, top if exact else top + math.ceil(top * SLACK))
    if not table.fill(deadline):
        return
    row = table.row(0, count - 1)
    feasible = np.flatnonzero(row < np.inf)
    if not len(feasible):
        return
    # A level at which nothing is cheaper than at the one below gives the same schedule.
    steps = feasible[np.concatenate(([True], np.diff(row[feasible]) < 0))]
    if lowest:
        yield table.schedule(int(steps[0]))
        return
    for level in [*steps[steps <= top][-1:], *steps[steps > top][:MOST_ABOVE]]:
        yield table.schedule(int(level))


def rotor(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule with persistent checkpoints on the chain of articulation points.

    Exact for chains whose sizes are few multiples of a common unit; otherwise memory is rounded
    to at most LEVELS levels, always so that the schedule fits. Chains of more than MAX_STAGES
    stages are coarsened. Where nothing fits, the lowest peak to be had. Without a budget it is
    the plain step.

    Raises:
        OptckptError: if the forward graph has no articulation points.
    """
    started = time.monotonic()
    points = [p for p in articulation_points(graph) if p.operation < graph.first_backward - 1]
    if not points:
        raise OptckptError(
            "strategy 'rotor' needs a chain: no tensor cuts the forward graph in two; "
            "use 'optimal' or 'sqrt_n'"
        )
    base = Schedule.base(graph)
    peak = simulate(graph, base).peak
    deadline = started + options.time_limit

    def candidates() -> Iterator[Schedule]:
        yield base
        if budget is None or peak <= budget:
            return
        fits = False
        for most in (FEW_STAGES, MAX_STAGES):
            step = -(-(len(points) + 1) // most)
            if most == FEW_STAGES and step == 1:
                continue
            stages = chain_stages(graph, points[step - 1 :: step])
            for schedule in _schedules(
                graph, stages, budget - graph.resident, deadline, lowest=False
            ):
                fits = fits or simulate(graph, schedule).peak <= budget
                yield schedule
            if not fits:
                yield from _schedules(graph, stages, peak - graph.resident, deadline, lowest=True)

    return best_of("rotor", graph, budget, candidates(), options.time_limit)
