"""Memory and price of a sequence of executions in any order, compiled by numba."""

from __future__ import annotations

import numpy as np

from optckpt.solvers.compiling import compiled

BLOCK = 32
"""Positions from one snapshot of the memory's contents to the next."""


@compiled
def step_back(  # type: ignore[no-untyped-def]
    o, again, live, wanted,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Go back over one execution: bytes in memory during it (-1: it is a dead re-execution),
    and before it. `wanted` tells which buffers somebody reads later on."""
    if again:
        useful = False
        for k in range(write_start[o], write_start[o + 1]):
            if wanted[writes[k]]:
                useful = True
        if not useful:
            return -1, live
    during = live + workspace[o]
    for k in range(write_start[o], write_start[o + 1]):
        t = writes[k]
        if wanted[t]:
            wanted[t] = False
            live -= size[t]
        else:
            during += size[t]
    gift = 0
    for k in range(read_start[o], read_start[o + 1]):
        t = reads[k]
        if not wanted[t]:
            wanted[t] = True
            live += size[t]
            during += size[t]
            for j in range(take_start[o], take_start[o + 1]):
                if takes[j] == t:
                    gift = size[t]
    return during - gift, live


@compiled
def excess_of(during, budget):  # type: ignore[no-untyped-def]
    """The excess of one step, 0.3 x + 0.1 sqrt(x) for x = bytes above the budget / budget: the
    root makes the last small violations worth removing."""
    if during <= budget:
        return 0.0
    over = (during - budget) / budget
    return 0.3 * over + 0.1 * np.sqrt(over)


@compiled
def evaluate(  # type: ignore[no-untyped-def]
    sequence, length, budget, first, use, wanted, snapshots, snapshot_live,
    extra_before, excess_before,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Evaluate a sequence without dead re-executions as a whole.

    Fills first executions, bytes in use, a snapshot before every BLOCK-th position, and extra
    time and excess of what is before it; returns extra time and excess of all.
    """
    problem = (
        read_start, reads, write_start, writes, take_start, takes,
        parent_start, parents, child_start, children, reader_start, readers,
        workspace, cost, repeatable, size, producer,
    )  # fmt: skip
    n = len(cost)
    first[:n] = -1
    for step in range(length):
        if first[sequence[step]] < 0:
            first[sequence[step]] = step
    wanted[:] = False
    live = 0
    for k in range(read_start[n], read_start[n + 1]):
        wanted[reads[k]] = True
        live += size[reads[k]]
    for step in range(length - 1, -1, -1):
        if (step + 1) % BLOCK == 0:
            k = (step + 1) // BLOCK
            snapshots[k] = wanted
            snapshot_live[k] = live
        o = sequence[step]
        use[step], live = step_back(o, first[o] != step, live, wanted, *problem)
    snapshots[0] = wanted
    snapshot_live[0] = live
    extra = 0.0
    excess = 0.0
    for step in range(length):
        if step % BLOCK == 0:
            extra_before[step // BLOCK] = extra
            excess_before[step // BLOCK] = excess
        o = sequence[step]
        if first[o] != step:
            extra += cost[o]
        excess += excess_of(use[step], budget)
    if length % BLOCK == 0:
        extra_before[length // BLOCK] = extra
        excess_before[length // BLOCK] = excess
    return extra, excess


@compiled
def contents(  # type: ignore[no-untyped-def]
    boundary, sequence, length, wanted, snapshots,
    read_start, reads, write_start, writes, take_start, takes,
    parent_start, parents, child_start, children, reader_start, readers,
    workspace, cost, repeatable, size, producer,
):  # fmt: skip
    """Set `wanted` to what is in memory before position `boundary`."""
    n = len(cost)
    top = (boundary + BLOCK - 1) // BLOCK
    if top * BLOCK >= length:
        wanted[:] = False
        for k in range(read_start[n], read_start[n + 1]):
            wanted[reads[k]] = True
        step = length - 1
    else:
        wanted[:] = snapshots[top]
        step = top * BLOCK - 1
    while step >= boundary:
        o = sequence[step]
        for k in range(write_start[o], write_start[o + 1]):
            wanted[writes[k]] = False
        for k in range(read_start[o], read_start[o + 1]):
            wanted[reads[k]] = True
        step -= 1
