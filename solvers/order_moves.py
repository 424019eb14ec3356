"""Moves of executions within a line, and how far they may go; compiled by numba."""

from __future__ import annotations

from optckpt.solvers.compiling import compiled
from optckpt.solvers.order_memory import END


@compiled
def next_use(t, s, arrays, line):  # type: ignore[no-untyped-def]
    """The first position from s on that reads the copy of buffer t that is in memory before s;
    END if only the end of the step does, -1 if there is no such copy."""
    born = False
    made = END + 1
    steps = 0
    i = arrays.producer[t]
    while i >= 0:
        steps += 1
        p = line.place[i]
        if p >= s:
            made = min(made, p)
        elif p >= 0:
            born = True
        i = line.following[i]
    line.work[0] += steps
    if not born:
        return -1
    used = END + 1
    steps = 0
    n = len(arrays.cost)
    for k in range(arrays.reader_start[t], arrays.reader_start[t + 1]):
        i = arrays.readers[k]
        if i == n:
            used = min(used, END)
            continue
        while i >= 0:
            steps += 1
            p = line.place[i]
            if p >= s:
                used = min(used, p)
            i = line.following[i]
    line.work[0] += steps
    return used if used < made else -1


@compiled
def limits(i, arrays, line, length):  # type: ignore[no-untyped-def]
    """The first and the last position that execution i may take, and the position of the first
    re-execution if i is a first execution (END: none), which the limits leave out of account."""
    o = line.operation[i]
    if i != o:
        return line.place[o] + 1, length - 1, END
    earliest = 0
    latest = length - 1
    for k in range(arrays.parent_start[o], arrays.parent_start[o + 1]):
        earliest = max(earliest, line.place[arrays.parents[k]] + 1)
    for k in range(arrays.child_start[o], arrays.child_start[o + 1]):
        latest = min(latest, line.place[arrays.children[k]] - 1)
    again = END
    j = line.following[i]
    while j >= 0:
        line.work[0] += 1
        again = min(again, line.place[j])
        j = line.following[j]
    return earliest, latest, again


@compiled
def shift_together(source, target, arrays, line, trial, met, mark):  # type: ignore[no-untyped-def]
    """Lay the first execution at `source` to `target` with all between that has to stay behind
    it (or before it, if it moves forward); returns how many go along."""
    n = len(arrays.cost)
    o = line.at[source]
    along = 0
    line.work[0] += abs(target - source)
    met[o] = mark
    if source < target:
        # met[o]: re-executions of o go along; met[n + o]: its first execution does.
        for k in range(arrays.child_start[o], arrays.child_start[o + 1]):
            met[n + arrays.children[k]] = mark
        end = source
        for p in range(source + 1, target + 1):
            i = line.at[p]
            u = line.operation[i]
            if (i < n and met[n + u] == mark) or (i >= n and met[u] == mark):
                trial.moved[along] = i
                along += 1
                if i < n:
                    met[u] = mark
                    for k in range(arrays.child_start[u], arrays.child_start[u + 1]):
                        met[n + arrays.children[k]] = mark
            else:
                trial.at[end] = i
                end += 1
        trial.at[end] = o
        for k in range(along):
            trial.at[end + 1 + k] = trial.moved[k]
    else:
        for k in range(arrays.parent_start[o], arrays.parent_start[o + 1]):
            met[n + arrays.parents[k]] = mark
        end = source
        for p in range(source - 1, target - 1, -1):
            i = line.at[p]
            if i < n and met[n + i] == mark:
                trial.moved[along] = i
                along += 1
                for k in range(arrays.parent_start[i], arrays.parent_start[i + 1]):
                    met[n + arrays.parents[k]] = mark
            else:
                trial.at[end] = i
                end -= 1
        trial.at[end] = o
        for k in range(along):
            trial.at[end - 1 - k] = trial.moved[k]
    return along


@compiled
def shift_run(source, run, target, line, trial):  # type: ignore[no-untyped-def]
    """Lay the `run` executions from `source` to `target`; returns the stretch that changes."""
    if target < source:
        trial.at[target + run : source + run] = line.at[target:source]
    else:
        trial.at[source:target] = line.at[source + run : target + run]
    trial.at[target : target + run] = line.at[source : source + run]
    return min(source, target), max(source, target) + run - 1


@compiled
def link(i, o, position, line):  # type: ignore[no-untyped-def]
    """Put re-execution i, which is to go to `position`, into the list of o's executions."""
    j = o
    while line.following[j] >= 0 and line.place[line.following[j]] < position:
        line.work[0] += 1
        j = line.following[j]
    line.operation[i] = o
    line.following[i] = line.following[j]
    line.following[j] = i


@compiled
def unlink(i, line):  # type: ignore[no-untyped-def]
    """Take re-execution i out of the list of its operation's executions."""
    j = line.operation[i]
    while line.following[j] != i:
        line.work[0] += 1
        j = line.following[j]
    line.following[j] = line.following[i]
