"""Where to cut next: the places at which a relaxed solution, decoded, exceeds the budget."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optckpt.solvers.preprocess import Problem
from optckpt.solvers.sequence import originals, profile

NEW_CUTS = 3
"""Cuts added per round; more make the relaxation grow faster than its bound."""


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


def behind_the_peak(problem: Problem) -> set[int]:
    """Cuts at the plain step's peak and at distances 1, 4, 16, ... behind it."""
    use = profile(problem, range(problem.n))
    peak = max(range(problem.n), key=lambda i: use[i])
    cuts = {peak}
    distance = 1
    while peak + distance < problem.n:
        cuts.add(peak + distance)
        distance *= 4
    return cuts
