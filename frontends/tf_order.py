"""Which operations of a TensorFlow graph take part in a step, and in which order."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from optckpt.errors import CaptureError
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_devices import Devices
from optckpt.frontends.tf_nodes import Node, Nodes, by_creation
from optckpt.frontends.tf_shapes import Sizes
from optckpt.frontends.tf_versions import VARIABLE_READS

# Operation at the back edge of a TensorFlow 1 loop.
_NEXT_ITERATION = tf_ops.words("NextIteration RefNextIteration")


def outside_consumers(
    nodes: Nodes,
    needed: set[Node],
    forward: set[Node],
    sizes: Sizes,
    live: Collection[tf.Operation] | None,
    device: str,
) -> set[Node]:
    """Operations that no gradient needs but that read a large tensor of the step, and theirs.

    `live`: the operations that will run at all, if that is known. `device`: that of the step; what
    nobody in it reads may be there for others elsewhere (one operation gets the data of all
    replicas).
    """
    devices = Devices()
    first_backward = min((n.number for n in needed if n not in forward), default=None)

    def runs(node: Node) -> bool:
        if live is not None:
            return node.op in live
        # What the differentiation made and nobody needs is pruned before it runs.
        return first_backward is None or node.number < first_backward

    found: set[Node] = set()
    stack = list(needed)
    while stack:
        node = stack.pop()
        if node.kind in tf_ops.RESIDENT:
            continue
        for t in node.outputs:
            if sizes.large(t):
                readers = [nodes[op] for op in t.consumers()]
                ours = any(c in needed for c in readers)
                for c in readers:
                    new = c not in needed and c not in found
                    if not new or c.kind in tf_ops.METADATA or not runs(c):
                        continue
                    if ours or devices.of(c.op) == device:
                        found.add(c)
                        stack.append(c)
    # Their small inputs may come from operations that have not been looked at.
    return nodes.ancestors((node.op for node in found), needed) - needed


class Ordering:
    """Topological orders of a step over data and control edges, ties by creation, in groups.

    A group is a unit of operations that must stay together, or a single operation. Of the backward
    operations that read one large tensor, those whose results are final come first (a layer's
    weights before its input): the layer's activations may then die before the gradient that flows
    on is allocated. O((operations + edges) log operations) each.
    """

    def __init__(
        self,
        among: set[Node],
        forward: set[Node],
        outside: set[Node],
        sizes: Sizes,
        after: Collection[Node] = (),
    ) -> None:
        """`outside`: operations that come as soon as they can. `after`: those that come after the
        gradients, which need none of them."""
        nodes = sorted(among, key=by_creation)
        index = {node: i for i, node in enumerate(nodes)}
        before = [
            [index[p] for p in node.makers if p.kind not in _NEXT_ITERATION]
            + [index[p] for p in node.control_inputs]
            for node in nodes
        ]
        readers = _Readers(nodes)
        for i, earlier in (*_effects(nodes), *_old_readers(nodes, readers, after)):
            before[i].append(index[earlier])
            nodes[i].effects.append(earlier)
        for i, p in _not_too_early(nodes, index, readers, after, before):
            before[i].append(p)
        self._nodes = nodes
        self._before = before
        self._units = _units(nodes, readers)
        self._rank = _ranks(nodes, forward, sizes, readers, after)
        self._outside = outside
        self._after = after

    def order(self, *, early_updates: bool = True) -> list[tuple[Node, ...]]:
        """The groups in order.

        With `early_updates` what comes after the gradients comes as soon as it can, too; it
        overwrites a variable only when all that reads its old value is done.
        """
        nodes, before, rank, units = self._nodes, self._before, self._rank, self._units
        early = self._outside.union(self._after) if early_updates else self._outside
        # Where each operation stands among those that are ready.
        first = sorted(range(len(nodes)), key=lambda i: (nodes[i] not in early, rank[i]))
        place = [0] * len(nodes)
        for n, i in enumerate(first):
            place[i] = n
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
                for p in {group_of[p] for p in ps}:
                    if p != g:
                        waiting[g] += 1
                        next_of[p].append(g)
            heap = [place[i] for i in range(len(nodes)) if group_of[i] == i and not waiting[i]]
            heapq.heapify(heap)
            order: list[tuple[Node, ...]] = []
            count = 0
            while heap:
                g = first[heapq.heappop(heap)]
                group = members.get(g, (g,))
                order.append(tuple(nodes[i] for i in group))
                count += len(group)
                for n in next_of[g]:
                    waiting[n] -= 1
                    if not waiting[n]:
                        heapq.heappush(heap, place[n])
            if count == len(nodes):
                return order
            # Something lies between the members of a unit: it cannot stay together.
            stuck = _on_cycles(
                {g for g, n in enumerate(waiting) if n and group_of[g] == g}, next_of
            )
            if not any(u[0] in stuck for u in units):
                raise CaptureError("the graph has a cycle outside of loops; it cannot be planned")
            units = [u for u in units if u[0] not in stuck]


class _Readers:
    """Who, of some nodes, reads a tensor or waits for an operation; nodes by index."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._of_tensor: dict[int, list[int]] = {}
        self._of_control: dict[Node, list[int]] = {}
        for i, node in enumerate(nodes):
            for t in node.inputs:
                self._of_tensor.setdefault(id(t), []).append(i)
            for p in node.control_inputs:
                self._of_control.setdefault(p, []).append(i)

    def of(self, tensor: tf.Tensor) -> Sequence[int]:
        """The readers of a tensor in order; one that reads it twice is there twice."""
        return self._of_tensor.get(id(tensor), ())

    def waiting_for(self, node: Node) -> Sequence[int]:
        """Those with a control edge from `node`."""
        return self._of_control.get(node, ())


def _ranks(
    nodes: Sequence[Node],
    forward: set[Node],
    sizes: Sizes,
    readers: _Readers,
    after: Collection[Node],
) -> list[float]:
    """The place of each operation among those that are ready: its number, or just before that
    of the first backward reader of what it reads, if its own results are final: read by nothing
    but what comes `after` the gradients."""
    rank: list[float] = list(range(len(nodes)))
    final: set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if node in forward or node.kind in tf_ops.RESIDENT or readers.waiting_for(node):
            continue
        if node in after:
            continue
        users = {c for t in node.outputs for c in readers.of(t)}
        if not all(nodes[c] in after or (c in final and tf_ops.views(nodes[c].op)) for c in users):
            continue
        final.add(i)
        siblings = (
            c
            for t, p in zip(node.inputs, node.makers, strict=True)
            if p not in forward and sizes.large(t)
            for c in readers.of(t)
            if nodes[c] not in forward and nodes[c] not in after
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


def _effects(nodes: Sequence[Node]) -> Iterable[tuple[int, Node]]:
    """Order among stateful operations that tf.function adds when tracing ends.

    Yields (index, operation it comes after): writes of a resource after its earlier reads and
    write, reads after the last write, other stateful operations one after the other.
    """
    if not getattr(nodes[0].op.graph, "building_function", False):
        return
    last: Node | None = None
    writer: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        if not node.op._is_stateful or node.kind == "Placeholder":
            continue
        handles = [id(t) for t in node.inputs if t.dtype == tf.resource]
        if not handles:
            if node.inputs:
                if last is not None:
                    yield i, last
                last = node
            continue
        reads = node.kind in VARIABLE_READS
        for h in handles:
            if h in writer:
                yield i, writer[h]
            if reads:
                readers.setdefault(h, []).append(node)
            else:
                for r in readers.pop(h, ()):
                    if r is not node:
                        yield i, r
                writer[h] = node


def _old_readers(
    nodes: Sequence[Node], readers: _Readers, after: Collection[Node]
) -> Iterable[tuple[int, Node]]:
    """Who reads the value that an operation in `after` overwrites: (its index, the reader).

    Reading a variable copies nothing; overwritten too early, its old value would be in memory
    beside the new one. Readers that were made later have good reason to come later.
    """
    reads: dict[int, list[Node]] = {}
    for node in nodes if after else ():
        if node.kind == "ReadVariableOp":
            reads.setdefault(id(node.inputs[0]), []).append(node)
    for i, node in enumerate(nodes):
        if node not in after or node.kind in VARIABLE_READS or not tf_ops.is_update(node.op):
            continue
        stack = [t for h in node.inputs for r in reads.get(id(h), ()) for t in r.outputs]
        while stack:
            t = stack.pop()
            for c in readers.of(t):
                reader = nodes[c]
                if c >= i or reader.kind in tf_ops.METADATA:
                    continue
                yield i, reader
                if tf_ops.may_view(reader.kind):
                    stack += [
                        reader.outputs[o]
                        for k, o in tf_ops.views(reader.op)
                        if reader.inputs[k] is t
                    ]


def _not_too_early(
    nodes: Sequence[Node],
    index: Mapping[Node, int],
    readers: _Readers,
    after: Collection[Node],
    before: Sequence[Sequence[int]],
) -> list[tuple[int, int]]:
    """What comes `after` the gradients and is computed from variables alone waits for all that its
    only reader waits for: (index of such an operation, index of what it comes after).

    It could be computed at any time, and would take up memory until it is read: the momentum times
    its decay, a variable less its weight decay. `before`: index of an operation -> indices of what
    it comes after.

    This closes no cycle. From such an operation all paths lead through its reader, which is none
    of them, and what it is made to wait for comes before the reader anyway.
    """
    movable: set[int] = set()
    for i, node in enumerate(nodes):
        if node in after and not node.op._is_stateful and not node.control_inputs:
            makers = [(p, index.get(p)) for p in node.makers]
            if all(k in movable or _is_always_there(p) for p, k in makers):
                movable.add(i)
    found: list[tuple[int, int]] = []
    for i, node in enumerate(nodes):
        if node not in after or i in movable:
            continue
        only = {i}
        stack = [index[p] for p in node.makers if p in index]
        while stack:
            c = stack.pop()
            if c in only or c not in movable:
                continue
            if readers.waiting_for(nodes[c]):
                continue
            # Of what many read, mostly the first reader tells.
            if all(r in only for t in nodes[c].outputs for r in readers.of(t)):
                only.add(c)
                stack += [index[p] for p in nodes[c].makers if p in index]
        only.remove(i)
        found += [(c, p) for c in sorted(only) for p in before[i] if p not in only]
    return found


def _is_always_there(node: Node) -> bool:
    """Whether it is a constant, a variable or a read of one."""
    return all(t.dtype == tf.resource for t in node.inputs)


def _units(nodes: Sequence[Node], readers: _Readers) -> list[tuple[int, ...]]:
    """Index tuples of operations that the oneDNN pass may merge, each in execution order."""
    index = {node.op: i for i, node in enumerate(nodes)}
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for i, node in enumerate(nodes):
        if node.kind not in tf_ops.FUSED:
            continue
        for c in tf_ops.fused_partner(node.op):
            j = index.get(c)
            if j is None or j in taken:
                continue
            if node.kind == "BiasAddGrad":
                # Of several filters the one of the same layer: made next.
                if j < i:
                    continue
            elif {*readers.of(node.outputs[0]), *readers.waiting_for(node)} != {j}:
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
