"""Memory of a sequence of executions in any order, and how a change of it changes that; compiled.

A *line* is a sequence under change: numbered executions, of which number o is the first execution
of operation o, larger numbers are re-executions. What a change of a stretch of it does to memory
is found from the copies of the buffers that its executions touch; all other copies merely move
along. That takes a pass of a few operations per position of the stretch, and no look at the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from optckpt.solvers.compiling import compiled
from optckpt.solvers.order_search import OrderArrays

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

END = 1 << 40
"""The position of the end of the step, behind all others."""


class Line(NamedTuple):
    """A sequence of executions; arrays by position or by execution."""

    at: Ints
    """The execution at each position."""
    place: Ints
    """The position of each execution; -1 if it is not in the sequence."""
    operation: Ints
    """Of each execution."""
    following: Ints
    """The next execution of the same operation; -1 if there is none. By position, but for those
    that have been moved: it takes long to go through many that are not in order."""
    use: Ints
    """Bytes in memory during the execution at each position."""
    live: Ints
    """Bytes in memory behind it."""
    dying: Ints
    """How many inputs that could give their memory to its output die in each execution."""
    work: Ints
    """One number: executions, positions and buffers gone through so far."""


class Trial(NamedTuple):
    """A line under a change: positions low..high take other executions, `longer` more."""

    at: Ints
    place: Ints
    """New positions of executions that are, or were, within the change; -1: taken out."""
    use: Ints
    live: Ints
    moved: Ints
    """Executions that are put in, taken out or shifted against the others."""
    stamp: Ints
    """Of executions: the number of the trial in which they are among the moved."""
    touched: Ints
    """Buffers that the moved executions read or write."""
    seen: Ints
    """Of buffers: the number of the trial in which they are among the touched."""
    begins: Ints
    """Bytes of touched buffers whose copies begin to live at a position, before the change."""
    ends: Ints
    """Bytes of touched buffers whose copies live up to a position, before the change."""
    new_begins: Ints
    new_ends: Ints
    corners: Ints
    """Positions where these are not 0."""
    new_corners: Ints
    givers: Ints
    """Executions in which fewer or more inputs die that could give."""
    gives: Ints
    """By how many the number changes, per execution."""
    dead: Ints
    """Re-executions that nobody needs any more."""
    births: Ints
    deaths: Ints
    makers: Ints
    users: Ints
    """Scratch of `copies`."""


def new_line(capacity: int) -> Line:
    """An empty line with room for `capacity` executions."""
    return Line(*(np.zeros(1 if f == "work" else capacity, np.int64) for f in Line._fields))


def new_trial(arrays: OrderArrays, capacity: int) -> Trial:
    """A trial for a line with room for `capacity` executions of `arrays`."""
    buffers = len(arrays.size)
    again = max(0, capacity - len(arrays.cost))
    copies = buffers + again * int(np.diff(arrays.write_start).max(initial=0))
    room = {"corners": 2 * copies, "new_corners": 2 * copies, "givers": 2 * copies, "dead": copies}
    size = max(capacity, buffers)
    return Trial(*(np.zeros(room.get(f, size), np.int64) for f in Trial._fields))


@compiled
def excess_of(during, budget):  # type: ignore[no-untyped-def]
    """The excess of one position, 0.3 x + 0.1 sqrt(x) for x = bytes above the budget / budget:
    the root makes the last small violations worth removing."""
    over = (during - budget) / budget
    return 0.3 * over + 0.1 * np.sqrt(over)


@compiled
def _eighth(during, budget):  # type: ignore[no-untyped-def]
    x = during / budget
    x *= x
    x *= x
    return x * x


@compiled
def copies(  # type: ignore[no-untyped-def]
    t, low, high, longer, producer, reader_start, readers, n, place, following, new_place,
    births, deaths, makers, users, work,
):  # fmt: skip
    """The copies of buffer t in the order in which they are made; returns their number.

    Fills births and deaths (first and last positions), makers and users (the executions there;
    the last user is -1 if none reads it, or if the step's end does). Positions are those after a
    change of low..high by `longer`, which puts executions into `new_place` there. Where the
    executions of an operation follow each other in order, one pass over them does.
    """
    count = 0
    steps = 0
    i = producer[t]
    while i >= 0:
        steps += 1
        p = place[i]
        if p < 0 or (low <= p and p <= high):
            p = new_place[i]
        elif p > high:
            p += longer
        if p >= 0:
            k = count
            while k > 0 and births[k - 1] > p:
                births[k] = births[k - 1]
                makers[k] = makers[k - 1]
                k -= 1
                steps += 1
            births[k] = p
            makers[k] = i
            count += 1
        i = following[i]
    for k in range(count):
        deaths[k] = births[k]
        users[k] = -1
    for j in range(reader_start[t], reader_start[t + 1]):
        i = readers[j]
        if i == n:
            deaths[count - 1] = END
            users[count - 1] = -1
            continue
        k = 0
        while i >= 0:
            steps += 1
            p = place[i]
            if p < 0 or (low <= p and p <= high):
                p = new_place[i]
            elif p > high:
                p += longer
            if p >= 0:
                while k + 1 < count and births[k + 1] < p:
                    k += 1
                    steps += 1
                while births[k] > p:
                    k -= 1
                    steps += 1
                if p > deaths[k]:
                    deaths[k] = p
                    users[k] = i
            i = following[i]
    work[0] += steps
    return count


@compiled
def _among(t, start, stop, buffers):  # type: ignore[no-untyped-def]
    found = False
    for k in range(start, stop):
        found = found or buffers[k] == t
    return found


@compiled
def weigh(  # type: ignore[no-untyped-def]
    arrays, line, trial, low, high, longer, moved, mark, budget, price, lean, added, excess,
    allowance,
):  # fmt: skip
    """What a change costs; fills trial.use and trial.live where memory differs.

    trial.at and trial.place hold the new executions at low..high + longer, trial.moved[:moved]
    those that are not merely shifted along, whose `stamp` is `mark`. `added` is what the change
    adds in extra time by itself. Gives up if extra time plus `price` times the excess rises by
    more than `allowance`, or the same with `lean` times the sum of (bytes / budget)^8, too.

    Returns whether it does not, the stretch of new positions at which memory differs, what is
    added in extra time, excess and number of positions above the budget, and the numbers of
    entries in trial.givers and trial.dead.
    """
    size, workspace, producer = arrays.size, arrays.workspace, arrays.producer
    read_start, reads, write_start, writes, take_start, takes = (
        arrays.read_start, arrays.reads, arrays.write_start, arrays.writes,
        arrays.take_start, arrays.takes,
    )  # fmt: skip
    reader_start, readers, n = arrays.reader_start, arrays.readers, len(arrays.cost)
    at, place, operation, following, use, live, dying, work = line
    (
        new_at, new_place, new_use, new_live, moved_items, stamp, touched_buffers, seen,
        begins, ends, new_begins, new_ends, corner, new_corner, givers, gives, dead_items,
        births, deaths, makers, users,
    ) = trial  # fmt: skip
    touched = 0
    for m in range(moved):
        o = operation[moved_items[m]]
        for k in range(read_start[o], read_start[o + 1]):
            t = reads[k]
            if seen[t] != mark:
                seen[t] = mark
                touched_buffers[touched] = t
                touched += 1
        for k in range(write_start[o], write_start[o + 1]):
            t = writes[k]
            if seen[t] != mark:
                seen[t] = mark
                touched_buffers[touched] = t
                touched += 1
    corners = 0
    new_corners = 0
    n_givers = 0
    dead = 0
    for m in range(touched):
        t = touched_buffers[m]
        count = copies(
            t, END, END, 0, producer, reader_start, readers, n, place, following, place,
            births, deaths, makers, users, work,
        )  # fmt: skip
        for k in range(count):
            begins[births[k]] += size[t]
            corner[corners] = births[k]
            corners += 1
            if deaths[k] < END:
                ends[deaths[k]] += size[t]
                corner[corners] = deaths[k]
                corners += 1
            i = users[k]
            if i >= 0 and _among(t, take_start[operation[i]], take_start[operation[i] + 1], takes):
                gives[i] -= 1
                givers[n_givers] = i
                n_givers += 1
        count = copies(
            t, low, high, longer, producer, reader_start, readers, n, place, following,
            new_place, births, deaths, makers, users, work,
        )  # fmt: skip
        for k in range(count):
            new_begins[births[k]] += size[t]
            new_corner[new_corners] = births[k]
            new_corners += 1
            if deaths[k] < END:
                new_ends[deaths[k]] += size[t]
                new_corner[new_corners] = deaths[k]
                new_corners += 1
            i = users[k]
            if i >= 0 and _among(t, take_start[operation[i]], take_start[operation[i] + 1], takes):
                gives[i] += 1
                givers[n_givers] = i
                n_givers += 1
            if deaths[k] == births[k] and makers[k] >= n:
                dead_items[dead] = makers[k]
                dead += 1
    n_dead = 0
    for m in range(dead):
        i = dead_items[m]
        o = operation[i]
        needed = _among(i, 0, n_dead, dead_items)
        work[0] += n_dead
        for j in range(write_start[o], write_start[o + 1]):
            if needed or write_start[o + 1] - write_start[o] == 1:
                break
            count = copies(
                writes[j], low, high, longer, producer, reader_start, readers, n, place, following,
                new_place, births, deaths, makers, users, work,
            )  # fmt: skip
            for k in range(count):
                needed = needed or (makers[k] == i and deaths[k] > births[k])
        if not needed:
            dead_items[n_dead] = i
            n_dead += 1
            added -= arrays.cost[o]
    # The stretch from start to stop, in new positions.
    start = low
    stop = high + longer
    for m in range(corners):
        p = corner[m]
        if p < start:
            if begins[p] != new_begins[p] or ends[p] != new_ends[p]:
                start = p
        elif p > high and p + longer > stop:
            q = p + longer
            if begins[p] != new_begins[q] or ends[p] != new_ends[q]:
                stop = q
    for m in range(new_corners):
        q = new_corner[m]
        if q < start:
            if begins[q] != new_begins[q] or ends[q] != new_ends[q]:
                start = q
        elif q > stop and (begins[q - longer] != new_begins[q] or ends[q - longer] != new_ends[q]):
            stop = q
    for m in range(n_givers):
        i = givers[m]
        if gives[i] != 0:
            q = place[i]
            if q < 0 or (low <= q and q <= high):
                q = new_place[i]
            elif q > high:
                q += longer
            if q >= 0:
                start = min(start, q)
                stop = max(stop, q)
    work[0] += touched + stop - start
    # Upwards over the stretch. `old` and `new` are the bytes of the touched copies that began in
    # it less those that ended: all else is as it was at the execution, or the gap, that it was at.
    old = 0
    new = 0
    gap = live[start - 1] if start > 0 else 0
    behind = start
    more_excess = 0.0
    more_bad = 0
    fuller = 0.0
    most = (allowance - added) / price + excess
    fits = True
    reached = 0.0
    for q in range(start, stop + 1):
        if low <= q and q <= high + longer:
            i = new_at[q]
        else:
            i = at[q if q < low else q - longer]
        new += new_begins[q]
        if stamp[i] == mark:
            o = operation[i]
            during = gap + new + workspace[o]
            if dying[i] + gives[i] > 0:
                during -= size[takes[take_start[o]]]
        else:
            p = place[i]
            while behind < p:
                old += begins[behind] - ends[behind]
                before = use[behind]
                fuller -= _eighth(before, budget)
                if before > budget:
                    more_excess -= excess_of(before, budget)
                    more_bad -= 1
                behind += 1
            old += begins[p]
            before = use[p]
            fuller -= _eighth(before, budget)
            if before > budget:
                more_excess -= excess_of(before, budget)
                more_bad -= 1
            during = before - old + new
            if gives[i] != 0:
                o = operation[i]
                if dying[i] > 0:
                    during += size[takes[take_start[o]]]
                if dying[i] + gives[i] > 0:
                    during -= size[takes[take_start[o]]]
            old -= ends[p]
            behind = p + 1
            gap = live[p] - old
        new -= new_ends[q]
        new_use[q] = during
        new_live[q] = gap + new
        fuller += _eighth(during, budget)
        if during > budget:
            x = excess_of(during, budget)
            reached += x
            if reached > most:
                fits = False
                break
            more_excess += x
            more_bad += 1
    if fits:
        # What is taken out at the end of the stretch.
        while behind <= stop - longer:
            before = use[behind]
            fuller -= _eighth(before, budget)
            if before > budget:
                more_excess -= excess_of(before, budget)
                more_bad -= 1
            behind += 1
        rise = added + price * more_excess
        fits = rise <= allowance and rise + lean * fuller <= allowance
    for m in range(corners):
        begins[corner[m]] = 0
        ends[corner[m]] = 0
    for m in range(new_corners):
        new_begins[new_corner[m]] = 0
        new_ends[new_corner[m]] = 0
    if not fits:
        for m in range(n_givers):
            gives[givers[m]] = 0
    return fits, start, stop, added, more_excess, more_bad, n_givers, n_dead


@compiled
def accept(  # type: ignore[no-untyped-def]
    line, trial, length, low, high, longer, start, stop, n_givers
):  # fmt: skip
    """Make the change that `weigh` has weighed; the caller unlinks what is taken out."""
    line.work[0] += high - low + stop - start
    if longer != 0:
        line.work[0] += length - high
        if longer > 0:
            for p in range(length - 1, high, -1):
                i = line.at[p]
                line.at[p + longer] = i
                line.place[i] = p + longer
                line.use[p + longer] = line.use[p]
                line.live[p + longer] = line.live[p]
        else:
            for p in range(high + 1, length):
                i = line.at[p]
                line.at[p + longer] = i
                line.place[i] = p + longer
                line.use[p + longer] = line.use[p]
                line.live[p + longer] = line.live[p]
    for q in range(low, high + longer + 1):
        i = trial.at[q]
        line.at[q] = i
        line.place[i] = q
    for q in range(start, stop + 1):
        line.use[q] = trial.use[q]
        line.live[q] = trial.live[q]
    for m in range(n_givers):
        i = trial.givers[m]
        line.dying[i] += trial.gives[i]
        trial.gives[i] = 0


@compiled
def lay(sequence, budget, arrays, line):  # type: ignore[no-untyped-def]
    """Fill `line` with a sequence without dead re-executions.

    Returns the number of executions ever made, extra time, excess and the number of positions
    above the budget.
    """
    n = len(arrays.cost)
    line.place[:] = -1
    line.dying[:] = 0
    line.work[0] = 0
    latest = np.arange(n)
    for o in range(n):
        line.operation[o] = o
        line.following[o] = -1
    made = n
    for p in range(len(sequence)):
        o = sequence[p]
        i = o
        if line.place[o] >= 0:
            i = made
            made += 1
            line.operation[i] = o
            line.following[i] = -1
            line.following[latest[o]] = i
            latest[o] = i
        line.at[p] = i
        line.place[i] = p
    wanted = np.zeros(len(arrays.size), np.bool_)
    live = 0
    for k in range(arrays.read_start[n], arrays.read_start[n + 1]):
        wanted[arrays.reads[k]] = True
        live += arrays.size[arrays.reads[k]]
    extra = 0.0
    excess = 0.0
    bad = 0
    for p in range(len(sequence) - 1, -1, -1):
        i = line.at[p]
        o = line.operation[i]
        if i >= n:
            extra += arrays.cost[o]
        line.live[p] = live
        during = live + arrays.workspace[o]
        for k in range(arrays.write_start[o], arrays.write_start[o + 1]):
            t = arrays.writes[k]
            if wanted[t]:
                wanted[t] = False
                live -= arrays.size[t]
            else:
                during += arrays.size[t]
        for k in range(arrays.read_start[o], arrays.read_start[o + 1]):
            t = arrays.reads[k]
            if not wanted[t]:
                wanted[t] = True
                live += arrays.size[t]
                during += arrays.size[t]
                if _among(t, arrays.take_start[o], arrays.take_start[o + 1], arrays.takes):
                    line.dying[i] += 1
        if line.dying[i] > 0:
            during -= arrays.size[arrays.takes[arrays.take_start[o]]]
        line.use[p] = during
        if during > budget:
            excess += excess_of(during, budget)
            bad += 1
    return made, extra, excess, bad


@compiled
def without_dead(sequence, arrays):  # type: ignore[no-untyped-def]
    """`sequence` without the re-executions whose results nobody reads."""
    n = len(arrays.cost)
    first = np.full(n, -1, np.int64)
    for p in range(len(sequence) - 1, -1, -1):
        first[sequence[p]] = p
    wanted = np.zeros(len(arrays.size), np.bool_)
    for k in range(arrays.read_start[n], arrays.read_start[n + 1]):
        wanted[arrays.reads[k]] = True
    kept = np.zeros(len(sequence), np.int64)
    start = len(sequence)
    for p in range(len(sequence) - 1, -1, -1):
        o = sequence[p]
        needed = first[o] == p
        for k in range(arrays.write_start[o], arrays.write_start[o + 1]):
            needed = needed or wanted[arrays.writes[k]]
        if needed:
            for k in range(arrays.write_start[o], arrays.write_start[o + 1]):
                wanted[arrays.writes[k]] = False
            for k in range(arrays.read_start[o], arrays.read_start[o + 1]):
                wanted[arrays.reads[k]] = True
            start -= 1
            kept[start] = o
    return kept[start:].copy()
