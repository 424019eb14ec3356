"""Exhaustive search over all schedules in base order, for graphs of a few operations.

A state is how far the base order has come and which buffers are in memory. Dijkstra's
algorithm over these states knows no formulation and no decomposition, so it can judge the
solvers; the number of states is exponential in the number of buffers.
"""

from __future__ import annotations

import heapq
from itertools import count

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule

MAX_BUFFERS = 24


def cheapest(graph: TrainingGraph, budget: int) -> tuple[float, Schedule] | None:
    """The least extra time (seconds) under `budget` bytes (resident included), and a schedule.

    First executions follow the base order; re-executions may stand anywhere, in any number.
    None if no schedule fits. O(4^buffers * operations) at worst.

    Raises:
        OptckptError: if the graph has more than MAX_BUFFERS buffers.
    """
    if len(graph.buffers) > MAX_BUFFERS:
        raise OptckptError(
            f"exhaustive search is for at most {MAX_BUFFERS} buffers, the graph has "
            f"{len(graph.buffers)}; use strategy 'optimal'"
        )
    size = [b.size for b in graph.buffers]
    n = len(graph.operations)
    outputs = sum(1 << b for b in set(graph.outputs))
    room = budget - graph.resident
    total: dict[int, int] = {}

    def bytes_of(held: int) -> int:
        if held not in total:
            total[held] = sum(s for b, s in enumerate(size) if held >> b & 1)
        return total[held]

    reads = [sum(1 << b for b in set(op.reads)) for op in graph.operations]
    writes = [sum(1 << b for b in op.writes) for op in graph.operations]
    takes = [
        [b for b in set(op.inplace) if op.writes and size[b] == size[op.writes[0]]]
        for op in graph.operations
    ]
    start = (0, 0)
    best = {start: 0.0}
    came_from: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    tie = count()
    queue = [(0.0, next(tie), start)]
    while queue:
        spent, _, state = heapq.heappop(queue)
        if spent > best[state]:
            continue
        position, held = state
        if position == n and held & outputs == outputs:
            executions = []
            while state != start:
                state, o = came_from[state]
                if o >= 0:
                    executions.append(o)
            return spent, Schedule(tuple(reversed(executions)))
        moves: list[tuple[tuple[int, int], float, int]] = [
            ((position, held & ~(1 << b)), 0.0, -1) for b in range(len(size)) if held >> b & 1
        ]
        for o in range(min(position + 1, n)):
            op = graph.operations[o]
            first = o == position
            if held & reads[o] != reads[o] or not (first or op.repeatable):
                continue
            if not first and any(a < position for a in op.repeat_before):
                continue
            # An old copy of what the operation writes would be dead: it is dropped first.
            if held & writes[o]:
                continue
            after = held | writes[o]
            need = bytes_of(after) + op.workspace
            place = position + 1 if first else position
            price = 0.0 if first else op.seconds
            if need <= room:
                moves.append(((place, after), price, o))
            for b in takes[o]:
                if need - size[b] <= room:
                    moves.append(((place, after & ~(1 << b)), price, o))
        for target, price, o in moves:
            total_price = spent + price
            if total_price < best.get(target, float("inf")):
                best[target] = total_price
                came_from[target] = (state, o)
                heapq.heappush(queue, (total_price, next(tie), target))
    return None
