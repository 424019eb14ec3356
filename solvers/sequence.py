"""Memory and cost of a sequence of executions, fast enough for a search's inner loop."""

from __future__ import annotations

from collections.abc import Sequence

from optckpt.solvers.preprocess import Problem


def profile(problem: Problem, sequence: Sequence[int]) -> list[int]:
    """Bytes in memory during each execution of a valid sequence, without resident data."""
    p = problem
    reads, writes, size, takes = p.reads, p.writes, p.size, p.takes
    steps = len(sequence)
    # Backwards, a buffer is wanted from its last reader down to the execution that computes it.
    wanted = [False] * len(size)
    live = 0
    for t in reads[p.n]:
        wanted[t] = True
        live += size[t]
    use = [0] * steps
    for step in range(steps - 1, -1, -1):
        o = sequence[step]
        during = live + p.workspace[o]
        for t in writes[o]:
            if wanted[t]:
                wanted[t] = False
                live -= size[t]
            else:
                during += size[t]
        taken = takes[o]
        gift = 0
        for t in reads[o]:
            if not wanted[t]:
                wanted[t] = True
                live += size[t]
                during += size[t]
                # All that may be taken over are equally large.
                if taken and not gift and t in taken:
                    gift = size[t]
        use[step] = during - gift
    return use


def cost(problem: Problem, sequence: Sequence[int]) -> float:
    """Extra time of a sequence that contains every operation, as a fraction of the plain step."""
    seconds = problem.cost
    return sum(seconds[o] for o in sequence) - sum(seconds)


def originals(problem: Problem, sequence: Sequence[int]) -> list[bool]:
    """For each execution whether it is the first of its operation."""
    fresh = [True] * problem.n
    flags = []
    for o in sequence:
        flags.append(fresh[o])
        fresh[o] = False
    return flags
