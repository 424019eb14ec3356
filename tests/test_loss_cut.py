"""Bounds for any order against exhaustive search over all orders, and what each is made of."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import all_orders, budget_between

from optckpt.frontends.synthetic import chain, random_graph, residual_chain, unet
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.solvers.ancestry import Ancestry, members
from optckpt.solvers.brute_force import cheapest
from optckpt.solvers.floor import any_order_floor, static_floor
from optckpt.solvers.loss_cut import find_loss, loss_cut_bound
from optckpt.solvers.order_cuts import find_cuts, order_cuts_bound


def diamond() -> TrainingGraph:
    """a -> b and c -> d; a's buffer is an output."""
    operations = (
        Operation("a", "A", 1.0, (), (0,)),
        Operation("b", "B", 1.0, (0,), (1,)),
        Operation("c", "C", 1.0, (0,), (2,)),
        Operation("d", "D", 1.0, (1, 2), (3,)),
    )
    return TrainingGraph(
        operations, tuple(Buffer(n, s) for n, s in zip("abcd", (4, 3, 2, 1), strict=True)), (0,)
    )


def test_ancestry_of_a_diamond() -> None:
    graph = diamond()
    ancestry = Ancestry.of(graph)
    assert [list(members(m)) for m in ancestry.before] == [[], [0], [0], [0, 1, 2], [0, 1, 2, 3]]
    assert [list(members(m)) for m in ancestry.after] == [[1, 2, 3], [3], [3], []]
    assert list(members(ancestry.bypassed(graph, 0))) == [1, 2, 3]
    assert list(members(ancestry.bypassed(graph, 1))) == []
    assert ancestry.spread(0b1010).tolist() == [0, 1, 0, 1]


def test_floor_counts_what_every_order_has_in_memory() -> None:
    graph = diamond()
    assert any_order_floor(graph).bytes == 4 + 3
    pinned = TrainingGraph(
        tuple(
            Operation(o.name, o.kind, o.seconds, o.reads, o.writes, repeatable=False)
            for o in graph.operations
        ),
        graph.buffers,
        graph.outputs,
        resident=10,
    )
    floor = any_order_floor(pinned)
    assert (floor.bytes, floor.operation) == (10 + 4 + 3 + 2 + 1, 3)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), again=st.sampled_from([0.0, 0.5, 1.0]))
def test_no_order_beats_the_bounds(seed: int, share: float, again: float) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 6), repeatable_backward=again, plain=seed % 3 == 0)
    budget = budget_between(graph, share)
    orders = [graph.in_order(order) for order in all_orders(graph)]
    found = [f[0] / graph.seconds for f in (cheapest(g, budget) for g in orders) if f is not None]
    best = min(found, default=float("inf"))
    assert loss_cut_bound(graph, budget) <= best + 1e-9
    for most in (1, 2, 4):
        assert order_cuts_bound(graph, budget, most=most) <= best + 1e-9
    floor = any_order_floor(graph).bytes
    assert floor <= min(static_floor(g).bytes for g in orders)
    assert budget >= floor or not found


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_chains_leave_no_choice_of_order(seed: int) -> None:
    rng = random.Random(seed)
    graph = chain(3, size=[rng.randint(1, 6) for _ in range(3)])
    budget = budget_between(graph, rng.random())
    truth = cheapest(graph, budget)
    bound = order_cuts_bound(graph, budget, most=8)
    assert bound <= (float("inf") if truth is None else truth[0] / graph.seconds + 1e-9)


def test_cuts_are_passed_one_after_the_other() -> None:
    graph = unet(3)
    cuts = find_cuts(graph, 5)
    assert len(cuts) == 5
    loss = find_loss(graph)
    assert loss is not None
    assert loss.operation in [c.operation for c in cuts]
    for first, second in pairwise(cuts):
        assert first.operation in second.before
        assert second.operation in first.after
        assert first.before < second.before


def test_more_cuts_raise_the_bound() -> None:
    graph = residual_chain(8)
    budget = budget_between(graph, 0.15)
    one, four = (order_cuts_bound(graph, budget, most=k) for k in (1, 4))
    assert abs(one - loss_cut_bound(graph, budget)) < 3e-4
    assert four >= one - 2e-4
    assert one > 0


def test_nothing_to_cut() -> None:
    one = TrainingGraph((Operation("a", "A", 1.0, (), (0,)),), (Buffer("a", 5),))
    assert find_cuts(one, 3) == []
    assert find_loss(one) is None
    assert loss_cut_bound(one, 5) == order_cuts_bound(one, 5) == 0.0
