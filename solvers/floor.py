"""A proven lower bound on the peak of every schedule that keeps the base order."""

from __future__ import annotations

from dataclasses import dataclass

from optckpt.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes (resident included) that the operation of index `operation` (-1: none) needs."""

    bytes: int
    operation: int


def static_floor(graph: TrainingGraph) -> Floor:
    """The static floor: max over base operations of what must be in memory whatever is recomputed.

    As operation i of the base order first runs, its inputs, outputs and workspace are in memory,
    and so is every buffer that a non-repeatable operation wrote before i and that some base
    operation from i on reads, or that is a graph output. An output that can take over the memory
    of an input that may die at i is not charged. O(operations + edges).
    """
    ops = graph.operations
    sizes = [b.size for b in graph.buffers]
    is_output = set(graph.outputs)
    end = len(ops)
    last_reader = [r[-1] if r else -1 for r in graph.readers]

    def fixed(b: int) -> bool:
        return not ops[graph.producer[b]].repeatable

    dying: list[list[int]] = [[] for _ in range(end + 1)]
    for b, last in enumerate(last_reader):
        if fixed(b):
            dying[end if b in is_output else max(last, graph.producer[b])].append(b)
    live = graph.resident
    best = Floor(graph.resident, -1)
    for i, op in enumerate(ops):
        need = live + op.workspace + sum(sizes[b] for b in op.writes)
        need += sum(sizes[b] for b in set(op.reads) if not fixed(b))
        if op.writes:
            out = sizes[op.writes[0]]
            for b in op.inplace:
                may_die = not fixed(b) or (last_reader[b] == i and b not in is_output)
                if sizes[b] == out and may_die:
                    need -= out
                    break
        if need > best.bytes or best.operation < 0:
            best = Floor(need, i)
        live += sum(sizes[b] for b in op.writes if fixed(b))
        live -= sum(sizes[b] for b in dying[i])
    return best
