"""The strategy `lp_rounding`: Checkmate's linear relaxation, rounded in two phases.

P. Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (MLSys
2020), section 5. The stage-by-stage formulation (see `milp`), with one sweep per stage, is solved
as a linear program. Phase one rounds what it holds in memory between stages, S: deterministically,
by a threshold, or at random, by a threshold for each buffer. Phase two computes again what S makes
necessary: what a stage or the next one's S needs and S does not hold, by recursion; here as late
as possible within the stage. Rounding breaks the memory rows, so that the program is solved
for less memory than there is; the cheapest schedule is taken whose simulated peak fits.

The program has a variable for every stage and every operation that may be executed again. To keep
it small, only operations that the backward pass depends on are, and not before the backward pass,
whose operations are grouped into stages by what they read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.engine import solve_mip
from optckpt.solvers.milp import Checkmate, Sweep
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.recompute import best_of, missing_operations, relevant_operations
from optckpt.solvers.registry import SolveOptions

STAGES = (8, 20)
"""Stages of the backward pass: more make the program exact, fewer leave rounding less to spoil.

One for every backward operation is tried as well if that is not too much."""
MIN_STAGES = 4
MAX_SIZE = 10_000
"""Stages times operations that may be executed again."""
THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9, 0.02, 0.98)
DRAWS = 20
"""Roundings at random per program."""
KEPT = (0.1, 0.0, 0.2, 0.05)
"""Shares of the budget kept from a program, for rounding to use; the paper's comes first."""
CLOSE = 0.02
"""Where no program has a solution within the budget, the least memory is found so closely."""


def backward_stages(graph: TrainingGraph, again: Collection[int], most: int) -> list[Sweep]:
    """The forward pass as one stage, the backward pass as at most `most`, and the end.

    A stage begins where its share of the bytes that `again` write is first read.
    """
    ops = graph.operations
    split, n = graph.first_backward, len(ops)
    weight = [0.0] * n
    total = sum(graph.buffers[b].size for o in again for b in ops[o].writes) or 1
    for o in again:
        for b in ops[o].writes:
            read = next((i for i in graph.readers[b] if i >= split), None)
            if read is not None:
                weight[read] += graph.buffers[b].size / total
    # Where nothing is read there is nothing to decide, but stages should not be empty.
    for i in range(split, n):
        weight[i] += 1e-6
    share = sum(weight) / most
    starts = []
    gathered = share
    for i in range(split, n):
        if n - split <= most or gathered + weight[i] / 2 >= share:
            starts.append(i)
            gathered = 0.0
        gathered += weight[i]
    bounds = [0, *starts, n]
    stages = [Sweep(i, j, again=i > 0) for i, j in pairwise(bounds) if i < j]
    return [*stages, Sweep(n, n)]


def phase_two(
    graph: TrainingGraph, stages: Sequence[Sweep], saved: Sequence[Collection[int]]
) -> list[int]:
    """The executions that have the buffers `saved` in memory before each stage, and at the end.

    What is missing is computed again right before it is read, with what that needs by recursion,
    or at the end of the stage before which it is saved. Operations that are not repeatable, or
    stand behind the start of the stage, keep what they write.
    """
    ops = graph.operations
    in_memory = bytearray(len(graph.buffers))
    executions: list[int] = []

    def fetch(wanted: Collection[int]) -> None:
        again = sorted(missing_operations(graph, wanted, in_memory))
        executions.extend(again)
        for o in again:
            for b in ops[o].writes:
                in_memory[b] = 1

    for r, stage in enumerate(stages):
        for i in range(stage.start, stage.end):
            fetch(ops[i].reads)
            executions.append(i)
            for b in ops[i].writes:
                in_memory[b] = 1
        behind = set(saved[r + 1]).union(
            b for b, p in enumerate(graph.producer) if p < stage.end and not ops[p].repeatable
        )
        fetch([b for b in behind if graph.producer[b] < stage.end])
        in_memory = bytearray(len(graph.buffers))
        for b in behind:
            in_memory[b] = 1
    fetch(graph.outputs)
    return executions


def roundings(fractions: Sequence[dict[int, float]], seed: int) -> Iterator[list[set[int]]]:
    """Phase one: sets of buffers to save from the `fractions` that a linear program saves.

    By one threshold for all; then by thresholds drawn at random, one for each buffer, so that it
    is saved with a probability of its fraction, and in neighbouring stages alike.
    """
    for threshold in THRESHOLDS:
        yield [{t for t, x in hold.items() if x >= threshold} for hold in fractions]
    rng = random.Random(seed)
    buffers = sorted({t for hold in fractions for t in hold})
    for _ in range(DRAWS):
        limit = {t: 1.0 - rng.random() for t in buffers}
        yield [{t for t, x in hold.items() if x >= limit[t]} for hold in fractions]


def lp_rounding(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The cheapest schedule that fits, of those rounded from linear programs.

    Without a budget it is the plain step. Where nothing fits, the lowest peak.

    Raises:
        OptckptError: if the graph is too large for MIN_STAGES stages in a program of MAX_SIZE.
    """
    started = time.monotonic()
    base = Schedule.base(graph)
    peak = simulate(graph, base).peak

    def remaining() -> float:
        return options.time_limit - (time.monotonic() - started)

    def candidates() -> Iterator[Schedule]:
        yield base
        if budget is None or peak <= budget:
            return
        again = relevant_operations(graph)
        if not again:
            return
        largest = MAX_SIZE // len(again)
        if largest < MIN_STAGES:
            raise OptckptError(
                f"strategy 'lp_rounding' is for graphs of at most {MAX_SIZE // MIN_STAGES} "
                f"operations that may be executed again, this one has {len(again)}; use strategy "
                "'optimal' or 'knapsack'"
            )
        problem = preprocess(graph, merge=False)
        counts = {min(k, largest) for k in STAGES}
        n_backward = len(graph.operations) - graph.first_backward
        if 4 * n_backward <= largest:
            counts.add(n_backward)
        for most in sorted(counts):
            stages = backward_stages(graph, again, most)
            # No program has a solution at `low` bytes; at the plain peak, each has one.
            low, high = graph.resident, peak
            rooms = [graph.resident + round((1 - a) * (budget - graph.resident)) for a in KEPT]
            while rooms:
                room = rooms.pop(0)
                if room > low:
                    if remaining() <= 0:
                        return
                    model = Checkmate(graph, room, stages, set(again))
                    # A large model takes seconds to build.
                    left = remaining()
                    if left <= 0:
                        return
                    result = solve_mip(model.model, time_limit=left, relax=True)
                    if result.values is not None:
                        high = min(high, room)
                        for saved in roundings(model.held(result.values), options.seed):
                            executions = drop_dead(problem, phase_two(graph, stages, saved))
                            yield Schedule(problem.expand(executions))
                    elif result.status == "unknown":
                        return
                    else:
                        low = room
                if not rooms and low >= budget and high - low > max(1, CLOSE * peak):
                    rooms = [(low + high) // 2]

    return best_of("lp_rounding", graph, budget, candidates(), options.time_limit)
