"""Strategies of the literature: fixed rules for what to keep, without optimality.

Each returns a schedule in base order. Its status is "feasible" if it fits the budget (or there
is none), else "over-budget": then it is the schedule of the lowest peak that the rule gives. The
certificate's bound is 0: nothing is proven. Only forward operations are executed again; on a
graph that marks no backward operation, the strategies give the plain step.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule, Solution
from optckpt.simulate import simulate
from optckpt.solvers.griewank import Chain, balanced_slots
from optckpt.solvers.recompute import best_of, schedule_from_kept
from optckpt.solvers.registry import SolveOptions
from optckpt.solvers.segments import (
    articulation_points,
    crossing_buffers,
    even_cuts,
    greedy_cuts,
    held_bytes,
    kept_at,
    main_operations,
)

COSTLY_KINDS = frozenset(
    {
        "Conv",
        "Conv2D",
        "Conv3D",
        "DepthwiseConv2dNative",
        "Conv2DBackpropInput",  # The transposed convolution; forward in decoders.
        "Conv3DBackpropInputV2",
        "MatMul",
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "Einsum",
        "_FusedConv2D",
        "_FusedMatMul",
    }
)
"""Operation types whose outputs the strategy `speed` keeps."""

# Buffers smaller than this share of the largest one do not count as layers.
_SMALL = 1e-3

# A sweep simulates about so many operations in all: a few seconds.
_SWEPT_OPERATIONS = 120_000

# Slots of `griewank` that are tried beside those that bisection finds.
_NEAR = 4
_FEW = 12


def store_all(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """The plain step: every buffer is kept until its last use, nothing is executed again."""
    return best_of("store_all", graph, budget, [Schedule.base(graph)], options.time_limit)


def sqrt_n_boundaries(graph: TrainingGraph) -> list[int]:
    """Where `sqrt_n` cuts the forward pass: indices of the last operation before each cut."""
    main = main_operations(graph)
    largest = max((b.size for b in graph.buffers), default=0)
    layers = sum(
        1
        for i in main
        if any(
            graph.buffers[b].size > _SMALL * largest and graph.readers[b]
            for b in graph.operations[i].writes
        )
    )
    root = sqrt(max(1, layers))
    # The loss is no checkpoint: nothing comes after it.
    points = [p.operation for p in articulation_points(graph) if p.operation < main[-1]]
    if points and _widest_share(graph, points) <= 0.5:
        if len(points) > ceil(root):
            step = ceil(len(points) / root)
            points = points[step::step]
        return points
    return even_cuts(graph, ceil(root))


def _widest_share(graph: TrainingGraph, boundaries: list[int]) -> float:
    """Share of what the backward pass reads that is written inside the largest segment."""
    held = held_bytes(graph)
    ends = [*boundaries, len(held) - 1]
    starts = [0, *(b + 1 for b in boundaries)]
    total = sum(held)
    widest = max(sum(held[s : e + 1]) for s, e in zip(starts, ends, strict=True))
    return widest / total if total else 0.0


def sqrt_n(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """About sqrt(n) checkpoints, the segments between them computed twice.

    T. Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174 (2016).
    Checkpoints are evenly spaced articulation points of the forward graph, chosen as OpenAI's
    gradient-checkpointing (2018) chose them in its mode 'memory'; as there and in the paper, the
    last segment is computed again like the others. Where there are none, or half of the
    activations lie between two of them (U-nets), the forward order is cut into sqrt(n) segments
    instead, and all that crosses a cut is kept. On a chain of n equal layers the peak is
    O(sqrt(n)) layers at one extra forward pass at most.
    """

    def candidates() -> Iterator[Schedule]:
        boundaries = sqrt_n_boundaries(graph)
        kept = crossing_buffers(graph, boundaries) if boundaries else kept_at(graph, ())
        yield schedule_from_kept(graph, kept, "segments", boundaries)

    return best_of("sqrt_n", graph, budget, candidates(), options.time_limit)


def chen_greedy(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """Segments bounded in bytes, the bound swept.

    Chen et al., arXiv 1604.06174, algorithm 3: the forward pass is cut as soon as a segment
    holds more than b bytes, b runs over a geometric grid. Cuts are at articulation points, or
    anywhere; all that crosses a cut is kept.
    """

    def candidates() -> Iterator[Schedule]:
        held = held_bytes(graph)
        total, largest = sum(held), max(held, default=0)
        points = [p.operation for p in articulation_points(graph)]
        anywhere = [i for i, op in enumerate(graph.operations) if op.forward]
        seen: set[tuple[int, ...]] = set()
        size = float(max(1, min(largest, total // 64)))
        steps = max(12, min(60, _SWEPT_OPERATIONS // max(1, len(graph.operations))))
        ratio = max(1.01, (total / size) ** (1 / steps))
        while True:
            for allowed in (points, anywhere):
                cuts = greedy_cuts(graph, int(size), allowed)
                if tuple(cuts) not in seen:
                    seen.add(tuple(cuts))
                    yield schedule_from_kept(graph, kept_at(graph, cuts), "segments", cuts)
            if size >= total:
                return
            size *= ratio

    return best_of("chen_greedy", graph, budget, candidates(), options.time_limit)


def speed(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """Keep what is slow to compute: outputs of convolutions and matrix products.

    The mode 'speed' of OpenAI's gradient-checkpointing (2018). Everything else is computed again
    just in time; see `COSTLY_KINDS`. A unit of several operations counts if one of them does.
    """
    kept = {
        b
        for op in graph.operations
        if not COSTLY_KINDS.isdisjoint(op.kind.split("+"))
        for b in op.writes
    }
    return best_of("speed", graph, budget, _just_in_time(graph, kept), options.time_limit)


def explicit(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """Keep the buffers `options.checkpoints`, and what must not be computed again.

    Every other forward buffer is freed and computed again for the backward pass.

    Raises:
        OptckptError: if no checkpoints are given, or one is no buffer of the graph.
    """
    if options.checkpoints is None:
        raise OptckptError(
            "strategy 'explicit' needs the buffers to keep: give SolveOptions(checkpoints=...)"
        )
    for b in options.checkpoints:
        if not 0 <= b < len(graph.buffers):
            raise OptckptError(
                f"checkpoint {b} is no buffer of the graph, which has {len(graph.buffers)}"
            )
    kept = set(options.checkpoints)
    return best_of("explicit", graph, budget, _just_in_time(graph, kept), options.time_limit)


def _just_in_time(graph: TrainingGraph, kept: set[int]) -> Iterator[Schedule]:
    yield schedule_from_kept(graph, kept, "retained")
    yield schedule_from_kept(graph, kept, "transient")


def griewank(graph: TrainingGraph, budget: int | None, options: SolveOptions) -> Solution:
    """Binomial checkpointing (Revolve) over the chain of articulation points.

    A. Griewank and A. Walther, ACM TOMS 26 (2000); see `optckpt.solvers.griewank`. The number of
    saved states is searched for; without a budget it is the least s with C(2 s, s) >= links, for
    which both memory and repetitions are logarithmic in the length.

    Raises:
        OptckptError: if the forward graph has no articulation points.
    """
    points = articulation_points(graph)
    if not points:
        raise OptckptError(
            "strategy 'griewank' needs a chain: no tensor cuts the forward graph in two; "
            "use 'sqrt_n' or 'optimal'"
        )
    chain = Chain(graph, tuple(points))

    def candidates() -> Iterator[Schedule]:
        if budget is None:
            found = chain.reversal(balanced_slots(len(chain)))
            assert found is not None
            yield found
            return
        # Beyond ten times the plain step a schedule is of no use, and long to write down.
        most = 10 * len(graph.operations)
        found = chain.reversal(len(chain))
        assert found is not None
        yield found
        tried = {len(chain)}
        # The most slots that fit. On chains of equal links the peak grows with their number, so
        # that the place between a number that fits and one that does not can be guessed.
        low, low_bytes = 0, graph.resident
        high, high_bytes = len(chain), simulate(graph, found).peak
        if high_bytes <= budget:
            return
        while high - low > 1:
            share = (budget - low_bytes) / max(1, high_bytes - low_bytes)
            if len(tried) % 3 == 0:
                share = 0.5
            slots = min(max(low + int(share * (high - low)), low + 1), high - 1)
            tried.add(slots)
            found = chain.reversal(slots, most)
            if found is None:
                low = slots
                continue
            yield found
            bytes_ = simulate(graph, found).peak
            if bytes_ <= budget:
                low, low_bytes = slots, bytes_
            else:
                high, high_bytes = slots, bytes_
        # Elsewhere it need not. With fewer slots than fit, it only takes longer.
        few = () if low else range(_FEW, 0, -1)
        for slots in (*range(low + _NEAR, low, -1), *few):
            if slots in tried or slots > len(chain):
                continue
            tried.add(slots)
            found = chain.reversal(slots, most)
            if found is None:
                return
            yield found

    return best_of("griewank", graph, budget, candidates(), options.time_limit)
