"""Dynamic program over a chain of blocks: a schedule at any budget, even a very low one.

Let V[i, j, h] be the least time to go, with the state before block i in memory, through the phases
j, j - 1, ..., i, while h bytes (that state among them) are held. Either

- block i is run, saving what one of its options says, then come the phases above it and its own
  (for i = j its own alone): run_cost + V[i + 1, j, h + held + next state] + phase_cost; or
- the blocks i .. s - 1 are run without saving anything, which leads to state s: their cost
  + V[s, j, h + state s] + V[i, s - 1, h].

While the last phase is still to come (j is the last block) everything runs for the first time, at
no extra cost. This is the rotor recurrence (Beaumont et al., "Optimal checkpointing for
heterogeneous chains", 2019) with options per block, as in Rockmate (Zhao et al., ICML 2023). What
comes out is a good schedule, not an optimum: a state is held until its block's phase, options do
not depend on one another. O(blocks^3 levels) time, O(blocks^2 levels) memory, in compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optckpt.solvers.blocks import Chain, Option, OptionFinder, find_chain
from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.decode import drop_dead
from optckpt.solvers.preprocess import Problem
from optckpt.solvers.sequence import profile

MAX_BLOCKS = 120
CELLS = 3_000_000
"""Values V in all; more memory levels where there are fewer blocks."""
MOST_LEVELS = 1500
FEWEST_LEVELS = 150
TRIES = 4
LESS = 1e-4

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@compiled
def _fill(  # type: ignore[no-untyped-def]
    length, n, levels, room, state, sweep_peak, sweep_cost,
    start, held, run_peak, closed_peak, phase_peak, run_cost, closed_cost, phase_cost, phase_room,
    value, choice,
):  # fmt: skip
    """Fill `value` and `choice` [pair of blocks, h] for pairs `length` blocks apart.

    All that are nearer to each other are there. choice >= 0: option, -s: sweep to block s.
    """
    for i in range(n - length):
        j = i + length
        row = j * (j + 1) // 2 + i
        first_time = j == n - 1
        for h in range(levels + 1):
            best = np.inf
            chosen = -n - 1
            for k in range(start[i], start[i + 1]):
                if h + phase_peak[k] > phase_room[i]:
                    continue
                if i == j:
                    if h + closed_peak[k] > room[j]:
                        continue
                    total = phase_cost[k]
                    if not first_time:
                        total += closed_cost[k]
                else:
                    inner = h + held[k] + state[i + 1]
                    if h + run_peak[k] > room[j] or inner > levels:
                        continue
                    total = phase_cost[k] + value[j * (j + 1) // 2 + i + 1, inner]
                    if not first_time:
                        total += run_cost[k]
                if total < best:
                    best = total
                    chosen = k - start[i]
            widest = 0
            cost = 0.0
            for s in range(i + 1, j + 1):
                beside = sweep_peak[s - 1]
                if s - 1 > i:
                    beside += state[s - 1]
                widest = max(widest, beside)
                if h + widest > room[j] or h + state[s] > levels:
                    if h + widest > room[j]:
                        break
                    continue
                if not first_time:
                    cost += sweep_cost[s - 1]
                total = (
                    cost
                    + value[j * (j + 1) // 2 + s, h + state[s]]
                    + value[(s - 1) * s // 2 + i, h]
                )
                if total < best:
                    best = total
                    chosen = -s
            value[row, h] = best
            choice[row, h] = chosen


@dataclass
class BlockProgram:
    """The chain of a problem with its options, for any number of budgets."""

    problem: Problem
    chain: Chain
    options: list[list[Option]]

    def sequences(self, budget: int, stop: Callable[[], bool] = lambda: False) -> list[list[int]]:
        """Sequences for `budget` bytes (without resident data); none if the program finds none.

        Sizes are rounded in the program: a sequence may exceed the budget by a little. Then come
        one without slack and others, made with a little less and in the smallest levels, `TRIES`
        in all at most, until one fits, or until `stop`.
        """
        levels = min(MOST_LEVELS, CELLS // (len(self.chain) * (len(self.chain) + 1) // 2))
        unit = self._unit(budget, levels)
        found: list[list[int]] = []
        target = budget
        for k in range(TRIES):
            sequence = self._sequence(target, unit, 0.0 if k else 0.5, stop)
            if k:
                unit = max(1.0, budget / levels)
            if sequence is None:
                if k == 1 and not stop():
                    continue
                break
            found.append(sequence)
            peak = max(profile(self.problem, sequence))
            if peak <= budget or stop():
                break
            if k:
                target = int(target * budget / peak * (1 - LESS))
        return found

    def _sequence(
        self, budget: int, unit: float, slack: float, stop: Callable[[], bool]
    ) -> list[int] | None:
        """A sequence for `budget` bytes and `slack` units more; None if there is none."""
        chain, n = self.chain, len(self.chain)
        levels = int(budget / unit)

        def units(bytes_: Any) -> Ints:
            return np.rint(np.asarray(bytes_, np.float64) / unit).astype(np.int64)

        size = self.problem.size
        flat = [o for options in self.options for o in options]
        begins = [chain.fixed_before[begin] for begin, _ in chain.phases]
        room = np.array([math.floor((budget - b) / unit + slack) for b in begins], np.int64)
        state = units([0 if t < 0 else size[t] for t in chain.states])
        sweeps = [min(options, key=lambda o: (o.held, o.run_peak)) for options in self.options]
        start = np.zeros(n + 1, np.int64)
        np.cumsum([len(options) for options in self.options], out=start[1:])
        pairs = n * (n + 1) // 2
        value = np.full((pairs, levels + 1), np.inf, np.float32)
        choice = np.zeros((pairs, levels + 1), np.int16)
        arguments = (
            n, levels, room, state,
            units([o.run_peak for o in sweeps]), np.array([o.run_cost for o in sweeps]),
            start,
            units([o.held for o in flat]),
            units([o.run_peak for o in flat]),
            units([o.closed_peak for o in flat]),
            units([o.phase_peak for o in flat]),
            np.array([o.run_cost for o in flat]),
            np.array([o.closed_cost for o in flat]),
            np.array([o.phase_cost for o in flat]),
            room, value, choice,
        )  # fmt: skip
        for length in range(n):
            interruptible(_fill, length, *arguments)
            if stop():
                return None
        if not np.isfinite(value[(n - 1) * n // 2, 0]):
            return None
        return drop_dead(self.problem, self._decode(choice, state, units))

    def _unit(self, budget: int, levels: int) -> float:
        """Bytes per level: at most `levels` of them, of the size that rounds the least away."""
        held = [o.held for options in self.options for o in options]
        held += [self.problem.size[t] for t in self.chain.states if t >= 0]
        sizes = np.array(held, np.float64)
        largest = max(1.0, float(sizes.max()))
        candidates = [budget / levels]
        k = math.ceil(largest * FEWEST_LEVELS / budget)
        while largest / k >= candidates[0] and len(candidates) < 100:
            candidates.append(largest / k)
            k += 1

        def error(unit: float) -> float:
            return float(np.abs(sizes / unit - np.rint(sizes / unit)).sum()) * unit

        return max(1.0, min(candidates, key=lambda u: (round(error(u) / largest, 3), u)))

    def _decode(self, choice: npt.NDArray[np.int16], state: Ints, units: Any) -> list[int]:
        chain, n = self.chain, len(self.chain)
        sequence: list[int] = []
        done = [False]

        def run(i: int, targets: set[int]) -> None:
            if done[0]:
                sequence.extend(chain.missing(targets, {chain.states[i]}))
            else:
                sequence.extend(range(chain.start(i), chain.ends[i]))

        # Tasks: (i, j, h) to be decided, or (i, option) for a phase. A stack, last task first.
        tasks: list[tuple[int, int, int] | tuple[int, Option]] = [(0, n - 1, 0)]
        while tasks:
            task = tasks.pop()
            if len(task) == 2:
                i, option = task
                sequence += chain.phase(i, option, {chain.states[i], *option.saved})
                continue
            i, j, h = task
            done[0] = j < n - 1
            chosen = int(choice[j * (j + 1) // 2 + i, h])
            if chosen < 0:
                s = -chosen
                for k in range(i, s):
                    run(k, {chain.states[k + 1]})
                tasks += [(i, s - 1, h), (s, j, h + int(state[s]))]
                continue
            option = self.options[i][chosen]
            tasks.append((i, option))
            if i == j:
                run(i, set(option.saved))
            else:
                run(i, {*option.saved, chain.states[i + 1]})
                tasks.append((i + 1, j, h + int(units(option.held)) + int(state[i + 1])))
        return sequence


def block_program(
    problem: Problem, forward_end: int, stop: Callable[[], bool] = lambda: False
) -> BlockProgram | None:
    """The block program of a problem whose backward pass begins at `forward_end`.

    None if the forward pass is no chain of at least four blocks, or after `stop`.
    """
    chain = find_chain(problem, forward_end, MAX_BLOCKS)
    if chain is None:
        return None
    finder = OptionFinder(chain)
    options = []
    for i in range(len(chain)):
        if stop():
            return None
        options.append(finder.options(i))
    return BlockProgram(problem, chain, options)


def prepare() -> None:
    """Have the compiled code ready: the first call after installation takes seconds."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    cost = np.zeros(1, np.float64)
    _fill(
        0, 1, 1, one, none, none, cost, np.array([0, 1]), none, none, none, none, cost, cost, cost,
        one, np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int16),
    )  # fmt: skip
