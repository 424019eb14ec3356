"""Exact search for the cheapest schedule in base order, from the end of the step backwards.

A state is how many base operations have been executed, and which buffers must be in memory: those
that what comes later reads before they are computed again. Going backwards nothing has to be
decided about dropping: an execution is there because one of its results is wanted, and before it
its inputs are wanted instead. Dijkstra's algorithm (A* with `potentials`) over these states,
without those that a state with fewer wanted buffers makes superfluous. Its frontier bounds every
schedule in base order, so a search that is cut off has proven something too. Proofs are in
docs/solver.md, section 11; the search shares no code with `brute_force`, which goes forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.potentials import Potentials
from optckpt.solvers.preprocess import Problem

GRAIN = 1e-9
"""Costs are ordered in units of this share of the plain step, rounded down."""
MOST_OPERATIONS = 4000
"""Positions have their place in the heap's keys."""
CHUNK = 4096
"""States expanded between two looks at the clock."""
STATES = 3_000_000
"""States held in memory at most; some 100 bytes each."""

ROUNDING = 1e-12
"""Costs that differ by so little are equal: they were added up in another order."""
_BITS = 12


@compiled
def _find(table, position, mask, at, masks):  # type: ignore[no-untyped-def]
    """Where the state is in the hash `table`, or the empty place where it belongs."""
    h = np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    for w in range(len(mask)):
        h = (h ^ mask[w]) * np.uint64(0xD6E8FEB86659FD93)
        h ^= h >> np.uint64(32)
    last = np.int64(len(table) - 1)
    k = np.int64(h & np.uint64(last))
    while table[k]:
        i = table[k] - 1
        if at[i] == position:
            same = True
            for w in range(len(mask)):
                if masks[i, w] != mask[w]:
                    same = False
            if same:
                break
        k = (k + 1) & last
    return k


@compiled
def _push(keys, ids, count, key, state):  # type: ignore[no-untyped-def]
    """Add to the binary heap of `count` entries."""
    i = count
    while i:
        up = (i - 1) >> 1
        if keys[up] <= key:
            break
        keys[i] = keys[up]
        ids[i] = ids[up]
        i = up
    keys[i] = key
    ids[i] = state


@compiled
def _pop(keys, ids, count):  # type: ignore[no-untyped-def]
    """Remove the first of `count` entries."""
    count -= 1
    i = 0
    while True:
        down = 2 * i + 1
        if down >= count:
            break
        if down + 1 < count and keys[down + 1] < keys[down]:
            down += 1
        if keys[down] >= keys[count]:
            break
        keys[i] = keys[down]
        ids[i] = ids[down]
        i = down
    keys[i] = keys[count]
    ids[i] = ids[count]


@compiled
def _holds(mask, t):  # type: ignore[no-untyped-def]
    return (mask[t >> 6] >> np.uint64(t & 63)) & np.uint64(1)


@compiled
def _superfluous(state, table, at, masks, spent, trial):  # type: ignore[no-untyped-def]
    """Whether a state that wants one buffer less was reached at no more cost."""
    trial[:] = masks[state]
    for w in range(len(trial)):
        left = trial[w]
        while left:
            low = left & (~left + np.uint64(1))
            left ^= low
            trial[w] ^= low
            other = table[_find(table, at[state], trial, at, masks)] - 1
            trial[w] ^= low
            if other >= 0 and spent[other] <= spent[state] + ROUNDING:
                return True
    return False


@compiled
def _before(  # type: ignore[no-untyped-def]
    o, wanted, child, live, budget,
    read_start, reads, write_start, writes, take_start, takes, workspace, size,
):  # fmt: skip
    """Fill `child` with what is wanted before `o` is executed, `wanted` being so afterwards.

    Returns whether `o` fits, and how many bytes more are wanted; `live` are those of `wanted`.
    """
    one = np.uint64(1)
    more = np.int64(0)
    child[:] = wanted
    during = live + workspace[o]
    for k in range(write_start[o], write_start[o + 1]):
        t = writes[k]
        if _holds(wanted, t):
            child[t >> 6] ^= one << np.uint64(t & 63)
            more -= size[t]
        else:
            during += size[t]
    for k in range(take_start[o], take_start[o + 1]):
        if not _holds(wanted, takes[k]):
            during -= size[takes[k]]
            break
    for k in range(read_start[o], read_start[o + 1]):
        t = reads[k]
        if not _holds(wanted, t):
            child[t >> 6] |= one << np.uint64(t & 63)
            more += size[t]
            during += size[t]
    return during <= budget, more


@compiled
def _rest(  # type: ignore[no-untyped-def]
    position, wanted, later, constant, price, again, repeated, write_start, writes
):  # fmt: skip
    """A lower bound on the cost before the state; `later` are the operations executed from it on.

    See `Potentials`.
    """
    bound = constant[position]
    for o in range(position):
        supplied = 0.0
        for k in range(write_start[o], write_start[o + 1]):
            if _holds(wanted, writes[k]):
                supplied += price[position, writes[k]]
        if _holds(later, o):
            bound += min(supplied, repeated[position, o]) - again[position, o]
        else:
            bound += min(supplied, repeated[position, o] - again[position, o])
    return max(bound, 0.0)


@compiled
def _reach(  # type: ignore[no-untyped-def]
    position, mask, later, price, bound, state, o,
    counts, table, at, masks, laters, spent, ranks, behind, move, keys, ids,
):  # fmt: skip
    """Note that executing `o` leads from the state (position, mask) to `state`, for `price`.

    `bound` is on the cost of all schedules through the state.
    """
    place = _find(table, position, mask, at, masks)
    known = table[place] - 1
    if known < 0:
        known = counts[0]
        counts[0] += 1
        table[place] = known + 1
        at[known] = position
        masks[known] = mask
    elif price >= spent[known]:
        return
    spent[known] = price
    laters[known] = later
    behind[known] = state
    move[known] = o
    # Of equally dear states, those nearer to the beginning come first.
    ranks[known] = np.int64(bound / GRAIN) << _BITS | position
    _push(keys, ids, counts[1], ranks[known], known)
    counts[1] += 1


@compiled
def _expand(  # type: ignore[no-untyped-def]
    limit, budget, cutoff, counts, table, at, masks, laters, spent, ranks, behind, move, keys, ids,
    informed, constant, prices, again, repeated,
    read_start, reads, write_start, writes, take_start, takes,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Expand up to `limit` states; `counts` holds how many states and heap entries there are.

    Returns 0 if there is more to do, 1 if the first state of the heap is the beginning of the
    step, 2 if no state is left, 3 if the memory for states is used up.
    """
    wanted = np.zeros(masks.shape[1], np.uint64)
    child = np.zeros(masks.shape[1], np.uint64)
    later = np.zeros(laters.shape[1], np.uint64)
    arrays = (read_start, reads, write_start, writes, take_start, takes, workspace, size)
    found = (counts, table, at, masks, laters, spent, ranks, behind, move, keys, ids)
    led = (constant, prices, again, repeated, write_start, writes)
    for _ in range(limit):
        if not counts[1]:
            return 2
        key = keys[0]
        state = ids[0]
        position = np.int64(at[state])
        here = spent[state]
        if not position:
            return 1
        # One expansion adds no more than that.
        if max(counts[0] + position + 1 - len(at), counts[1] + position + 1 - len(keys)) > 0:
            return 3
        _pop(keys, ids, counts[1])
        counts[1] -= 1
        if key != ranks[state] or _superfluous(state, table, at, masks, spent, child):
            continue
        least = (key >> _BITS) * GRAIN
        wanted[:] = masks[state]
        later[:] = laters[state]
        live = np.int64(0)
        for t in range(len(size)):
            if _holds(wanted, t):
                live += size[t]
        o = position - 1
        fits, more = _before(o, wanted, child, live, budget, *arrays)
        if fits:
            bound = max(least, here + _rest(o, child, later, *led) if informed else here)
            if bound < cutoff:
                _reach(o, child, later, here, bound, state, o, *found)
            if more <= 0:
                # Every re-execution may as well come before it.
                continue
        for t in range(len(size)):
            if not _holds(wanted, t):
                continue
            o = producer[t]
            first = True
            for k in range(write_start[o], write_start[o + 1]):
                if writes[k] == t:
                    break
                if _holds(wanted, writes[k]):
                    first = False
            if not first or not repeatable[o]:
                continue
            fits, more = _before(o, wanted, child, live, budget, *arrays)
            if not fits:
                continue
            price = here + cost[o]
            had = later[o >> 6]
            later[o >> 6] |= np.uint64(1) << np.uint64(o & 63)
            bound = max(least, price + _rest(position, child, later, *led) if informed else price)
            if bound < cutoff:
                _reach(position, child, later, price, bound, state, o, *found)
            later[o >> 6] = had
    return 0


@dataclass(frozen=True)
class Outcome:
    """What a search found out; costs and bounds are fractions of the plain step."""

    sequence: list[int] | None
    """The cheapest sequence of the problem's operations, if it is cheaper than the cutoff."""
    bound: float
    """Every schedule in base order costs at least that; infinite if none fits."""
    finished: bool
    """Whether the answer is final: there is a sequence, or none is cheaper than the cutoff."""


class Search:
    """One search for the cheapest sequence below a cutoff; `run` continues it."""

    def __init__(
        self,
        problem: Problem,
        budget: int,
        *,
        cutoff: float = float("inf"),
        states: int = STATES,
        potentials: Potentials | None = None,
    ) -> None:
        """`budget` is in bytes, without resident ones; `cutoff` is a fraction of the plain step.

        At most `states` states are held in memory. With `potentials`, of this problem under this
        budget, it is A*.
        """
        assert problem.n <= MOST_OPERATIONS
        p = problem
        self.problem, self.cutoff = problem, cutoff
        charged = [t for t, s in enumerate(p.size) if s]
        number = {t: i for i, t in enumerate(charged)}

        def ragged(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], ...]:
            start = np.zeros(len(lists) + 1, np.int64)
            np.cumsum([len(x) for x in lists], out=start[1:])
            return start, np.array([number[t] for x in lists for t in x], np.int64)

        none = np.zeros((1, 1))
        led: tuple[Any, ...] = (False, np.zeros(1), none, none, none)
        if potentials is not None:
            prices = np.ascontiguousarray(potentials.wanted[:, charged])
            led = (True, potentials.constant, prices, potentials.again, potentials.repeated)
        self._arguments: tuple[Any, ...] = (
            *led,
            *ragged(p.reads),
            *ragged(p.writes),
            *ragged(p.takes),
            np.array(p.workspace, np.int64),
            np.array(p.cost, np.float64),
            np.array(p.repeatable, np.bool_),
            np.array([p.size[t] for t in charged], np.int64),
            np.array([p.producer[t] for t in charged], np.int64),
        )
        states = max(states, 2 * p.n + 2)
        words = max(1, -(-len(charged) // 64))
        self._budget = budget
        self._counts = np.zeros(2, np.int64)
        table = np.zeros(1 << (2 * states - 1).bit_length(), np.int32)
        at = np.zeros(states, np.int16)
        masks = np.zeros((states, words), np.uint64)
        laters = np.zeros((states, -(-p.n // 64)), np.uint64)
        self._spent = np.zeros(states)
        ranks = np.zeros(states, np.int64)
        self._behind = np.zeros(states, np.int32)
        self._move = np.zeros(states, np.int16)
        self._keys = np.zeros(2 * states, np.int64)
        self._ids = np.zeros(2 * states, np.int32)
        self._states = (
            table, at, masks, laters, self._spent, ranks, self._behind, self._move,
            self._keys, self._ids,
        )  # fmt: skip
        end = np.zeros(words, np.uint64)
        for t in p.reads[p.n]:
            end[number[t] >> 6] |= np.uint64(1 << (number[t] & 63))
        _reach(p.n, end, laters[0], 0.0, 0.0, -1, -1, self._counts, *self._states)

    def run(self, stop: Callable[[], bool], most: int | None = None) -> Outcome:
        """Search on until done, until memory is used up, until `stop`, or for `most` states.

        Raises:
            KeyboardInterrupt: if interrupted.
        """
        end, left = 0, CHUNK if most is None else most
        while not end and left > 0 and not stop():
            end = interruptible(
                _expand, min(CHUNK, left), self._budget, self.cutoff, self._counts,
                *self._states, *self._arguments,
            )  # fmt: skip
            if most is not None:
                left -= CHUNK
        if end == 2:
            return Outcome(None, self.cutoff, True)
        state = int(self._ids[0])
        if end == 1:
            return Outcome(self._sequence(state), float(self._spent[state]), True)
        reached = (int(self._keys[0]) >> _BITS) * GRAIN - GRAIN
        return Outcome(None, min(self.cutoff, max(0.0, reached)), False)

    def _sequence(self, state: int) -> list[int]:
        found = []
        while self._behind[state] >= 0:
            found.append(int(self._move[state]))
            state = int(self._behind[state])
        return found


def compile_search() -> float:
    """Have the compiled code ready; returns the seconds which that took."""
    started = time.monotonic()
    unit = Problem(
        1, ((), (0,)), ((0,), ()), ((), ()), (0, 0), (0.0,), (True,), (1,), (0,), ((1,),), ((0,),)
    )
    Search(unit, 1, states=1).run(lambda: False)
    return time.monotonic() - started
