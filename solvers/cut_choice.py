"""Where to cut next: the places at which a relaxed solution exceeds the budget.

That of a linear relaxation is judged as it is, fractions of buffers being in memory; one in
integers is decoded first. What is chosen here bears on speed alone: any cuts give a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optckpt.solvers.preprocess import Problem
from optckpt.solvers.sequence import originals, profile
from optckpt.solvers.stage_cuts import Relaxation

NEW_CUTS = 3
"""Cuts added per round; more make the relaxation grow faster than its bound."""
EXCESS = 5e-4
"""A fractional solution that exceeds the budget by a smaller share is taken to fit."""


@dataclass(frozen=True, slots=True)
class Tightening:
    """What to add to a relaxation."""

    cuts: tuple[int, ...]
    moments: tuple[tuple[int, int], ...]
    """Pairs (cut, operation); see `stage_cuts.build`."""


def tighten(
    problem: Problem,
    sequence: Sequence[int],
    budget: int,
    cuts: Collection[int],
    moments: Collection[tuple[int, int]],
    *,
    spread: bool,
) -> Tightening:
    """Cuts and moment rows for the worst violations of `budget` by `sequence`, at most NEW_CUTS.

    A violation at a first execution is cut there; one at a re-execution at the next base
    operation, else at the previous one, else it gets a moment row. If that is all there already,
    or `sequence` fits, cuts go to where the most is in memory. With `spread`, the cuts of a round
    keep a distance: neighbouring positions have much the same in memory.
    """
    use = profile(problem, sequence)
    original = originals(problem, sequence)
    before = -1
    previous = []
    for o, is_original in zip(sequence, original, strict=True):
        if is_original:
            before = o
        previous.append(before)
    apart = problem.n // 40 if spread else 0
    fresh: list[int] = []
    rows: list[tuple[int, int]] = []
    excess = (s for s, bytes_ in enumerate(use) if bytes_ > budget)
    for s in sorted(excess, key=lambda s: (-use[s], s)):
        if len(fresh) + len(rows) == NEW_CUTS:
            break
        o = sequence[s]
        for cut in [o] if original[s] else [previous[s] + 1, previous[s]]:
            if cut not in cuts:
                if all(abs(cut - other) > apart for other in fresh):
                    fresh.append(cut)
                break
        else:
            row = (previous[s], o)
            if not original[s] and row not in moments and row not in rows:
                rows.append(row)
    if not fresh and not rows:
        ranked = sorted((-b, o) for b, o, f in zip(use, sequence, original, strict=True) if f)
        fresh = [o for _, o in ranked if o not in cuts][:NEW_CUTS]
    return Tightening(tuple(fresh), tuple(rows))


def fractional_use(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Bytes in memory while each base operation first executes, `values` being shares.

    Shape (n,); what it says about the cuts themselves is of no use. Re-executions are taken to
    happen as late as their stage allows, and what they read not to count, so this is an estimate
    from below. O(buffers * cuts).
    """
    p = problem
    change = np.zeros(p.n + 2)
    cuts = (-1, *relaxation.cuts)

    def hold(t: int, first: int, last: int, share: float) -> None:
        if first <= last:
            change[first] += share * p.size[t]
            change[last + 1] -= share * p.size[t]

    def at(cut: int, t: int) -> float:
        """Share of `t` in memory at the cut of that index, or at the end."""
        if cut == len(relaxation.cuts):
            return float(p.n in p.base_readers[t])
        column = relaxation.keep[cut].get(t)
        return float(t in relaxation.kept[cut]) if column is None else values[column]

    for i, start in enumerate(cuts):
        end = cuts[i + 1] if i + 1 < len(cuts) else p.n
        made = {t for o in range(max(start, 0), end) for t in p.writes[o]}
        for t in made:
            readers = [r for r in p.base_readers[t] if r < end]
            last = max(readers[-1], p.producer[t]) if readers else p.producer[t]
            hold(t, max(p.producer[t], start + 1), last, 1.0)
            hold(t, max(last, start) + 1, end - 1, at(i, t))
        if not i:
            continue
        for t in {*relaxation.keep[i - 1], *relaxation.kept[i - 1]} - made:
            share, then = at(i - 1, t), at(i, t)
            readers = [r for r in p.base_readers[t] if start < r < end]
            if readers:
                hold(t, start + 1, readers[0] - 1, share)
                hold(t, readers[0], readers[-1], 1.0)
                hold(t, readers[-1] + 1, end - 1, then)
            else:
                hold(t, start + 1, end - 1, min(share, then))
    use = np.cumsum(change)[: p.n]
    for o in range(p.n):
        gift = p.size[p.writes[o][0]] if p.takes[o] else 0
        use[o] += p.workspace[o] - gift
    return use


def fractional_cuts(
    problem: Problem, relaxation: Relaxation, values: Sequence[float], budget: int
) -> list[int]:
    """At most NEW_CUTS positions where `values` exceed `budget` most, at some distance."""
    use = fractional_use(problem, relaxation, values)
    apart = problem.n // 40
    fresh: list[int] = []
    for o in np.argsort(-use, kind="stable").tolist():
        if len(fresh) == NEW_CUTS or use[o] <= budget * (1 + EXCESS):
            break
        if o not in relaxation.cuts and all(abs(o - other) > apart for other in fresh):
            fresh.append(o)
    return fresh


def peak_of(problem: Problem) -> int:
    """Where the plain step has the most in memory."""
    use = profile(problem, range(problem.n))
    return max(range(problem.n), key=lambda i: use[i])


def behind_the_peak(problem: Problem) -> set[int]:
    """Cuts at the plain step's peak and at distances 1, 4, 16, ... behind it."""
    peak = peak_of(problem)
    cuts = {peak}
    distance = 1
    while peak + distance < problem.n:
        cuts.add(peak + distance)
        distance *= 4
    return cuts
