"""Simulated annealing over the order of operations, compiled by numba.

`anneal_order` shifts single operations within what dependencies allow and judges an order by
what it needs in memory, both as it stands and after rematerialisation. `anneal_sequence`
searches orders and re-executions together, in one sequence of executions. Both are repeatable:
they end after a number of moves and draw from their own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.preprocess import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class OrderArrays(NamedTuple):
    """A problem as flat arrays; what belongs to operation o is at start[o]:start[o + 1]."""

    read_start: Ints
    reads: Ints
    """Position n, the end, reads the outputs."""
    write_start: Ints
    writes: Ints
    take_start: Ints
    takes: Ints
    parent_start: Ints
    parents: Ints
    """Operations that have to come before."""
    child_start: Ints
    children: Ints
    reader_start: Ints
    readers: Ints
    """Per buffer: operations that read it, the end included."""
    workspace: Ints
    cost: Floats
    repeatable: npt.NDArray[np.bool_]
    size: Ints
    producer: Ints


def to_order_arrays(problem: Problem, parents: Sequence[Sequence[int]]) -> OrderArrays:
    """The arrays of `problem`, whose operation o has to come after each of `parents[o]`."""
    p = problem
    children: list[list[int]] = [[] for _ in range(p.n)]
    for o, above in enumerate(parents):
        for a in above:
            children[a].append(o)
    return OrderArrays(
        *_ragged(p.reads),
        *_ragged(p.writes),
        *_ragged(p.takes),
        *_ragged(parents),
        *_ragged(children),
        *_ragged(p.base_readers),
        np.array(p.workspace, np.int64),
        np.array(p.cost, np.float64),
        np.array(p.repeatable, np.bool_),
        np.array(p.size, np.int64),
        np.array(p.producer, np.int64),
    )


def _ragged(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    start = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(x) for x in lists], out=start[1:])
    return start, np.array([v for x in lists for v in x], np.int64)


@compiled
def _window(  # type: ignore[no-untyped-def]
    order, low, high, live, fixed_live, last, stamp, mark,
    use, static, after, fixed_after, touched, touched_at,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Bytes as the operations at order[low..high] run, where only these have changed places.

    `live` and `fixed_live` are the bytes in memory behind `high`, in all and of what cannot be
    executed again; `last` the position of each buffer's last reader before the change. Fills
    `use` (everything kept), `static` (all that can be executed again is dropped), and the two
    counts behind each position; returns how many buffers are last read in the window now, listed
    in `touched` with the positions `touched_at`.
    """
    count = 0
    for p in range(high, low - 1, -1):
        o = order[p]
        after[p] = live
        fixed_after[p] = fixed_live
        during = live + workspace[o]
        need = fixed_live + workspace[o]
        for k in range(write_start[o], write_start[o + 1]):
            t = writes[k]
            if last[t] > high or stamp[t] == mark:
                live -= size[t]
                if repeatable[o]:
                    need += size[t]
                else:
                    fixed_live -= size[t]
            else:
                during += size[t]
                need += size[t]
        gift = 0
        fixed_gift = 0
        for k in range(read_start[o], read_start[o + 1]):
            t = reads[k]
            again = repeatable[producer[t]]
            dies = last[t] <= high and stamp[t] != mark
            if dies:
                stamp[t] = mark
                touched[count] = t
                touched_at[count] = p
                count += 1
                live += size[t]
                during += size[t]
                if not again:
                    fixed_live += size[t]
            if again or dies:
                need += size[t]
                # All that may be taken over are equally large.
                if not fixed_gift or (dies and not gift):
                    for j in range(take_start[o], take_start[o + 1]):
                        if takes[j] == t:
                            fixed_gift = size[t]
                            if dies:
                                gift = size[t]
        use[p] = during - gift
        static[p] = need - fixed_gift
    return count


@compiled
def _anneal_order(  # type: ignore[no-untyped-def]
    order, budget, moves, hot, cold, weights, seed,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Anneal `order` by shifts; returns the best one, its value, the last one.

    The value of an order is, with u and s the bytes in use and the static bytes per position,
    weights . (max u / M, max s / M, mean (s / M)^4, mean (u / max u at the start)^8).
    """
    np.random.seed(seed)
    n = len(cost)
    problem = (
        read_start, reads, write_start, writes, take_start, takes,
        parent_start, parents, child_start, children, reader_start, readers,
        workspace, cost, repeatable, size, producer,
    )  # fmt: skip
    position = np.zeros(n, np.int64)
    last = np.full(len(size), -1, np.int64)
    stamp = np.zeros(len(size), np.int64)
    touched = np.zeros(len(size), np.int64)
    touched_at = np.zeros(len(size), np.int64)
    use = np.zeros(n, np.int64)
    static = np.zeros(n, np.int64)
    after = np.zeros(n, np.int64)
    fixed_after = np.zeros(n, np.int64)
    new_use = np.zeros(n, np.int64)
    new_static = np.zeros(n, np.int64)
    new_after = np.zeros(n, np.int64)
    new_fixed_after = np.zeros(n, np.int64)
    order = order.copy()
    live = 0
    fixed_live = 0
    for p in range(n):
        position[order[p]] = p
    for k in range(read_start[n], read_start[n + 1]):
        t = reads[k]
        last[t] = n
        live += size[t]
        if not repeatable[producer[t]]:
            fixed_live += size[t]
    mark = 1
    count = _window(
        order, 0, n - 1, live, fixed_live, last, stamp, mark,
        use, static, after, fixed_after, touched, touched_at, *problem,
    )  # fmt: skip
    for k in range(count):
        last[touched[k]] = touched_at[k]
    scale = float(max(1, use.max()))
    m = float(max(1, budget))
    top = use.max()
    floor = static.max()
    fourth = 0.0
    eighth = 0.0
    for p in range(n):
        fourth += (static[p] / m) ** 4
        eighth += (use[p] / scale) ** 8
    value = (
        weights[0] * top / m
        + weights[1] * floor / m
        + (weights[2] * fourth + weights[3] * eighth) / n
    )
    best = order.copy()
    best_value = value
    cooling = (cold / hot) ** (1.0 / max(1, moves))
    temperature = hot
    reach_bits = 1
    while (1 << reach_bits) < n:
        reach_bits += 1
    for _ in range(moves):
        temperature *= cooling
        source = np.random.randint(n)
        o = order[source]
        reach = 1 << np.random.randint(0, reach_bits + 1)
        target = source + np.random.randint(-reach, reach + 1)
        earliest = 0
        for k in range(parent_start[o], parent_start[o + 1]):
            earliest = max(earliest, position[parents[k]] + 1)
        latest = n - 1
        for k in range(child_start[o], child_start[o + 1]):
            latest = min(latest, position[children[k]] - 1)
        target = min(max(target, earliest), latest)
        if target == source:
            continue
        low = min(source, target)
        high = max(source, target)
        if source < target:
            for p in range(source, target):
                order[p] = order[p + 1]
        else:
            for p in range(source, target, -1):
                order[p] = order[p - 1]
        order[target] = o
        mark += 1
        count = _window(
            order, low, high, after[high], fixed_after[high], last, stamp, mark,
            new_use, new_static, new_after, new_fixed_after, touched, touched_at, *problem,
        )  # fmt: skip
        old_top = 0
        old_floor = 0
        new_top = 0
        new_floor = 0
        change4 = 0.0
        change8 = 0.0
        for p in range(low, high + 1):
            old_top = max(old_top, use[p])
            new_top = max(new_top, new_use[p])
            old_floor = max(old_floor, static[p])
            new_floor = max(new_floor, new_static[p])
            a = new_static[p] / m
            b = static[p] / m
            a *= a
            b *= b
            change4 += a * a - b * b
            a = new_use[p] / scale
            b = use[p] / scale
            a *= a
            b *= b
            a *= a
            b *= b
            change8 += a * a - b * b
        if new_top < top:
            if old_top == top:
                for p in range(n):
                    if p < low or p > high:
                        new_top = max(new_top, use[p])
            else:
                new_top = top
        if new_floor < floor:
            if old_floor == floor:
                for p in range(n):
                    if p < low or p > high:
                        new_floor = max(new_floor, static[p])
            else:
                new_floor = floor
        new_value = (
            weights[0] * new_top / m
            + weights[1] * new_floor / m
            + (weights[2] * (fourth + change4) + weights[3] * (eighth + change8)) / n
        )
        delta = new_value - value
        if delta <= 0.0 or np.random.random() < np.exp(-delta / temperature):
            for p in range(low, high + 1):
                use[p] = new_use[p]
                static[p] = new_static[p]
                after[p] = new_after[p]
                fixed_after[p] = new_fixed_after[p]
                position[order[p]] = p
            for k in range(count):
                last[touched[k]] = touched_at[k]
            top, floor, value = new_top, new_floor, new_value
            fourth += change4
            eighth += change8
            if value < best_value - 1e-12:
                best_value = value
                best[:] = order
        elif source < target:
            for p in range(target, source, -1):
                order[p] = order[p - 1]
            order[source] = o
        else:
            for p in range(target, source):
                order[p] = order[p + 1]
            order[source] = o
    return best, best_value, order


Weights = tuple[float, float, float, float]

PEAK: Weights = (1.0, 0.0, 0.0, 0.05)
"""Weights for the peak of the plain step."""
MIX: Weights = (1.0, 1.0, 0.5, 0.05)
"""Weights for the peak of the plain step and for what no rematerialisation can remove."""


def anneal_order(
    arrays: OrderArrays,
    order: Sequence[int],
    budget: int,
    *,
    weights: Weights,
    moves: int,
    hot: float = 3e-3,
    cold: float = 1e-6,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[int], float]:
    """The best order that annealing from `order`, a valid one, comes upon, and its value.

    Args:
        budget: bytes without resident data; the unit of what is minimised.
        weights: of max u / M, max s / M, mean (s / M)^4 and mean (u / max u at the start)^8, where
            u and s are per position the bytes in use, and what stays if all that can be executed
            again is dropped.
        moves: shifts tried in all.
        hot, cold: first and last temperature, in units of the value.
        stop: asked a few times a second; ends the annealing early.
    """
    start = np.asarray(order, np.int64)
    n = len(start)
    if n == 0:
        return [], 0.0
    flat = tuple(arrays)
    parts = 1 + moves * n // 50_000_000
    ratio = (cold / hot) ** (1.0 / parts)
    best, best_value = start, float("inf")
    for k in range(parts):
        t0 = hot * ratio**k
        found, value, start = interruptible(
            _anneal_order, start, budget, -(-moves // parts), t0, t0 * ratio,
            np.array(weights), (seed * 1009 + k) % 2**31, *flat,
        )  # fmt: skip
        if value < best_value:
            best, best_value = found, float(value)
        if stop():
            break
    return best.tolist(), best_value
