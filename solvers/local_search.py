"""Simulated annealing over sequences of executions: polishes and repairs decoded solutions.

Every sequence with the first executions in base order, and re-executions behind them, can be
executed: what is read lives as long as that needs. The search therefore only removes, moves and
inserts re-executions, and judges a sequence by its extra time plus a price on bytes above the
budget. Results that nobody reads are not executed again (dead re-executions drop out by
themselves). The inner loop is compiled by numba; an evaluation takes 5-40 microseconds for
500-2000 executions, a hundredth of what the interpreter needs. The compiled code is cached: only
the very first call after installation spends some seconds on compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.preprocess import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arrays:
    """A problem as flat arrays; the buffers of operation o are indices[start[o]:start[o + 1]]."""

    read_start: Ints
    reads: Ints
    """Position n, the end, reads the outputs."""
    write_start: Ints
    writes: Ints
    take_start: Ints
    takes: Ints
    workspace: Ints
    cost: Floats
    repeatable: npt.NDArray[np.bool_]
    size: Ints
    producer: Ints

    def flat(self) -> tuple[Any, ...]:
        """The arrays in the order in which the compiled functions take them."""
        return tuple(vars(self).values())


def to_arrays(problem: Problem) -> Arrays:
    """The arrays of `problem`."""

    def ragged(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
        start = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(x) for x in lists], out=start[1:])
        return start, np.array([v for x in lists for v in x], np.int64)

    p = problem
    return Arrays(
        *ragged(p.reads),
        *ragged(p.writes),
        *ragged(p.takes),
        np.array(p.workspace, np.int64),
        np.array(p.cost, np.float64),
        np.array(p.repeatable, np.bool_),
        np.array(p.size, np.int64),
        np.array(p.producer, np.int64),
    )


@compiled
def _evaluate(  # type: ignore[no-untyped-def]
    sequence, length, budget, use, alive, wanted, first,
    read_start, reads, write_start, writes, take_start, takes,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Fill `use` (bytes) and `alive` per step; return extra time and excess.

    With x = bytes above the budget / budget, the excess is the sum over the steps of
    0.3 x + 0.1 sqrt(x): the root makes the last small violations worth removing.
    """
    n = len(cost)
    for o in range(n):
        first[o] = -1
    for step in range(length):
        if first[sequence[step]] < 0:
            first[sequence[step]] = step
    live = 0
    for t in range(len(size)):
        wanted[t] = False
    for k in range(read_start[n], read_start[n + 1]):
        wanted[reads[k]] = True
        live += size[reads[k]]
    extra = 0.0
    excess = 0.0
    for step in range(length - 1, -1, -1):
        o = sequence[step]
        again = first[o] != step
        if again:
            useful = False
            for k in range(write_start[o], write_start[o + 1]):
                if wanted[writes[k]]:
                    useful = True
            alive[step] = useful
            if not useful:
                use[step] = 0
                continue
            extra += cost[o]
        else:
            alive[step] = True
        during = live + workspace[o]
        for k in range(write_start[o], write_start[o + 1]):
            t = writes[k]
            if wanted[t]:
                wanted[t] = False
                live -= size[t]
            else:
                during += size[t]
        gift = 0
        for k in range(read_start[o], read_start[o + 1]):
            t = reads[k]
            if not wanted[t]:
                wanted[t] = True
                live += size[t]
                during += size[t]
                # All that may be taken over are equally large.
                if not gift:
                    for j in range(take_start[o], take_start[o + 1]):
                        if takes[j] == t:
                            gift = size[t]
        during -= gift
        use[step] = during
        if during > budget:
            over = (during - budget) / budget
            excess += 0.3 * over + 0.1 * np.sqrt(over)
    return extra, excess


@compiled
def _anneal(  # type: ignore[no-untyped-def]
    start, length, budget, iterations, hot, cold, price, rate, seed, capacity, known,
    read_start, reads, write_start, writes, take_start, takes,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Anneal from start[:length], looking for fitting sequences cheaper than `known`.

    Returns that sequence (empty: none found), its extra time, the last sequence and the price.
    """
    np.random.seed(seed)
    n = len(cost)
    problem = (
        read_start, reads, write_start, writes, take_start, takes,
        workspace, cost, repeatable, size, producer,
    )  # fmt: skip
    use = np.zeros(capacity, np.int64)
    new_use = np.zeros(capacity, np.int64)
    alive = np.zeros(capacity, np.bool_)
    wanted = np.zeros(len(size), np.bool_)
    first = np.zeros(n, np.int64)
    trial_first = np.zeros(n, np.int64)
    current = np.zeros(capacity, np.int64)
    trial = np.zeros(capacity, np.int64)
    best = np.zeros(capacity, np.int64)
    best_length = 0
    best_cost = known
    chain = np.zeros(64, np.int64)
    again = np.zeros(capacity, np.int64)
    bad = np.zeros(capacity, np.int64)
    seen = np.zeros(len(size), np.int64)
    stamp = 0
    current[:length] = start[:length]
    extra, excess = _evaluate(current, length, budget, use, alive, wanted, first, *problem)
    if excess == 0.0 and extra < best_cost:
        best_cost = extra
        best_length = length
        best[:length] = current[:length]
    n_again = 0
    n_bad = 0
    dirty = True
    cooling = (cold / hot) ** (1.0 / max(1, iterations))
    temperature = hot
    for _ in range(iterations):
        temperature *= cooling
        if dirty:
            n_again = 0
            n_bad = 0
            for o in range(n):
                first[o] = -1
            for step in range(length):
                o = current[step]
                if first[o] < 0:
                    first[o] = step
                else:
                    again[n_again] = step
                    n_again += 1
                if use[step] > budget:
                    bad[n_bad] = step
                    n_bad += 1
            dirty = False
        new_length = length
        kind = np.random.random()
        if n_bad > 0:
            price *= 1.0 + rate
        else:
            price *= 1.0 - rate
        if kind < 0.1 and n_again > 0:
            # Remove one re-execution.
            s = again[np.random.randint(n_again)]
            trial[:s] = current[:s]
            trial[s : length - 1] = current[s + 1 : length]
            new_length = length - 1
        elif kind < 0.4 and n_again > 0:
            # Move a run of re-executions.
            s = again[np.random.randint(n_again)]
            run = 1
            if np.random.random() < 0.5:
                limit = np.random.randint(1, 9)
                while run < limit and s + run < length and first[current[s + run]] != s + run:
                    run += 1
            earliest = 0
            for k in range(s, s + run):
                earliest = max(earliest, first[current[k]] + 1)
            if np.random.random() < 0.5:
                reach = 1 << np.random.randint(0, 8)
                target = s + np.random.randint(-reach, reach + 1)
            else:
                # Right before the first use of what the run's last operation writes.
                o = current[s + run - 1]
                target = s
                for step in range(s + run, length):
                    hit = False
                    for k in range(read_start[current[step]], read_start[current[step] + 1]):
                        if producer[reads[k]] == o:
                            hit = True
                    if hit:
                        target = step - run
                        break
            target = min(max(target, earliest), length - run)
            if target == s:
                continue
            trial[:length] = current[:length]
            if target < s:
                trial[target + run : s + run] = current[target:s]
            else:
                trial[s:target] = current[s + run : target + run]
            trial[target : target + run] = current[s : s + run]
        else:
            # Free a buffer that lies idle across a step: execute its producer again later.
            if n_bad > 0 and np.random.random() < 0.8:
                s = bad[np.random.randint(n_bad)]
            else:
                s = np.random.randint(length)
            stamp += 1
            total = 0.0
            chosen = -1
            before = length
            for k in range(read_start[current[s]], read_start[current[s] + 1]):
                seen[reads[k]] = stamp
            for k in range(write_start[current[s]], write_start[current[s] + 1]):
                seen[writes[k]] = stamp
            for step in range(s + 1, length + 1):
                o = current[step] if step < length else n
                for k in range(read_start[o], read_start[o + 1]):
                    t = reads[k]
                    if seen[t] != stamp:
                        seen[t] = stamp
                        if repeatable[producer[t]] and first[producer[t]] < s:
                            total += size[t]
                            if np.random.random() * total < size[t]:
                                chosen = t
                                before = step
                if step < length:
                    for k in range(write_start[o], write_start[o + 1]):
                        seen[writes[k]] = stamp
            if chosen < 0:
                continue
            if np.random.random() < 0.2:
                before = np.random.randint(s + 1, before + 1)
            # What is in memory just before step `before`?
            for t in range(len(size)):
                wanted[t] = False
            for k in range(read_start[n], read_start[n + 1]):
                wanted[reads[k]] = True
            for step in range(length - 1, before - 1, -1):
                o = current[step]
                for k in range(write_start[o], write_start[o + 1]):
                    wanted[writes[k]] = False
                for k in range(read_start[o], read_start[o + 1]):
                    wanted[reads[k]] = True
            m = 1
            chain[0] = producer[chosen]
            head = 0
            eager = 0.9 if np.random.random() < 0.7 else 0.4
            while head < m:
                o = chain[head]
                head += 1
                for k in range(read_start[o], read_start[o + 1]):
                    t = reads[k]
                    u = producer[t]
                    if (
                        not wanted[t]
                        and repeatable[u]
                        and m < len(chain)
                        and np.random.random() < eager
                    ):
                        known_already = False
                        for j in range(m):
                            if chain[j] == u:
                                known_already = True
                        if not known_already:
                            chain[m] = u
                            m += 1
            if length + m > capacity:
                continue
            # Operation numbers are a topological order.
            run_ops = np.sort(chain[:m])
            trial[:before] = current[:before]
            trial[before : before + m] = run_ops
            # Later executions of the same operations may have become superfluous: without this,
            # widening what is executed again at once costs twice before it pays.
            horizon = before
            if np.random.random() < 0.5:
                horizon += 1 << np.random.randint(2, 12)
            new_length = before + m
            for step in range(before, length):
                o = current[step]
                superfluous = False
                if step < horizon and first[o] != step:
                    for j in range(m):
                        if chain[j] == o:
                            superfluous = True
                if not superfluous:
                    trial[new_length] = o
                    new_length += 1
        new_extra, new_excess = _evaluate(
            trial, new_length, budget, new_use, alive, wanted, trial_first, *problem
        )
        delta = new_extra - extra + price * (new_excess - excess)
        if delta <= 0.0 or np.random.random() < np.exp(-delta / temperature):
            length = 0
            for step in range(new_length):
                if alive[step]:
                    current[length] = trial[step]
                    use[length] = new_use[step]
                    length += 1
            extra, excess = new_extra, new_excess
            dirty = True
            if excess == 0.0 and extra < best_cost - 1e-12:
                best_cost = extra
                best_length = length
                best[:length] = current[:length]
    return best[:best_length], best_cost, current[:length], price


@dataclass(frozen=True)
class Annealed:
    """Where an annealing ended."""

    best: list[int] | None
    """The cheapest sequence found that fits and is cheaper than what was known; None if none."""
    cost: float
    """Extra time of `best` as a fraction of the plain step."""
    last: list[int]


def anneal(
    arrays: Arrays,
    sequence: Sequence[int],
    budget: int,
    *,
    iterations: int,
    hot: float = 3.0,
    cold: float = 0.01,
    price: float = 10.0,
    seed: int = 0,
    known: float = float("inf"),
    stop: Callable[[], bool] = lambda: False,
) -> Annealed:
    """Anneal from `sequence`, a valid one, under `budget` bytes (without resident data).

    Args:
        iterations: moves tried in all.
        hot, cold: first and last temperature, in mean operation times.
        price: initial price of exceeding the budget by all of it for one step, in mean
            operation times; it adapts.
        known: only a sequence cheaper than this is of interest.
        stop: asked a few times a second; ends the annealing early.
    """
    parts = max(1, round(iterations * len(sequence) / 20_000_000 + 0.5))
    last = np.asarray(sequence, np.int64)
    best: list[int] | None = None
    flat = arrays.flat()
    ratio = (cold / hot) ** (1.0 / parts)
    mean = 1.0 / max(1, len(arrays.cost))
    price *= mean
    # Short runs have to make up their minds sooner.
    rate = max(3e-4, 8.0 / iterations)
    for k in range(parts):
        start = hot * mean * ratio**k
        found, cost, last, price = interruptible(
            _anneal,
            last, len(last), budget, -(-iterations // parts), start, start * ratio, price, rate,
            (seed * 1009 + k) % 2**31, 2 * len(last) + 64, known, *flat,
        )  # fmt: skip
        if len(found):
            best, known = found.tolist(), float(cost)
        if stop():
            break
    return Annealed(best, known, last.tolist())
