"""Which operations of a TensorFlow graph take part in a step, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import tensorflow as tf

from optckpt.errors import CaptureError
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_shapes import Sizes


def ancestors(
    roots: Iterable[tf.Operation], seen: set[tf.Operation] | None = None
) -> set[tf.Operation]:
    """`roots` and all they depend on by data and control edges, added to `seen`."""
    seen = set() if seen is None else seen
    stack = [op for op in roots if op not in seen]
    seen.update(stack)
    while stack:
        op = stack.pop()
        for t in op.inputs:
            p = t.op
            if p not in seen:
                seen.add(p)
                stack.append(p)
        for p in op.control_inputs:
            if p not in seen:
                seen.add(p)
                stack.append(p)
    return seen


def outside_consumers(
    needed: set[tf.Operation],
    forward: set[tf.Operation],
    sizes: Sizes,
    live: set[tf.Operation] | None,
) -> set[tf.Operation]:
    """Operations that no gradient needs but that read a large tensor of the step, and theirs."""
    first_backward = min((op._id for op in needed if op not in forward), default=None)

    def runs(op: tf.Operation) -> bool:
        if live is not None:
            return op in live
        # What the differentiation made and nobody needs is pruned before it runs.
        return first_backward is None or op._id < first_backward

    found: set[tf.Operation] = set()
    stack = list(needed)
    while stack:
        op = stack.pop()
        if op.type in tf_ops.RESIDENT:
            continue
        for t in op.outputs:
            if sizes.large(t):
                for c in t.consumers():
                    new = c not in needed and c not in found
                    if new and c.type not in tf_ops.METADATA and runs(c):
                        found.add(c)
                        stack.append(c)
    # Their small inputs may come from operations that have not been looked at.
    for op in ancestors(found, set(needed)) - needed - found:
        found.add(op)
    return found


def execution_order(
    ops: set[tf.Operation],
    forward: set[tf.Operation],
    outside: set[tf.Operation],
    sizes: Sizes,
) -> list[tuple[tf.Operation, ...]]:
    """A topological order over data and control edges, ties by creation, in groups.

    A group is a unit of operations that must stay together, or a single operation. Operations
    in `outside` come as soon as they can. Of the backward operations that read one large tensor,
    those whose results are final come first (a layer's weights before its input): the layer's
    activations may then die before the gradient that flows on is allocated.
    O((operations + edges) log operations).
    """
    nodes = sorted(ops, key=lambda op: op._id)
    index = {op: i for i, op in enumerate(nodes)}
    before: list[list[int]] = [[] for _ in nodes]
    for i, op in enumerate(nodes):
        for t in op.inputs:
            p = t.op
            # The back edge of a TensorFlow 1 loop.
            if p.type not in ("NextIteration", "RefNextIteration"):
                before[i].append(index[p])
        before[i].extend(index[p] for p in op.control_inputs)
    for i, op in _effects(nodes):
        before[i].append(index[op])
    units = _units(nodes, index)
    rank = _ranks(nodes, index, forward, sizes)
    while True:
        group_of = list(range(len(nodes)))
        members: dict[int, tuple[int, ...]] = {}
        for unit in units:
            members[unit[0]] = unit
            for i in unit:
                group_of[i] = unit[0]
        waiting = [0] * len(nodes)
        next_of: list[list[int]] = [[] for _ in nodes]
        for i, ps in enumerate(before):
            g = group_of[i]
            for p in {group_of[p] for p in ps} - {g}:
                waiting[g] += 1
                next_of[p].append(g)
        key = [(op not in outside, rank[i], i) for i, op in enumerate(nodes)]
        heap = [key[i] for i in range(len(nodes)) if group_of[i] == i and not waiting[i]]
        heapq.heapify(heap)
        order: list[tuple[tf.Operation, ...]] = []
        count = 0
        while heap:
            _, _, g = heapq.heappop(heap)
            group = members.get(g, (g,))
            order.append(tuple(nodes[i] for i in group))
            count += len(group)
            for n in next_of[g]:
                waiting[n] -= 1
                if not waiting[n]:
                    heapq.heappush(heap, key[n])
        if count == len(nodes):
            return order
        # Something lies between the members of a unit: it cannot stay together.
        stuck = _on_cycles({g for g, n in enumerate(waiting) if n and group_of[g] == g}, next_of)
        if not any(u[0] in stuck for u in units):
            raise CaptureError("the graph has a cycle outside of loops; it cannot be planned")
        units = [u for u in units if u[0] not in stuck]


def _ranks(
    nodes: Sequence[tf.Operation],
    index: dict[tf.Operation, int],
    forward: set[tf.Operation],
    sizes: Sizes,
) -> list[float]:
    """The place of each operation among those that are ready: its number, or just before that
    of the first backward reader of what it reads, if its own results are final."""
    rank: list[float] = list(range(len(nodes)))
    final: set[tf.Operation] = set()
    for i in range(len(nodes) - 1, -1, -1):
        op = nodes[i]
        if op in forward or op.type in tf_ops.RESIDENT:
            continue
        if any(c in index for c in op._control_outputs):
            continue
        users = (c for t in op.outputs for c in t.consumers() if c in index)
        if not all(c in final and tf_ops.views(c) for c in users):
            continue
        final.add(op)
        siblings = (
            index[c]
            for t in op.inputs
            if t.op not in forward and sizes.large(t)
            for c in t.consumers()
            if c in index and c not in forward
        )
        rank[i] = min(siblings, default=i) - 0.5
    return rank


def _on_cycles(stuck: set[int], next_of: Sequence[Sequence[int]]) -> set[int]:
    """Of nodes that all depend on a cycle, those on a cycle or between two of them."""
    ahead = {g: sum(n in stuck for n in next_of[g]) for g in stuck}
    back: dict[int, list[int]] = {g: [] for g in stuck}
    for g in stuck:
        for n in next_of[g]:
            if n in stuck:
                back[n].append(g)
    ends = [g for g, n in ahead.items() if not n]
    while ends:
        g = ends.pop()
        del ahead[g]
        for p in back[g]:
            ahead[p] -= 1
            if not ahead[p]:
                ends.append(p)
    return set(ahead)


def _effects(nodes: Sequence[tf.Operation]) -> Iterable[tuple[int, tf.Operation]]:
    """Order among stateful operations that tf.function adds when tracing ends.

    Yields (index, operation it comes after): writes of a resource after its earlier reads and
    write, reads after the last write, other stateful operations one after the other.
    """
    if not getattr(nodes[0].graph, "building_function", False):
        return
    last: tf.Operation | None = None
    writer: dict[int, tf.Operation] = {}
    readers: dict[int, list[tf.Operation]] = {}
    for i, op in enumerate(nodes):
        if not op._is_stateful or op.type == "Placeholder":
            continue
        handles = [id(t) for t in op.inputs if t.dtype == tf.resource]
        if not handles:
            if op.inputs:
                if last is not None:
                    yield i, last
                last = op
            continue
        reads = op.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
        for h in handles:
            if h in writer:
                yield i, writer[h]
            if reads:
                readers.setdefault(h, []).append(op)
            else:
                for r in readers.pop(h, ()):
                    if r is not op:
                        yield i, r
                writer[h] = op


def _units(nodes: Sequence[tf.Operation], index: dict[tf.Operation, int]) -> list[tuple[int, ...]]:
    """Index tuples of operations that the oneDNN pass may merge, each in execution order."""
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for i, op in enumerate(nodes):
        for c in tf_ops.fused_partner(op):
            j = index.get(c)
            if j is None or j in taken:
                continue
            if op.type == "BiasAddGrad":
                # Of several filters the one of the same layer: made next.
                if j < i:
                    continue
            else:
                users = {u for u in op.outputs[0].consumers() if u in index}
                users.update(u for u in op._control_outputs if u in index)
                if users != {c}:
                    break
            partner[i] = j
            taken.add(j)
            break
    units = []
    for i in partner:
        if i in taken:
            continue
        unit = [i]
        while unit[-1] in partner:
            unit.append(partner[unit[-1]])
        units.append(tuple(unit))
    return units
