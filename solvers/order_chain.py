"""The chain bound for any order: a path whose buffers are wanted one after the other in all orders.

`chain_bound` takes from the base order when the buffers of a path are wanted, and what else is in
memory then. Here both follow from dependencies alone: of the operations that read buffers of the
path a sequence is taken in which each is an ancestor of the next while the buffers go back along
the path, and beside them only what ancestors wrote once and for all, and descendants or the end of
the step still read, is counted. In a deep network the gradients of the activations are such a
sequence, so that the bound is little weaker than that for the base order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from optckpt.graph import TrainingGraph
from optckpt.solvers.ancestry import Ancestry
from optckpt.solvers.chain_bound import (
    Chain,
    Moment,
    chain_of,
    heaviest_path,
    least_cost,
    step_costs,
)
from optckpt.solvers.preprocess import Problem, preprocess

MOST_READERS = 3000
"""With more readers than this only the last one of each buffer is looked at."""


def demands(problem: Problem, ancestry: Ancestry, path: Sequence[int]) -> list[tuple[int, int]]:
    """Places of the path and operations that read the buffers there, places descending.

    Each operation is an ancestor of the next. As many as there can be. O(readers ** 2).
    """
    p = problem
    pairs = [(r, k) for k, t in enumerate(path) for r in p.base_readers[t] if r < p.n]
    if len(pairs) > MOST_READERS:
        pairs = [(r, k) for k, t in enumerate(path) for r in p.base_readers[t][-1:] if r < p.n]
    pairs.sort()
    readers = np.array([r for r, _ in pairs], np.int64)
    places = np.array([k for _, k in pairs], np.int64)
    length = np.ones(len(pairs), np.int64)
    link = [-1] * len(pairs)
    for index, (r, k) in enumerate(pairs):
        above = ancestry.spread(ancestry.before[r])[readers[:index]] * (places[:index] > k)
        lengths = length[:index] * above
        if lengths.any():
            link[index] = int(lengths.argmax())
            length[index] += lengths[link[index]]
    found = []
    index = int(length.argmax()) if pairs else -1
    while index >= 0:
        r, k = pairs[index]
        found.append((k, r))
        index = link[index]
    found.reverse()
    return found


def chain_in_any_order(graph: TrainingGraph, budget: int) -> Chain | None:
    """The chain of the path that takes the most time; `budget` is without resident bytes.

    None if no two buffers of it are wanted one after the other in every order.
    """
    p = preprocess(graph, merge=False)
    path = heaviest_path(p)
    ancestry = Ancestry.of(graph)
    wanted = demands(p, ancestry, path)
    if len(wanted) < 2:
        return None
    # Bytes that ancestors wrote once and for all and descendants, or the end, still read.
    certain = np.zeros(p.n, np.int64)
    once: dict[int, int] = {}
    for t, o in enumerate(p.producer):
        if not p.repeatable[o] and p.size[t]:
            once[t] = ancestry.bypassed(graph, t)
            if once[t]:
                certain += p.size[t] * ancestry.spread(once[t]).astype(np.int64)
    place_of = {t: k for k, t in enumerate(path)}
    moments = []
    for k, c in wanted:
        own = (
            t for t in p.reads[c] if place_of.get(t, len(path)) > k and not once.get(t, 0) >> c & 1
        )
        need = int(certain[c]) + p.workspace[c] + sum(p.size[t] for t in (*own, *p.writes[c]))
        if p.takes[c]:
            need -= p.size[p.writes[c][0]]
        moments.append(Moment(k, True, budget - need))
    return chain_of([p.size[t] for t in path], step_costs(p, path), moments, budget)


def order_chain_bound(
    graph: TrainingGraph, budget: int, proceed: Callable[[], bool] = lambda: True
) -> float | None:
    """A lower bound on the overhead of schedules in any order within `budget` bytes.

    Args:
        budget: bytes, resident included.
        proceed: asked now and then whether to go on.

    Returns:
        The bound as a fraction of the plain step; infinite if no schedule fits; None if there is
        no chain, or if `proceed` said no.
    """
    chain = chain_in_any_order(graph, budget - graph.resident)
    return None if chain is None else least_cost(chain, proceed)
