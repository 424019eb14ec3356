"""Simulated annealing over sequences of executions in which first executions may move, too.

A sequence can be executed if everything an execution reads has been computed before, and what
it has to come after has run. The search shifts executions within these limits, inserts and
removes re-executions, and judges a sequence by its extra time plus a price on bytes above the
budget. Re-executions whose results nobody reads drop out by themselves.

An attempted move is evaluated from the next snapshot behind what it changes back to where the
memory's contents are the old ones again, a few microseconds in compiled code; only an accepted
one is evaluated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.order_memory import BLOCK, contents, evaluate, excess_of, step_back
from optckpt.solvers.order_search import OrderArrays


@compiled
def _anneal(  # type: ignore[no-untyped-def]
    start, budget, moves, hot, cold, price, rate, shifts, together, seed, capacity, known, enough,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Anneal from `start`, looking for fitting sequences cheaper than `known`.

    Returns that sequence (empty: none found), its extra time, the last sequence and the price.
    """
    np.random.seed(seed)
    n = len(cost)
    problem = (
        read_start, reads, write_start, writes, take_start, takes,
        parent_start, parents, child_start, children, reader_start, readers,
        workspace, cost, repeatable, size, producer,
    )  # fmt: skip
    use = np.zeros(capacity, np.int64)
    dead = np.zeros(capacity, np.int64)
    wanted = np.zeros(len(size), np.bool_)
    first = np.zeros(n, np.int64)
    new_first = np.zeros(n, np.int64)
    met = np.zeros(n, np.int64)
    blocks = capacity // BLOCK + 2
    snapshots = np.zeros((blocks, len(size)), np.bool_)
    new_snapshots = np.zeros((blocks, len(size)), np.bool_)
    new_snapshot_live = np.zeros(blocks, np.int64)
    new_use = np.zeros(capacity, np.int64)
    snapshot_live = np.zeros(blocks, np.int64)
    extra_before = np.zeros(blocks)
    excess_before = np.zeros(blocks)
    current = np.zeros(capacity, np.int64)
    trial = np.zeros(capacity, np.int64)
    merged = np.zeros(capacity, np.int64)
    best = np.zeros(capacity, np.int64)
    again = np.zeros(capacity, np.int64)
    bad = np.zeros(capacity, np.int64)
    along = np.zeros(capacity, np.int64)
    chain = np.zeros(64, np.int64)
    mark = 0
    length = len(start)
    current[:length] = start
    trial[:length] = start
    extra, excess = evaluate(
        current, length, budget, first, use, wanted, snapshots, snapshot_live,
        extra_before, excess_before, *problem,
    )  # fmt: skip
    best_length = 0
    best_cost = known
    if excess == 0.0 and extra < best_cost:
        best_cost = extra
        best_length = length
        best[:length] = current[:length]
    dirty = True
    n_again = 0
    n_bad = 0
    cooling = (cold / hot) ** (1.0 / max(1, moves))
    temperature = hot
    reach_bits = 1
    while (1 << reach_bits) < n:
        reach_bits += 1
    for _ in range(moves):
        temperature *= cooling
        if dirty:
            n_again = 0
            n_bad = 0
            for step in range(length):
                if first[current[step]] != step:
                    again[n_again] = step
                    n_again += 1
                if use[step] > budget:
                    bad[n_bad] = step
                    n_bad += 1
            dirty = False
        if n_bad > 0:
            price *= 1.0 + rate
        else:
            price *= 1.0 - rate
        # What changes: current[low..high] becomes trial[low..high + longer].
        longer = 0
        kind = np.random.random()
        if kind < shifts:
            # Shift one execution, mostly a first one.
            if n_bad > 0 and np.random.random() < 0.2:
                source = bad[np.random.randint(n_bad)]
            else:
                source = np.random.randint(length)
            o = current[source]
            original = first[o] == source
            style = np.random.random()
            reach = 1 << np.random.randint(0, reach_bits + 1)
            target = source + np.random.randint(-reach, reach + 1)
            if original and style < together:
                # What has to come before it, or after it, gives way.
                target = min(max(target, 0), length - 1)
                if target == source:
                    continue
                low = min(source, target)
                high = max(source, target)
                mark += 1
                n_along = 0
                if source < target:
                    met[o] = mark
                    for k in range(child_start[o], child_start[o + 1]):
                        met[children[k]] = mark
                    end = low
                    for step in range(source + 1, target + 1):
                        u = current[step]
                        if met[u] == mark:
                            along[n_along] = u
                            n_along += 1
                            for k in range(child_start[u], child_start[u + 1]):
                                met[children[k]] = mark
                        else:
                            trial[end] = u
                            end += 1
                    trial[end] = o
                    trial[end + 1 : high + 1] = along[:n_along]
                else:
                    for k in range(parent_start[o], parent_start[o + 1]):
                        met[parents[k]] = mark
                    end = high
                    for step in range(source - 1, target - 1, -1):
                        u = current[step]
                        if met[u] == mark:
                            along[n_along] = u
                            n_along += 1
                            for k in range(parent_start[u], parent_start[u + 1]):
                                met[parents[k]] = mark
                        else:
                            trial[end] = u
                            end -= 1
                    trial[end] = o
                    for k in range(n_along):
                        trial[end - 1 - k] = along[k]
                if n_along == high - low:
                    continue
            else:
                earliest = 0
                latest = length - 1
                if original:
                    for k in range(parent_start[o], parent_start[o + 1]):
                        earliest = max(earliest, first[parents[k]] + 1)
                    for k in range(child_start[o], child_start[o + 1]):
                        latest = min(latest, first[children[k]] - 1)
                else:
                    earliest = first[o] + 1
                if style > 0.9:
                    target = earliest
                elif style > 0.8:
                    target = latest
                target = min(max(target, earliest), latest)
                if target == source:
                    continue
                low = min(source, target)
                high = max(source, target)
                if source < target:
                    trial[source:target] = current[source + 1 : target + 1]
                else:
                    trial[target + 1 : source + 1] = current[target:source]
                trial[target] = o
        elif kind < shifts + 0.1 * (1.0 - shifts):
            # Remove one re-execution.
            if n_again == 0:
                continue
            low = again[np.random.randint(n_again)]
            high = low
            longer = -1
        elif kind < shifts + 0.4 * (1.0 - shifts):
            # Move a run of re-executions.
            if n_again == 0:
                continue
            source = again[np.random.randint(n_again)]
            run = 1
            if np.random.random() < 0.5:
                limit = np.random.randint(1, 9)
                while (
                    run < limit
                    and source + run < length
                    and first[current[source + run]] != source + run
                ):
                    run += 1
            earliest = 0
            for k in range(source, source + run):
                earliest = max(earliest, first[current[k]] + 1)
            if np.random.random() < 0.5:
                reach = 1 << np.random.randint(0, 8)
                target = source + np.random.randint(-reach, reach + 1)
            else:
                # Right before the first use of what the run's last operation writes.
                o = current[source + run - 1]
                mark += 1
                for k in range(write_start[o], write_start[o + 1]):
                    t = writes[k]
                    for j in range(reader_start[t], reader_start[t + 1]):
                        met[readers[j]] = mark
                target = source
                for step in range(source + run, length):
                    if met[current[step]] == mark:
                        target = step - run
                        break
            target = min(max(target, earliest), length - run)
            if target == source:
                continue
            low = min(source, target)
            high = max(source, target) + run - 1
            if target < source:
                trial[target + run : source + run] = current[target:source]
            else:
                trial[source:target] = current[source + run : target + run]
            trial[target : target + run] = current[source : source + run]
        else:
            # Free a buffer that lies idle across a step: execute its producer again later.
            if n_bad > 0 and np.random.random() < 0.8:
                s = bad[np.random.randint(n_bad)]
            else:
                s = np.random.randint(length)
            contents(s + 1, current, length, wanted, snapshots, *problem)
            o = current[s]
            for k in range(read_start[o], read_start[o + 1]):
                wanted[reads[k]] = False
            for k in range(write_start[o], write_start[o + 1]):
                wanted[writes[k]] = False
            total = 0
            for t in range(len(size)):
                if wanted[t] and repeatable[producer[t]]:
                    total += size[t]
                else:
                    wanted[t] = False
            if total == 0:
                continue
            drawn = np.random.randint(total)
            chosen = -1
            while drawn >= 0:
                chosen += 1
                if wanted[chosen]:
                    drawn -= size[chosen]
            mark += 1
            for k in range(reader_start[chosen], reader_start[chosen + 1]):
                if readers[k] < n:
                    met[readers[k]] = mark
            before = length
            for step in range(s + 1, length):
                if met[current[step]] == mark:
                    before = step
                    break
            if np.random.random() < 0.2:
                before = np.random.randint(s + 1, before + 1)
            contents(before, current, length, wanted, snapshots, *problem)
            mark += 1
            m = 1
            chain[0] = producer[chosen]
            met[chain[0]] = mark
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
                        and met[u] != mark
                        and m < len(chain)
                        and np.random.random() < eager
                    ):
                        met[u] = mark
                        chain[m] = u
                        m += 1
            if length + m > capacity:
                continue
            # Operation numbers are a topological order.
            trial[before : before + m] = np.sort(chain[:m])
            # Later executions of the same operations may have become superfluous: without this,
            # widening what is executed again at once costs twice before it pays.
            low = before
            high = before - 1
            longer = m
            if np.random.random() < 0.5:
                horizon = min(length, before + (1 << np.random.randint(2, 12)))
                end = before + m
                for step in range(before, horizon):
                    o = current[step]
                    if met[o] == mark and first[o] != step:
                        high = step
                        longer = end - step - 1
                    else:
                        trial[end] = o
                        end += 1
        # The most that the objective may rise by.
        allowance = -temperature * np.log(1.0 - np.random.random())
        if kind >= shifts + 0.4 * (1.0 - shifts):
            added = 0.0
            for step in range(low, high + longer + 1):
                o = trial[step]
                added += cost[o]
            for step in range(low, high + 1):
                added -= cost[current[step]]
            if added - price * excess > allowance:
                continue
        # Which executions of the changed part are the first ones now?
        mark += 1
        for step in range(low, high + longer + 1):
            o = trial[step]
            if first[o] >= low and met[o] != mark:
                met[o] = mark
                new_first[o] = step
        # Back from a snapshot to where the contents of the memory are the old ones.
        top = (high + BLOCK) // BLOCK
        if top * BLOCK >= length:
            wanted[:] = False
            live = 0
            for k in range(read_start[n], read_start[n + 1]):
                wanted[reads[k]] = True
                live += size[reads[k]]
            new_extra = 0.0
            new_excess = 0.0
            behind = length
        else:
            wanted[:] = snapshots[top]
            live = snapshot_live[top]
            behind = top * BLOCK
            new_extra = extra - extra_before[top]
            new_excess = excess - excess_before[top]
        n_dead = 0
        step = behind - 1 + longer
        while step >= 0:
            if step > high + longer:
                o = current[step - longer]
                is_again = met[o] == mark or first[o] != step - longer
            elif step >= low:
                o = trial[step]
                is_again = met[o] != mark or new_first[o] != step
            else:
                if (step + 1) % BLOCK == 0:
                    k = (step + 1) // BLOCK
                    if live == snapshot_live[k] and np.array_equal(wanted, snapshots[k]):
                        new_extra += extra_before[k]
                        new_excess += excess_before[k]
                        break
                o = current[step]
                is_again = first[o] != step
            if (step + 1) % BLOCK == 0:
                new_snapshots[(step + 1) // BLOCK] = wanted
                new_snapshot_live[(step + 1) // BLOCK] = live
            during, live = step_back(o, is_again, live, wanted, *problem)
            new_use[step] = during
            if during < 0:
                dead[n_dead] = step
                n_dead += 1
            else:
                if is_again:
                    new_extra += cost[o]
                new_excess += excess_of(during, budget)
            step -= 1
        delta = new_extra - extra + price * (new_excess - excess)
        if delta > allowance:
            continue
        if longer == 0 and n_dead == 0:
            current[low : high + 1] = trial[low : high + 1]
            for k in range(low, high + 1):
                if met[current[k]] == mark:
                    first[current[k]] = new_first[current[k]]
            use[step + 1 : behind] = new_use[step + 1 : behind]
            k = (step + 1) // BLOCK
            extra = extra_before[k]
            excess = excess_before[k]
            for j in range(k * BLOCK, length + 1):
                if j % BLOCK == 0:
                    extra_before[j // BLOCK] = extra
                    excess_before[j // BLOCK] = excess
                    if k * BLOCK < j < behind:
                        snapshots[j // BLOCK] = new_snapshots[j // BLOCK]
                        snapshot_live[j // BLOCK] = new_snapshot_live[j // BLOCK]
                if j < length:
                    if first[current[j]] != j:
                        extra += cost[current[j]]
                    excess += excess_of(use[j], budget)
        else:
            end = 0
            for step in range(length + longer):
                if n_dead > 0 and dead[n_dead - 1] == step:
                    n_dead -= 1
                    continue
                if step < low:
                    merged[end] = current[step]
                elif step <= high + longer:
                    merged[end] = trial[step]
                else:
                    merged[end] = current[step - longer]
                end += 1
            length = end
            current[:length] = merged[:length]
            extra, excess = evaluate(
                current, length, budget, first, use, wanted, snapshots, snapshot_live,
                extra_before, excess_before, *problem,
            )  # fmt: skip
        dirty = True
        if excess == 0.0 and extra < best_cost - 1e-12:
            best_cost = extra
            best_length = length
            best[:length] = current[:length]
            if extra <= enough:
                break
    return best[:best_length], best_cost, current[:length], price


@dataclass(frozen=True)
class Annealed:
    """Where an annealing ended."""

    best: list[int] | None
    """The cheapest sequence found that fits and is cheaper than what was known; None if none."""
    cost: float
    """Extra time of `best` as a fraction of the plain step."""
    last: list[int]


def anneal_sequence(
    arrays: OrderArrays,
    sequence: Sequence[int],
    budget: int,
    *,
    moves: int,
    hot: float,
    cold: float,
    shifts: float,
    together: float = 0.4,
    price: float = 10.0,
    seed: int = 0,
    known: float = float("inf"),
    enough: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> Annealed:
    """Anneal from `sequence`, valid and without dead re-executions, under `budget` bytes.

    Args:
        budget: without resident data.
        moves: tried in all.
        hot, cold: first and last temperature, fractions of the plain step's time.
        shifts: share of the moves that shift executions, mostly first ones.
        together: share of those that take along what depends on the execution, or what it
            depends on.
        price: initial price of exceeding the budget by all of it for one step, in mean
            operation times; it adapts.
        known: only a sequence cheaper than this is of interest.
        enough: end as soon as a sequence that fits is at most this expensive.
        stop: asked a few times a second; ends the annealing early.
    """
    parts = 1 + max(moves // 25_000, moves * len(sequence) // 20_000_000)
    last = np.asarray(sequence, np.int64)
    best: list[int] | None = None
    flat = arrays.flat()
    ratio = (cold / hot) ** (1.0 / parts)
    price /= max(1, len(arrays.cost))
    # Short runs have to make up their minds sooner.
    rate = min(0.5, max(3e-4, 8.0 / moves))
    for k in range(parts):
        start = hot * ratio**k
        found, cost, last, price = interruptible(
            _anneal, last, budget, -(-moves // parts), start, start * ratio, price, rate, shifts,
            together, (seed * 1009 + k) % 2**31, 2 * len(last) + 64, known, enough, *flat,
        )  # fmt: skip
        if len(found):
            best, known = found.tolist(), float(cost)
        if known <= enough or stop():
            break
    return Annealed(best, known, last.tolist())
