"""A bound for chains: the cheapest way to have the buffers of one path in memory when wanted.

Take a path of repeatable operations, each reading what the one before it wrote. While the backward
pass goes on, its operations want the buffers of the path, the last first. If nothing else is asked
than that these buffers, with whatever else is certain to be in memory, fit at first executions, and
that a buffer of the path that is not in memory is computed from the nearest one below it that is,
then the least cost bounds the overhead of every schedule in base order. A recurrence in which no
buffer is dropped before its last use, and takes no more bytes than any that could stand in for it,
bounds that from below; where sizes do not grow along the path, it is exact. The proof is in
docs/solver.md, section 10.1.

The program is that of checkpointing by nested sweeps (Griewank & Walther, "Algorithm 799: Revolve",
ACM TOMS 26, 2000; Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optckpt.solvers.compiling import compiled, interruptible
from optckpt.solvers.preprocess import Problem

CELLS = 40_000_000
"""Values of the program at most, 4 bytes each."""
WORK = 5_000_000_000
"""Comparisons of the program at most: seconds."""
TOGETHER = 8
"""Ends of intervals that are treated in turn: they use the same values."""
FINEST = 2000
"""Memory levels at most, unless the sizes have no more than `EXACT` of their common divisor."""
EXACT = 4000

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Elements 0, ..., n of a chain: 0 is its beginning, always there and without size.

    They are wanted one after the other, n first. All arrays have n + 1 entries.
    """

    size: Ints
    """Bytes of the smallest buffer on the way from the element before, excluded, to this one."""
    cost: Floats
    """Time from the beginning to each element; not decreasing."""
    room: Ints
    """Bytes for the elements up to it while it is wanted; that of element 0 means nothing."""
    later: Ints
    """Bytes for the elements below it between then and when the next one is wanted."""
    place: Ints
    """Where on its path each element is; -1 for element 0."""

    def __len__(self) -> int:
        return len(self.size) - 1


def heaviest_path(problem: Problem) -> list[int]:
    """Buffers, each read by the operation that writes the next, of most time in all.

    All operations are repeatable. The last buffer is what the last operation writes and what is
    read the latest. Empty if nothing is repeatable.
    """
    p = problem
    total = [-1.0] * p.n
    before = [-1] * p.n
    for o in range(p.n):
        if not p.repeatable[o]:
            continue
        total[o] = p.cost[o]
        for t in p.reads[o]:
            above = total[p.producer[t]]
            if above >= 0.0 and above + p.cost[o] > total[o]:
                total[o], before[o] = above + p.cost[o], t
    ends = [o for o in range(p.n) if total[o] >= 0.0 and p.writes[o]]
    if not ends:
        return []
    o = max(ends, key=lambda o: (total[o], o))
    path = [max(p.writes[o], key=p.last_reader)]
    while before[o] >= 0:
        path.append(before[o])
        o = p.producer[before[o]]
    path.reverse()
    return path


def step_costs(problem: Problem, path: Sequence[int]) -> list[float]:
    """Per buffer of `path` the time of computing it from the one before it.

    Companions count as well: repeatable operations that write what the step alone reads, if that
    is no smaller than the step's buffer. Each serves one step.
    """
    p = problem
    used = {p.producer[t] for t in path}
    costs: list[float] = []
    for t in path:
        o = p.producer[t]
        price = p.cost[o]
        for c in p.reads[o]:
            a = p.producer[c]
            alone = p.base_readers[c] == (o,) and p.size[c] >= p.size[t]
            if alone and p.repeatable[a] and a not in used:
                used.add(a)
                price += p.cost[a]
        costs.append(price)
    return costs


def _certain(problem: Problem, path: Sequence[int]) -> list[int]:
    """Bytes besides those of the path that are in memory while each position first executes."""
    p = problem
    on_path = set(path)
    change = [0] * (p.n + 2)
    for t, o in enumerate(p.producer):
        if not p.repeatable[o] and p.last_reader(t) > o:
            change[o + 1] += p.size[t]
            change[p.last_reader(t) + 1] -= p.size[t]
    certain: list[int] = []
    live = 0
    for q in range(p.n + 1):
        live += change[q]
        here = live + p.workspace[q] + sum(p.size[t] for t in p.writes[q])
        here += sum(
            p.size[t] for t in p.reads[q] if t not in on_path and p.repeatable[p.producer[t]]
        )
        if any(p.repeatable[p.producer[t]] or p.last_reader(t) <= q for t in p.takes[q]):
            here -= p.size[p.writes[q][0]]
        certain.append(here)
    return certain


def demands(problem: Problem, path: Sequence[int]) -> list[tuple[int, int]]:
    """Places of the path, descending, and base operations that read them, ascending.

    As many as there can be. O(readers * log(readers)).
    """
    pairs = sorted(
        (r, k) for k, t in enumerate(path) for r in problem.base_readers[t] if r < problem.n
    )
    # The longest strictly falling sequence of places (patience sorting). Places that one operation
    # reads come in ascending order, so that no two of these are taken.
    tails: list[int] = []
    ends: list[int] = []
    link = [-1] * len(pairs)
    for index, (_, k) in enumerate(pairs):
        pile = bisect.bisect_left(tails, -k)
        link[index] = ends[pile - 1] if pile else -1
        if pile == len(tails):
            tails.append(-k)
            ends.append(index)
        else:
            tails[pile], ends[pile] = -k, index
    found: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    latest = problem.n
    while index >= 0:
        k = pairs[index][1]
        # As late as the next one allows.
        latest = max(r for r in problem.base_readers[path[k]] if r < latest)
        found.append((k, latest))
        index = link[index]
    found.reverse()
    return found


@dataclass(frozen=True, slots=True)
class Moment:
    """A first execution behind the path, as far as the buffers of the path are concerned."""

    top: int
    """The last buffer of the path that is still to be wanted, by its place; -1 if none is."""
    wanted: bool
    """Whether it is read."""
    room: int
    """Bytes for the buffers of the path."""


def moments_of(problem: Problem, path: Sequence[int], budget: int) -> list[Moment]:
    """The first executions from the first demand for a buffer of `path` on, in base order."""
    p = problem
    moments: list[Moment] = []
    certain = _certain(p, path)
    left = demands(p, path)[::-1]
    for q in range(left[-1][1] if left else p.n + 1, p.n + 1):
        while left and left[-1][1] < q:
            left.pop()
        top = left[-1][0] if left else -1
        moments.append(Moment(top, top >= 0 and path[top] in p.reads[q], budget - certain[q]))
    return moments


def chain_of(
    size: Sequence[int], cost: Sequence[float], moments: Sequence[Moment], most: int
) -> Chain | None:
    """The chain of those buffers of a path that are wanted in `moments`; None if none is.

    Args:
        size: bytes per buffer of the path.
        cost: per buffer the time of computing it from the one before it.
        most: bytes that always suffice, for where nothing limits them.
    """
    room: dict[int, int] = {}
    later: dict[int, int] = {}
    lowest = -1
    for moment in moments:
        if moment.wanted:
            lowest = moment.top
            room[lowest] = min(moment.room, room.get(lowest, moment.room))
        elif lowest >= 0:
            later[lowest] = min(moment.room, later.get(lowest, moment.room))
    if not room:
        return None
    wanted = sorted(room)
    spans = zip([-1, *wanted], wanted, strict=False)
    total = np.cumsum(cost)
    return Chain(
        np.array([0, *(min(size[a + 1 : b + 1]) for a, b in spans)], np.int64),
        np.array([0.0, *(total[k] for k in wanted)], np.float64),
        np.array([0, *(room[k] for k in wanted)], np.int64),
        np.array([0, *(later.get(k, most) for k in wanted)], np.int64),
        np.array([-1, *wanted], np.int64),
    )


@compiled
def _fill(low_j, high_j, n, levels, size, least, cost, room, later, value):  # type: ignore[no-untyped-def]
    """Fill value[_row(i, j), h] for all i <= j and low_j <= j < high_j, given those for smaller j.

    It is the least cost of having j, j - 1, ..., i + 1 when wanted, while h levels, element i's
    among them, are held all along. An element s takes least[i, s], the smallest size in (i, s].
    """
    best = np.empty(levels + 1, np.float32)
    for i in range(high_j - 1, -1, -1):
        own = _row(i, 0, n)
        # For several j in turn, while the rows of i are in the processor's cache.
        for j in range(max(i, low_j), high_j):
            if i == j:
                for h in range(levels + 1):
                    fits = j == 0 or (h <= room[j] and h - size[j] <= later[j])
                    value[own + j, h] = 0.0 if fits else np.inf
                continue
            best[:] = np.inf
            straight = np.float32(cost[j] - cost[i])
            low = 0
            for s in range(i + 1, j + 1):
                # What follows costs `straight` and the part below s at least, which grows with s.
                below = value[own + s - 1]
                while low <= levels and below[low] + straight >= best[low]:
                    low += 1
                if low > levels:
                    break
                sweep = np.float32(cost[s] - cost[i])
                above = value[_row(s, j, n), least[i, s] :]
                for h in range(low, len(above)):
                    total = sweep + below[h] + above[h]
                    best[h] = total if total < best[h] else best[h]
            for h in range(levels + 1):
                value[own + j, h] = best[h]


def _row_of(i: Any, j: Any, n: int) -> Any:
    """The row of value[i, j, .]; of arrays, too."""
    return i * n - i * (i - 1) // 2 + j


_row = compiled(_row_of)


@dataclass(frozen=True)
class Program:
    """The solved program of a chain."""

    chain: Chain
    """Perhaps with fewer elements than it was given."""
    bound: float
    """What having every element when wanted costs at least beyond the first sweep."""
    least: Ints
    value: npt.NDArray[np.float32]

    def since(self) -> list[int]:
        """A cheapest way: per element the highest one during whose turn it is in memory already.

        From then on it stays until its own turn is over. Only if the bound is finite.
        """
        n = len(self.chain)
        since = [0] * (n + 1)
        tasks = [(0, n, 0)]
        while tasks:
            i, j, h = tasks.pop()
            if i == j:
                continue
            s = np.arange(i + 1, j + 1)
            held = h + self.least[i, s]
            s, held = s[held < self.value.shape[1]], held[held < self.value.shape[1]]
            below = self.value[_row_of(i, s - 1, n), h]
            above = self.value[_row_of(s, j, n), held]
            k = int(np.argmin(self.chain.cost[s] + below + above))
            since[s[k]] = j
            tasks += [(i, int(s[k]) - 1, h), (int(s[k]), j, int(held[k]))]
        return since


def solve_chain(chain: Chain, proceed: Callable[[], bool] = lambda: True) -> Program | None:
    """The program of `chain`; its bound is infinite if there is no way.

    `proceed` is asked now and then; None if it says no. In levels of memory to which sizes are
    rounded down; then the bound is the least cost up to rounding errors. O(n^3 levels) time at
    most, O(n^2 levels) memory.
    """
    chain = _thinned(chain)
    n = len(chain)
    unit = _unit(chain)
    levels = max(0, int(chain.room[1:].max()) // unit)
    size, room, later = chain.size // unit, chain.room // unit, chain.later // unit
    least = np.zeros((n + 1, n + 1), np.int64)
    for i in range(n):
        least[i, i + 1 :] = np.minimum.accumulate(size[i + 1 :])
    value = np.empty(((n + 1) * (n + 2) // 2, levels + 1), np.float32)
    for j in range(0, n + 1, TOGETHER):
        if not proceed():
            return None
        until = min(j + TOGETHER, n + 1)
        interruptible(_fill, j, until, n, levels, size, least, chain.cost, room, later, value)
    found = float(value[n, 0])
    # Three times per nesting, of which there are n at most, a value is rounded by 2^-24 of itself.
    bound = max(0.0, found * (1.0 - (n + 2) * 2.0**-22) - float(chain.cost[-1]))
    return Program(chain, bound, least, value)


def least_cost(chain: Chain, proceed: Callable[[], bool] = lambda: True) -> float | None:
    """The bound of `solve_chain` alone."""
    program = solve_chain(chain, proceed)
    return None if program is None else program.bound


def _unit(chain: Chain) -> int:
    """Bytes per level, such that little is lost as sizes are rounded down to levels."""
    sizes = chain.size[1:]
    most = max(1, int(chain.room[1:].max()))
    common = math.gcd(*(int(s) for s in sizes))
    allowed = max(1, min(FINEST, _levels(len(chain))))
    if most // common <= max(1, min(EXACT, _levels(len(chain)))):
        return common
    least = most // allowed + 1
    candidates = {least}
    for s in {int(s) for s in sizes}:
        candidates.update(s // k for k in range(1, min(200, s // least) + 1))
    return min(candidates, key=lambda u: (round(float((sizes % u).sum() / sizes.sum()), 3), -u))


def _levels(n: int) -> int:
    """Levels that n elements allow."""
    return min(2 * CELLS // ((n + 1) * (n + 2)), 6 * WORK // (n + 1) ** 3)


def _thinned(chain: Chain) -> Chain:
    """`chain` with so many of its elements wanted, spread over the time, as can be afforded."""
    most = len(chain)
    while _levels(most) < 100:
        most -= 1
    if most == len(chain):
        return chain
    share = chain.cost / max(float(chain.cost[-1]), 1e-300) * most
    chosen = {0: 0} | {math.ceil(x): k for k, x in enumerate(share) if k}
    kept = sorted(chosen.values())
    size = np.minimum.reduceat(chain.size, [0, *(k + 1 for k in kept[:-1])])
    return Chain(size, chain.cost[kept], chain.room[kept], chain.later[kept], chain.place[kept])


def chain_bound(
    problem: Problem, budget: int, proceed: Callable[[], bool] = lambda: True
) -> float | None:
    """A lower bound on the overhead of schedules in base order within `budget` bytes.

    Args:
        budget: bytes, resident data subtracted.
        proceed: asked now and then whether to go on.

    Returns:
        The bound as a fraction of the plain step; infinite if no schedule fits; None if the
        problem has no chain, or if `proceed` said no.
    """
    found = chain_program(problem, budget, proceed)
    return None if found is None else found[0].bound


def chain_program(
    problem: Problem, budget: int, proceed: Callable[[], bool] = lambda: True
) -> tuple[Program, list[int], list[Moment]] | None:
    """The program behind `chain_bound`, its path and moments."""
    p = problem
    path = heaviest_path(p)
    moments = moments_of(p, path, budget)
    chain = chain_of([p.size[t] for t in path], step_costs(p, path), moments, budget)
    program = None if chain is None else solve_chain(chain, proceed)
    return None if program is None else (program, path, moments)


def prepare() -> None:
    """Have the compiled code ready: the first call after installation takes seconds."""
    one = np.ones(2, np.int64)
    least_cost(Chain(one, np.array([0.0, 1.0]), one, one, one))
