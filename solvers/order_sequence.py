"""Simulated annealing over sequences of executions in which first executions may move, too.

A sequence can be executed if everything an execution reads has been computed before, and what
it has to come after has run. The search shifts executions within these limits, inserts and
removes re-executions, and judges a sequence by its extra time plus a price on bytes above the
budget. Re-executions whose results nobody reads are taken out. A move costs about a microsecond
(see `order_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.order_memory import END, accept, lay, new_line, new_trial, weigh, without_dead
from optckpt.solvers.order_moves import limits, link, next_use, shift_run, shift_together, unlink
from optckpt.solvers.order_search import OrderArrays

PART = 40_000_000
"""Moves times what one goes through that run without a look at the clock: a tenth of a second."""
MOVE, READER = 200, 20
"""What a move goes through besides positions, and for each two readers of a buffer: a guess, as
the executions of an operation may be one or hundreds, from which parts are planned."""
MOST = PART
"""What a part goes through before the clock is looked at all the same, some moves before its end;
two thirds of what `PART` counts, or less, suffice unless executions are many."""
MOST_ALONG = 200
"""Executions that a shift may take along; more cost more time than they are worth."""
DRAWS = 50
"""Buffers drawn in search of one that lies idle at a given position."""


@compiled
def _anneal(  # type: ignore[no-untyped-def]
    arrays, line, trial, start, budget, moves, hot, cold, price, rate, lean, shifts, together,
    most_along, seed, known, enough, most,
):  # fmt: skip
    """Anneal from `start`, looking for fitting sequences cheaper than `known`.

    Ends with the first move after which it has gone through `most`, if not before.
    Returns that sequence (empty: none found), its extra time, the last sequence, the price and
    how many moves it has tried.
    """
    np.random.seed(seed)
    n = len(arrays.cost)
    capacity = len(line.at)
    size, cost, repeatable = arrays.size, arrays.cost, arrays.repeatable
    place, at, operation, work = line.place, line.at, line.operation, line.work
    moved = trial.moved
    length = len(start)
    made, extra, excess, bad = lay(start, budget, arrays, line)
    trial.stamp[:] = 0
    trial.seen[:] = 0
    mark = 0
    met = np.zeros(2 * n, np.int64)
    chain = np.zeros(64, np.int64)
    again = np.zeros(capacity, np.int64)
    slot = np.zeros(capacity, np.int64)
    n_again = 0
    for i in range(n, made):
        again[n_again] = i
        slot[i] = n_again
        n_again += 1
    free = np.zeros(capacity, np.int64)
    n_free = 0
    doomed = np.zeros(len(trial.dead), np.int64)
    n_doomed = 0
    put_in = np.zeros(len(chain), np.int64)
    taken_out = np.zeros(capacity, np.int64)
    # Bytes up to each buffer of those that can be computed again.
    drawn_up_to = np.zeros(len(size), np.int64)
    total = 0
    for t in range(len(size)):
        if repeatable[arrays.producer[t]]:
            total += size[t]
        drawn_up_to[t] = total
    best = np.zeros(capacity, np.int64)
    best_length = 0
    best_cost = known
    if bad == 0 and extra < best_cost:
        best_cost = extra
        best_length = length
        best[:length] = start
    cooling = (cold / hot) ** (1.0 / max(1, moves))
    temperature = hot
    reach_bits = 1
    while (1 << reach_bits) < n:
        reach_bits += 1
    tried = 0
    while (tried < moves or n_doomed > 0) and (tried == 0 or work[0] < most):
        mark += 1
        work[0] += MOVE
        # What changes: positions low..high take other executions, `longer` more.
        longer = 0
        n_moved = 0
        n_in = 0
        n_out = 0
        added = 0.0
        forced = n_doomed > 0
        if forced:
            n_doomed -= 1
            i = doomed[n_doomed]
            if place[i] < 0:
                continue
            low = place[i]
            high = low
            longer = -1
            taken_out[0] = i
            n_out = 1
            allowance = np.inf
        else:
            tried += 1
            temperature *= cooling
            if bad > 0:
                price *= 1.0 + rate
            else:
                price = max(1e-9, price * (1.0 - rate))
            allowance = -temperature * np.log(1.0 - np.random.random())
            kind = np.random.random()
            if kind < shifts:
                # Shift one execution, mostly a first one.
                source = np.random.randint(length)
                if bad > 0 and np.random.random() < 0.2:
                    while line.use[source] <= budget:
                        work[0] += 1
                        source = source + 1 if source + 1 < length else 0
                i = at[source]
                style = np.random.random()
                reach = 1 << np.random.randint(0, reach_bits + 1)
                target = source + np.random.randint(-reach, reach + 1)
                if i < n and style < together:
                    target = min(max(target, 0), length - 1)
                    if target == source:
                        continue
                    low = min(source, target)
                    high = max(source, target)
                    along = shift_together(source, target, arrays, line, trial, met, mark)
                    if along == high - low or min(along, high - low - along) > most_along:
                        continue
                    if 2 * (along + 1) <= high - low + 1:
                        moved[along] = i
                        n_moved = along + 1
                    else:
                        # The others are fewer: it is they that move.
                        for k in range(along):
                            trial.stamp[moved[k]] = mark
                        trial.stamp[i] = mark
                        for p in range(low, high + 1):
                            if trial.stamp[at[p]] != mark:
                                moved[n_moved] = at[p]
                                n_moved += 1
                        mark += 1
                else:
                    earliest, latest, own = limits(i, arrays, line, length)
                    if style > 0.9:
                        target = earliest
                    elif style > 0.8:
                        target = latest
                    target = min(max(target, earliest), latest)
                    if target > own:
                        # A first execution takes the place of the second.
                        low = source
                        high = own
                        longer = -1
                        trial.at[low : high - 1] = at[low + 1 : high]
                        trial.at[high - 1] = i
                        taken_out[0] = at[own]
                        n_out = 1
                        moved[0] = i
                        n_moved = 1
                    elif target in (source, own):
                        continue
                    else:
                        low, high = shift_run(source, 1, target, line, trial)
                        moved[0] = i
                        n_moved = 1
            elif kind < shifts + 0.1 * (1.0 - shifts):
                # Remove one re-execution.
                if n_again == 0:
                    continue
                i = again[np.random.randint(n_again)]
                low = place[i]
                high = low
                longer = -1
                taken_out[0] = i
                n_out = 1
            elif kind < shifts + 0.4 * (1.0 - shifts):
                # Move a run of re-executions.
                if n_again == 0:
                    continue
                source = place[again[np.random.randint(n_again)]]
                run = 1
                if np.random.random() < 0.5:
                    limit = np.random.randint(1, 9)
                    while run < limit and source + run < length and at[source + run] >= n:
                        run += 1
                earliest = 0
                for p in range(source, source + run):
                    earliest = max(earliest, place[operation[at[p]]] + 1)
                if np.random.random() < 0.5:
                    reach = 1 << np.random.randint(0, 8)
                    target = source + np.random.randint(-reach, reach + 1)
                else:
                    # Right before the first use of what the run's last operation writes.
                    o = operation[at[source + run - 1]]
                    target = END
                    for k in range(arrays.write_start[o], arrays.write_start[o + 1]):
                        p = next_use(arrays.writes[k], source + run, arrays, line)
                        if p >= 0:
                            target = min(target, p - run)
                target = min(max(target, earliest), length - run)
                if target == source:
                    continue
                low, high = shift_run(source, run, target, line, trial)
                if 2 * run <= high - low + 1:
                    for k in range(run):
                        moved[k] = at[source + k]
                    n_moved = run
                else:
                    for p in range(low, high + 1):
                        if p < source or p >= source + run:
                            moved[n_moved] = at[p]
                            n_moved += 1
            else:
                # Free a buffer that lies idle at a position: execute its producer again later.
                if total == 0:
                    continue
                s = np.random.randint(length)
                if bad > 0 and np.random.random() < 0.8:
                    while line.use[s] <= budget:
                        work[0] += 1
                        s = s + 1 if s + 1 < length else 0
                before = -1
                chosen = -1
                for _ in range(DRAWS):
                    drawn = np.random.randint(total)
                    chosen = int(np.searchsorted(drawn_up_to, drawn, side="right"))
                    before = next_use(chosen, s, arrays, line)
                    if before > s:
                        break
                if before <= s:
                    continue
                before = min(before, length)
                if np.random.random() < 0.2:
                    before = np.random.randint(s + 1, before + 1)
                m = 1
                chain[0] = arrays.producer[chosen]
                met[chain[0]] = mark
                added = cost[chain[0]]
                head = 0
                eager = 0.9 if np.random.random() < 0.7 else 0.4
                while head < m:
                    o = chain[head]
                    head += 1
                    for k in range(arrays.read_start[o], arrays.read_start[o + 1]):
                        t = arrays.reads[k]
                        u = arrays.producer[t]
                        if (
                            repeatable[u]
                            and met[u] != mark
                            and m < len(chain)
                            and np.random.random() < eager
                            and next_use(t, before, arrays, line) < 0
                        ):
                            met[u] = mark
                            chain[m] = u
                            added += cost[u]
                            m += 1
                if length + m > capacity or made + m - n_free > capacity:
                    continue
                # Later executions of the same operations may have become superfluous: without
                # this, widening what is executed again at once costs twice before it pays.
                low = before
                high = before - 1
                longer = m
                if np.random.random() < 0.5:
                    horizon = min(length, before + (1 << np.random.randint(2, 12)))
                    end = before + m
                    for p in range(before, horizon):
                        i = at[p]
                        if i >= n and met[operation[i]] == mark:
                            high = p
                            longer = end - p - 1
                            taken_out[n_out] = i
                            n_out += 1
                            added -= cost[operation[i]]
                        else:
                            trial.at[end] = i
                            end += 1
                if added - price * excess > allowance:
                    continue
                # Operation numbers are a topological order.
                chain[:m] = np.sort(chain[:m])
                for k in range(m):
                    if n_free > 0:
                        n_free -= 1
                        i = free[n_free]
                    else:
                        i = made
                        made += 1
                    place[i] = -1
                    line.dying[i] = 0
                    link(i, chain[k], low, line)
                    trial.at[low + k] = i
                    put_in[k] = i
                    moved[k] = i
                n_moved = m
                n_in = m
        for k in range(n_out):
            i = taken_out[k]
            trial.place[i] = -1
            moved[n_moved] = i
            n_moved += 1
            if n_in == 0:
                added -= cost[operation[i]]
        for k in range(n_moved):
            trial.stamp[moved[k]] = mark
        work[0] += high - low
        for q in range(low, high + longer + 1):
            trial.place[trial.at[q]] = q
        fits, first, last, _, more_excess, more_bad, n_givers, n_dead = weigh(
            arrays, line, trial, low, high, longer, n_moved, mark, budget, price, lean, added,
            excess, allowance,
        )  # fmt: skip
        if not fits:
            for k in range(n_in):
                unlink(put_in[k], line)
                free[n_free] = put_in[k]
                n_free += 1
            continue
        accept(line, trial, length, low, high, longer, first, last, n_givers)
        length += longer
        extra += added
        excess += more_excess
        bad += more_bad
        if bad == 0:
            excess = 0.0
        for k in range(n_in):
            i = put_in[k]
            again[n_again] = i
            slot[i] = n_again
            n_again += 1
        for k in range(n_out):
            i = taken_out[k]
            unlink(i, line)
            place[i] = -1
            free[n_free] = i
            n_free += 1
            n_again -= 1
            again[slot[i]] = again[n_again]
            slot[again[n_again]] = slot[i]
        for k in range(n_dead):
            doomed[n_doomed] = trial.dead[k]
            n_doomed += 1
        if n_doomed == 0 and bad == 0 and extra < best_cost - 1e-12:
            extra = 0.0
            work[0] += length + n_again
            for k in range(n_again):
                extra += cost[operation[again[k]]]
            best_cost = extra
            best_length = length
            for p in range(length):
                best[p] = operation[at[p]]
            if extra <= enough:
                break
    for p in range(length):
        trial.at[p] = operation[at[p]]
    last = without_dead(trial.at[:length], arrays)
    return best[:best_length], best_cost, last, price, tried


@dataclass(frozen=True)
class Heat:
    """How orders and re-executions are annealed together."""

    hot: float
    """First temperature, a fraction of the plain step's time."""
    cold: float
    """The last one."""
    lean: float
    """Price of (bytes / budget)^8, averaged over the positions of the plain step; keeps the order
    from getting lost by shifts that matter only later on."""
    shifts: float
    """Share of the moves that shift executions, mostly first ones."""
    together: float = 0.4
    """Share of these that take along what depends on the execution, or what it depends on."""


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
    heat: Heat,
    *,
    moves: int,
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
        price: initial price of exceeding the budget by all of it for one step, in mean
            operation times; it adapts.
        known: only a sequence cheaper than this is of interest.
        enough: end as soon as a sequence that fits is at most this expensive.
        stop: asked a few times a second, whatever the sequence does; ends the annealing early.
    """
    readers = np.diff(arrays.reader_start)
    crowd = READER * int(readers @ readers) // max(1, len(readers))
    parts = 1 + moves * (MOVE + len(sequence) + crowd) // PART
    last = np.asarray(sequence, np.int64)
    best: list[int] | None = None
    ratio = (heat.cold / heat.hot) ** (1.0 / parts)
    price /= max(1, len(arrays.cost))
    lean = heat.lean / max(1, len(arrays.cost))
    # Short runs have to make up their minds sooner.
    rate = min(0.5, max(3e-4, 8.0 / moves))
    share = -(-moves // parts)
    done = 0
    looks = 0
    while True:
        k, before = divmod(done, share)
        start = heat.hot * ratio**k
        capacity = 2 * len(last) + 64
        line, trial = new_line(capacity), new_trial(arrays, capacity)
        found, cost, last, price, tried = interruptible(
            _anneal, arrays, line, trial, last, budget, share - before,
            start * ratio ** (before / share), start * ratio, price, rate, lean, heat.shifts,
            heat.together, MOST_ALONG, (seed * 1009 + looks) % 2**31, known, enough, MOST,
        )  # fmt: skip
        done += tried
        looks += 1
        if len(found):
            best, known = found.tolist(), float(cost)
        if done >= parts * share or known <= enough or stop():
            break
    return Annealed(best, known, last.tolist())
