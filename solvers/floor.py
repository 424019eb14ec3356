"""Proven lower bounds on the peak of every schedule, in base order or in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optckpt.graph import TrainingGraph
from optckpt.solvers.ancestry import Ancestry
from optckpt.solvers.registry import Order


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes (resident included) that the operation of index `operation` needs.

    The index of the end of the step, where all outputs are in memory, is the number of operations;
    -1: a step without operations.
    """

    bytes: int
    operation: int

    def place(self, graph: TrainingGraph) -> str:
        """Where in the step of `graph` that is: "operation 'conv1'"; empty without operations."""
        if self.operation < 0:
            return ""
        if self.operation == len(graph.operations):
            return "the end of the step, whose outputs are all in memory then"
        return f"operation {graph.operations[self.operation].name!r}"


def proven_floor(graph: TrainingGraph, order: Order) -> Floor:
    """A lower bound on every peak: in base order ("fixed"), or in any order ("free")."""
    return static_floor(graph) if order == "fixed" else any_order_floor(graph)


def static_floor(graph: TrainingGraph) -> Floor:
    """The static floor: max over base operations of what must be in memory whatever is recomputed.

    As operation i of the base order first runs, its inputs, outputs and workspace are in memory,
    and so is every buffer that a non-repeatable operation wrote before i and that some base
    operation from i on reads, or that is a graph output. An output that can take over the memory
    of an input that may die at i is not charged. At the end all outputs are in memory.
    O(operations + edges).
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
    return _or_outputs(graph, best)


def _or_outputs(graph: TrainingGraph, best: Floor) -> Floor:
    """`best`, or the end of the step, if that needs more."""
    outputs = graph.resident + sum(graph.buffers[b].size for b in set(graph.outputs))
    return Floor(outputs, len(graph.operations)) if outputs > best.bytes else best


def any_order_floor(graph: TrainingGraph) -> Floor:
    """The static floor of the most favourable order: a bound on the peak in any order.

    As operation i first runs, its inputs, outputs and workspace are in memory, and so is every
    buffer that an ancestor of i wrote, that cannot be computed again, and that is a graph output
    or read by a descendant of i. At the end all outputs are. O(buffers * operations / 8 + edges).
    """
    ops = graph.operations
    sizes = [b.size for b in graph.buffers]
    ancestry = Ancestry.of(graph)
    need = np.full(len(ops), graph.resident, np.int64)
    bypassed = [0] * len(sizes)
    for b, size in enumerate(sizes):
        if size and not ops[graph.producer[b]].repeatable:
            bypassed[b] = ancestry.bypassed(graph, b)
            if bypassed[b]:
                need += size * ancestry.spread(bypassed[b]).astype(np.int64)
    best = Floor(graph.resident, -1)
    for i, op in enumerate(ops):
        # Outputs that i reads are bypassing it as well: the step ends after i.
        own = [b for b in set(op.reads) if not bypassed[b] >> i & 1]
        bytes_ = int(need[i]) + op.workspace + sum(sizes[b] for b in (*op.writes, *own))
        if op.writes:
            out = sizes[op.writes[0]]
            if any(b in op.inplace and sizes[b] == out for b in own):
                bytes_ -= out
        if bytes_ > best.bytes or best.operation < 0:
            best = Floor(bytes_, i)
    return _or_outputs(graph, best)
