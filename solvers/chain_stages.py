"""A training graph as a chain of stages, measured for a dynamic program over them.

The forward graph is cut at its articulation points; stage k reads its input x_k, the buffer at
the cut before it, and writes x_{k+1}. The backward pass is divided into phases, the last stage's
first; what it reads belongs to a stage, x_k to stage k. All that does not fit this picture (skip
connections over several stages, buffers read in another stage's phase, results that must not be
computed again, backward results) is background: it is in memory from its computation to its
last use whatever is done about the chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from optckpt.graph import TrainingGraph
from optckpt.solvers.griewank import Chain
from optckpt.solvers.recompute import missing_operations
from optckpt.solvers.segments import ArticulationPoint


@dataclass(frozen=True, slots=True)
class Run:
    """Operations executed one after the other within a stage."""

    operations: tuple[int, ...]
    seconds: float
    need: int
    """Peak bytes, resident data left out."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the chain. Sizes are bytes, resident data left out.

    Runs "kept", "all" and the phase hold the stage's input throughout, or until its last use; it
    is not counted in their need, because the caller holds it anyway. Needs of first executions
    and of the phase include the background, those of re-executions do not.
    """

    input: int
    """Size of what the stage reads from the one before."""
    extra: int
    """Size of what the phase reads besides the input."""
    first_kept: Run
    """The first execution; the input stays in memory."""
    first_freed: Run
    """The same, the input may go."""
    first_all: Run
    """The same; input, output and all that the phase reads stay."""
    again_kept: Run
    """What leads from the input to the output again; the input stays."""
    again_freed: Run
    again_all: Run
    """What leads from the input to the output and all that the phase reads; all that stays."""
    needed: Run
    """What leads from the input to what the phase reads, without the output.

    Of the last stage, which is never left before its phase, it is the first execution. The need
    is that of this and the phase, background included."""
    phase: Run
    """Backward operations, all that they read of the stage being in memory."""
    background: int
    """In memory as the phase begins, apart from the chain."""


def chain_stages(graph: TrainingGraph, points: Sequence[ArticulationPoint]) -> list[Stage]:
    """The stages between `points` (each before the last forward operation), in base order.

    O((operations + reads) log operations) time.
    """
    builder = _Builder(graph, Chain(graph, tuple(points)))
    return [builder.stage(k) for k in range(builder.count)]


class _Builder:
    """Divides graph and backward pass, and measures runs."""

    def __init__(self, graph: TrainingGraph, chain: Chain) -> None:
        self.graph, self.chain = graph, chain
        self.sizes = [b.size for b in graph.buffers]
        self.count = len(chain)
        self.split = split = graph.first_backward
        self.bounds = [-1, *chain.boundaries, split - 1]
        self.background = bytearray(chain.persistent)
        for b, p in enumerate(graph.producer):
            if p >= split:
                self.background[b] = 1
        wants = {}
        for i in range(split, len(graph.operations)):
            read = [chain.link_for(b) for b in graph.operations[i].reads if not self.background[b]]
            if read:
                wants[i] = max(read)
        self.starts = _phase_starts(graph, wants, self.count)
        ends = [len(graph.operations), *self.starts]
        self.phases = [range(self.starts[k], ends[k]) for k in range(self.count)]
        for b, readers in enumerate(graph.readers):
            if not self.background[b]:
                phase = self.phases[chain.link_for(b)]
                self.background[b] = any(i >= split and i not in phase for i in readers)
        points = {p.buffer for p in chain.points}
        self.extras: list[list[int]] = [[] for _ in range(self.count)]
        for b, readers in enumerate(graph.readers):
            if not self.background[b] and b not in points and readers and readers[-1] >= split:
                self.extras[chain.link_of(b)].append(b)
        self.last = _last_uses(graph)
        for k in range(self.count):
            # What a stage reads of the background has to last until its last re-execution.
            for o in self.again(k, [*self.at_cut(k + 1), *self.extras[k]]):
                for b in graph.operations[o].reads:
                    if self.background[b]:
                        self.last[b] = max(self.last[b], self.starts[k])
        held = [b for b, is_so in enumerate(self.background) if is_so]
        self.live = _live_before(graph, held, self.last)

    def at_cut(self, k: int) -> list[int]:
        """The input of stage k, unless it is background."""
        found = [self.chain.points[k - 1].buffer] if 0 < k < self.count else []
        return [b for b in found if not self.background[b]]

    def again(self, k: int, wanted: Collection[int]) -> list[int]:
        """The operations of stage k that lead from its input to `wanted`."""
        at_cut = self.at_cut(k)
        for b in at_cut:
            self.background[b] = 1
        found = missing_operations(self.graph, wanted, self.background)
        for b in at_cut:
            self.background[b] = 0
        return sorted(found)

    def stage(self, k: int) -> Stage:
        last = k == self.count - 1
        sizes = self.sizes
        before, after, extras = self.at_cut(k), self.at_cut(k + 1), self.extras[k]
        held = sum(sizes[b] for b in before)
        behind = self.live[self.starts[k]]
        first = list(range(self.bounds[k] + 1, self.bounds[k + 1] + 1))
        advance = self.again(k, after)
        everything = self.again(k, [*after, *extras])
        needed = self.again(k, extras)
        phase = list(self.phases[k])
        if last:
            alone = self.run([], [*first, *phase], [], held)
        else:
            alone = self.run(needed, phase, [], held, behind)
        used = first if last else needed
        return Stage(
            input=held,
            extra=sum(sizes[b] for b in extras),
            first_kept=self.run([], first, [*before, *after], held),
            first_freed=self.run([], first, after),
            first_all=self.run([], first, [*before, *after, *extras], held),
            again_kept=self.run(advance, [], [*before, *after], held),
            again_freed=self.run(advance, [], after),
            again_all=self.run(everything, [], [*before, *after, *extras], held),
            needed=Run(tuple(used), self.seconds(used), alone.need),
            phase=self.run([], phase, [], held),
            background=behind,
        )

    def seconds(self, operations: Collection[int]) -> float:
        return sum(self.graph.operations[o].seconds for o in operations)

    def run(
        self,
        again: Sequence[int],
        base: Sequence[int],
        keep: Collection[int],
        held: int = 0,
        behind: int = 0,
    ) -> Run:
        """`again` over `behind` bytes of background, then `base` at their place in the order.

        Buffers of the chain that are read but not written are in memory before, those of `keep`
        afterwards. The need is the peak less `held`.
        """
        graph, background = self.graph, self.background
        executions = [*again, *base]
        last = dict.fromkeys(keep, len(executions))
        written: set[int] = set()
        for step, o in enumerate(executions):
            op = graph.operations[o]
            for b in (*op.reads, *op.writes):
                if not background[b]:
                    last[b] = max(step, last.get(b, -1))
            written.update(op.writes)
        sizes = self.sizes
        live = sum(sizes[b] for b in last if b not in written)
        peak = 0
        for step, o in enumerate(executions):
            op, in_base = graph.operations[o], step >= len(again)
            live += sum(sizes[b] for b in op.writes if not background[b])
            use = live + op.workspace + sum(sizes[b] for b in op.writes if background[b])
            use += self.live[o] if in_base else behind
            for b in op.inplace:
                if background[b]:
                    dies = in_base and self.last[b] == o
                else:
                    dies = last[b] == step
                if dies and op.writes and sizes[b] == sizes[op.writes[0]]:
                    use -= sizes[b]
                    break
            peak = max(peak, use)
            touched = {*op.reads, *op.writes}
            live -= sum(sizes[b] for b in touched if not background[b] and last[b] == step)
        return Run(tuple(executions), self.seconds(executions), peak - held)


def _phase_starts(graph: TrainingGraph, wants: dict[int, int], count: int) -> list[int]:
    """Where the backward phase of each stage begins: with the first operation that reads it.

    `wants` says which stage operations read. Where these do not fall from one operation to the
    next, the longest subsequence in which they do decides.
    """
    tails: list[int] = []
    ends: list[int] = []
    before: dict[int, int] = {}
    for i, k in wants.items():
        at = bisect_right(tails, -k)
        before[i] = ends[at - 1] if at else -1
        tails[at : at + 1] = [-k]
        ends[at : at + 1] = [i]
    starts = [graph.first_backward] * count
    i, k = ends[-1] if ends else -1, 0
    start = len(graph.operations)
    # Backwards through the subsequence: phases that nothing reads begin where the next one does.
    while i >= 0:
        while k < min(wants[i], count - 1):
            starts[k] = start
            k += 1
        start = i
        i = before[i]
    while k < count - 1:
        starts[k] = start
        k += 1
    return starts


def _last_uses(graph: TrainingGraph) -> list[int]:
    """For each buffer, the last operation that reads or writes it; of outputs, the end."""
    last = [max([p, *r[-1:]]) for p, r in zip(graph.producer, graph.readers, strict=True)]
    for b in graph.outputs:
        last[b] = len(graph.operations)
    return last


def _live_before(graph: TrainingGraph, buffers: Collection[int], last: Sequence[int]) -> list[int]:
    """Bytes of `buffers` written before and used at or after each position, the end included."""
    n = len(graph.operations)
    change = [0] * (n + 2)
    for b in buffers:
        change[graph.producer[b] + 1] += graph.buffers[b].size
        change[last[b] + 1] -= graph.buffers[b].size
    return list(accumulate(change))[: n + 1]
