"""The chain bound for any order against exhaustive search over all orders."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import all_orders, budget_between, random_order

from optckpt.frontends.synthetic import chain, random_graph, residual_chain
from optckpt.graph import TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.ancestry import Ancestry
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.chain_bound import heaviest_path
from optckpt.solvers.loss_cut import loss_cut_bound
from optckpt.solvers.optimal import optimal
from optckpt.solvers.order_chain import chain_in_any_order, demands, order_chain_bound
from optckpt.solvers.preprocess import preprocess
from optckpt.solvers.registry import SolveOptions


def small(seed: int) -> TrainingGraph:
    rng = random.Random(seed)
    again = rng.random() < 0.3
    if seed % 3:
        n = rng.randint(3, 4)
        return chain(
            n,
            [rng.randint(1, 6) for _ in range(n)],
            [float(rng.randint(1, 9)) for _ in range(n)],
            repeatable_backward=again,
        )
    return random_graph(rng, rng.randint(3, 6), repeatable_backward=0.5 * again)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.6))
def test_no_order_beats_the_bound(seed: int, share: float) -> None:
    graph = small(seed)
    budget = budget_between(graph, share)
    bound = order_chain_bound(graph, budget) or 0.0
    for order in all_orders(graph):
        found = cheapest(graph.in_order(order), budget)
        if found is not None:
            assert bound <= found[0] / graph.seconds + 1e-9


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_the_given_order_makes_no_difference(seed: int) -> None:
    graph = residual_chain(4)
    budget = budget_between(graph, 0.2)
    bound = order_chain_bound(graph, budget)
    assert bound is not None
    assert bound > 0
    assert order_chain_bound(graph.in_order(random_order(graph, seed)), budget) == bound


def test_demands_follow_one_another_in_every_order() -> None:
    graph = residual_chain(5)
    problem = preprocess(graph, merge=False)
    path, ancestry = heaviest_path(problem), Ancestry.of(graph)
    found = demands(problem, ancestry, path)
    assert len(found) >= 10
    for (k, r), (below, behind) in pairwise(found):
        assert below < k
        assert ancestry.before[behind] >> r & 1
        assert path[k] in problem.reads[r]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.9))
def test_rooms_count_what_ancestors_wrote_and_descendants_read(seed: int, share: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(4, 14), repeatable=share, repeatable_backward=share)
    p, ancestry = preprocess(graph, merge=False), Ancestry.of(graph)
    path = heaviest_path(p)
    wanted = demands(p, ancestry, path)
    found = chain_in_any_order(graph, 1000)
    assert (found is None) == (len(wanted) < 2)
    if found is None:
        return
    for (k, c), room in zip(reversed(wanted), found.room[1:], strict=True):
        behind = ancestry.after[c] | 1 << p.n
        there = {t for t in p.reads[c] if t not in path[: k + 1]} | set(p.writes[c])
        there.update(
            t
            for t, o in enumerate(p.producer)
            if not p.repeatable[o]
            and ancestry.before[c] >> o & 1
            and any(behind >> r & 1 for r in p.base_readers[t])
        )
        gift = p.size[p.writes[c][0]] if p.takes[c] else 0
        assert room == 1000 - p.workspace[c] - sum(p.size[t] for t in there) + gift


def test_deep_chains_cost_more_than_one_cut_sees() -> None:
    graph = residual_chain(24)
    budget = round(0.1 * simulate(graph, Schedule.base(graph)).peak)
    bound = order_chain_bound(graph, budget)
    assert bound is not None
    assert bound > 1.4 * loss_cut_bound(graph, budget)


def test_chains_are_settled_for_every_order() -> None:
    graph = residual_chain(24)
    budget = round(0.12 * simulate(graph, Schedule.base(graph)).peak)
    for order in ("fixed", "free"):
        solution = optimal(graph, budget, SolveOptions(time_limit=20, order=order, gap=0.01))
        certificate = solution.certificate
        assert (certificate.status, certificate.valid_for) == ("optimal", "any order")
        assert loss_cut_bound(graph, budget) < certificate.bound - 0.01
