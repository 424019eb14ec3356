from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.solvers.segments import (
    articulation_points,
    crossing_buffers,
    even_cuts,
    greedy_cuts,
    held_bytes,
    kept_at,
    main_operations,
)


def found_names(graph):
    return [graph.buffers[p.buffer].name for p in articulation_points(graph)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(0, 10**9))
def test_articulation_points_are_those_that_cut_all_paths(seed):
    graph = synthetic.random_graph(seed, 3 + seed % 14, repeatable=1.0)
    main = main_operations(graph)
    dag = nx.DiGraph()
    dag.add_nodes_from(main)
    for i in main:
        for b in graph.operations[i].reads:
            if graph.producer[b] in dag:
                # Operations and buffers are both nodes: an operation may write several.
                dag.add_edge(graph.producer[b], ("buffer", b))
                dag.add_edge(("buffer", b), i)
    if len(main) < 2:
        assert articulation_points(graph) == []
        return
    source, loss = main[0], main[-1]
    expected = set()
    for node in list(dag):
        if isinstance(node, tuple):
            rest = dag.copy()
            rest.remove_node(node)
            if not nx.has_path(rest, source, loss):
                expected.add(node[1])
    assert {p.buffer for p in articulation_points(graph)} == expected


def test_on_a_chain_every_layer_is_one():
    graph = synthetic.chain(7)
    assert [p.buffer for p in articulation_points(graph)] == list(range(7))


def test_on_a_residual_network_the_blocks_outputs_are():
    graph = synthetic.resnet(3, 4)
    sums = [op.name for op in graph.operations if op.kind == "AddV2" and op.forward]
    assert len(sums) == 12
    found = found_names(graph)
    assert set(sums) <= set(found)
    inner = [op.name for op in graph.operations if op.forward and op.kind == "FusedBatchNormV3"]
    # Inside a block the shortcut goes past, but for the first block of the later stages.
    assert len(set(inner) & set(found)) == 2


def test_on_a_double_chain_only_the_ends_are():
    assert found_names(synthetic.double_chain(8)) == ["tanh_0", "addv2_17"]


def test_inside_a_u_net_none_is():
    graph = synthetic.unet(3)
    points = [p.operation for p in articulation_points(graph)]
    first_pool = next(i for i, op in enumerate(graph.operations) if op.kind == "MaxPool")
    last_join = max(i for i, op in enumerate(graph.operations) if op.kind == "ConcatV2")
    assert points
    assert not [p for p in points if first_pool <= p < last_join]


def op(name, reads, write, **more):
    return Operation(name, "x", 1.0, tuple(reads), (write,), **more)


def test_side_inputs_and_side_outputs_do_not_matter():
    ops = (
        op("mask", [], 0),
        op("input", [], 7),
        op("a", [7], 1),
        op("metric", [1], 2),
        op("b", [0, 1], 3),
        op("c", [0, 3], 4),
        op("loss", [4], 5),
        op("gradient", [0, 1, 3, 4], 6, forward=False),
    )
    buffers = tuple(Buffer(str(b), 1) for b in range(8))
    graph = TrainingGraph(ops, buffers, (5, 6))
    assert [ops[i].name for i in main_operations(graph)] == ["input", "a", "b", "c", "loss"]
    assert found_names(graph) == ["7", "1", "3", "4"]
    # The mask is read on both sides of a cut, so it must be kept there.
    assert crossing_buffers(graph, [4]) == {0, 3}


def test_paths_through_kept_buffers_are_cut_already():
    ops = (
        op("a", [], 0),
        op("dropout", [0], 1, repeatable=False),
        op("b", [0], 2),
        op("c", [1, 2], 3),
        op("d", [3], 4),
    )
    graph = TrainingGraph(ops, tuple(Buffer(o.name, 1) for o in ops))
    assert found_names(graph) == ["a", "b", "c"]


@pytest.mark.parametrize("segments", [1, 2, 3, 7, 30])
def test_even_cuts(segments):
    graph = synthetic.chain(20, size=100)
    cuts = even_cuts(graph, segments)
    assert cuts == sorted(set(cuts))
    assert len(cuts) <= segments - 1
    if segments <= 7:
        assert len(cuts) == segments - 1
        ends = [-1, *cuts, 20]
        widths = [b - a for a, b in pairwise(ends)]
        assert max(widths) <= 20 / segments * 1.7 + 1


def test_even_cuts_avoid_crossing_bytes():
    sizes = [100, 100, 100, 100, 1, 100, 100, 100, 100, 100]
    assert even_cuts(synthetic.chain(10, sizes), 2) == [4]


def test_greedy_cuts():
    graph = synthetic.chain(10, size=100)
    everywhere = range(10)
    assert greedy_cuts(graph, 250, everywhere) == [2, 5, 8]
    assert greedy_cuts(graph, 250, [3, 4, 9]) == [3, 9]
    assert greedy_cuts(graph, 10_000, everywhere) == []
    assert greedy_cuts(graph, 0, everywhere) == list(range(10))


def test_kept_at_keeps_the_last_segment():
    graph = synthetic.chain(10)
    kept = kept_at(graph, [3, 6])
    forward = {b for b in kept if graph.operations[graph.producer[b]].forward}
    assert forward == {3, 6, 7, 8, 9, 10}
    assert kept_at(graph, []) == set(range(len(graph.buffers)))


def test_held_bytes():
    graph = synthetic.chain(3, size=[5, 6, 7])
    assert held_bytes(graph)[:4] == [5, 6, 7, 0]
    assert not any(held_bytes(graph)[4:])


def test_a_graph_without_forward_operations():
    graph = TrainingGraph((op("a", [], 0, forward=False),), (Buffer("a", 1),))
    assert main_operations(graph) == []
    assert articulation_points(graph) == []
    assert even_cuts(graph, 3) == []
