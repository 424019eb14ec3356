"""From what is kept and re-executed between cuts to a sequence of executions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optckpt.solvers.preprocess import Problem
from optckpt.solvers.stage_cuts import Choice


def decode(problem: Problem, choice: Choice) -> list[int]:
    """The sequence of `choice`: each re-execution as late as its stage allows, depth first.

    Within a stage, what is not in memory is re-executed just before its first use, once; what
    the next cut finds in memory without a use before it is re-executed right before the cut.
    """
    p = problem
    sequence: list[int] = []
    n_cuts = len(choice.cuts)
    stage_of_cut = {c: i for i, c in enumerate(choice.cuts)}
    # in_memory[t]: last stage in which buffer t was found or put in memory.
    in_memory = [0] * len(p.size)
    stage = 0

    def fetch(buffers: Iterable[int]) -> None:
        stack = [(b, False) for b in buffers]
        stack.reverse()
        while stack:
            t, ready = stack.pop()
            if in_memory[t] == stage:
                continue
            o = p.producer[t]
            if not p.repeatable[o]:
                # A relaxed solution may rely on more than it keeps; memory then tells.
                in_memory[t] = stage
                continue
            if ready:
                sequence.append(o)
                for w in p.writes[o]:
                    in_memory[w] = stage
                continue
            stack.append((t, True))
            stack.extend((b, False) for b in reversed(p.reads[o]))

    for j in range(p.n + 1):
        i = stage_of_cut.get(j)
        if i is not None:
            kept = choice.keep[i]
            if i:
                repeated = choice.comp[i - 1]
                fetch(t for t in sorted(kept) if p.producer[t] in repeated)
            fetch(p.reads[j])
            stage = i + 1
            for t in kept:
                in_memory[t] = stage
        else:
            fetch(p.reads[j])
        if j < p.n:
            sequence.append(j)
            for w in p.writes[j]:
                in_memory[w] = stage
    assert stage == n_cuts
    return drop_dead(p, sequence)


def drop_dead(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """`sequence` without the re-executions whose results nobody reads."""
    p = problem
    first = [True] * p.n
    is_first = []
    for o in sequence:
        is_first.append(first[o])
        first[o] = False
    wanted = [False] * len(p.size)
    for t in p.reads[p.n]:
        wanted[t] = True
    kept: list[int] = []
    for o, original in zip(reversed(sequence), reversed(is_first), strict=True):
        if original or any(wanted[t] for t in p.writes[o]):
            kept.append(o)
            for t in p.writes[o]:
                wanted[t] = False
            for t in p.reads[o]:
                wanted[t] = True
    kept.reverse()
    return kept
