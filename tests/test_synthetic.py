import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import GraphError
from optckpt.frontends import synthetic
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

NETWORKS = [
    synthetic.chain(5),
    synthetic.chain(5, weights=64),
    synthetic.double_chain(4),
    synthetic.residual_chain(3),
    synthetic.resnet(3, 2),
    synthetic.unet(3),
]


@pytest.mark.parametrize("graph", NETWORKS, ids=lambda g: g.name)
def test_networks_are_training_steps(graph):
    backward = graph.first_backward
    assert 0 < backward < len(graph.operations)
    assert all(op.forward for op in graph.operations[:backward])
    assert not any(op.forward or op.repeatable for op in graph.operations[backward:])
    assert all(op.repeatable for op in graph.operations[:backward])
    # Nothing is computed in vain in the backward pass.
    for b, readers in enumerate(graph.readers):
        if graph.producer[b] >= backward:
            assert readers or b in graph.outputs
    loss = graph.outputs[0]
    assert graph.producer[loss] == backward - 1
    assert len(graph.outputs) > 1
    result = simulate(graph, Schedule.base(graph))
    # Activations pile up: the peak is where the backward pass begins, give or take an eighth.
    assert abs(result.peak_step - backward) <= len(graph.operations) / 8
    assert len({op.name for op in graph.operations}) == len(graph.operations)
    assert len({b.name for b in graph.buffers}) == len(graph.buffers)


def test_chain_costs():
    graph = synthetic.chain(3, size=[1, 2, 3], seconds=[0.5, 1.0, 2.0], resident=9)
    assert [b.size for b in graph.buffers[:3]] == [1, 2, 3]
    assert [op.seconds for op in graph.operations[:3]] == [0.5, 1.0, 2.0]
    assert [op.seconds for op in graph.operations[-3:]] == [2.0, 1.0, 0.5]
    assert len(graph.operations) == 8
    assert graph.resident == 9
    assert len(synthetic.chain(3, weights=8).operations) == 10


def test_backward_may_be_repeatable():
    graph = synthetic.unet(1, repeatable_backward=True)
    assert all(op.repeatable for op in graph.operations)


def test_residual_networks_have_shared_gradients_and_in_place_work():
    graph = synthetic.resnet(2, 2)
    kinds = [op.kind for op in graph.operations]
    assert kinds.count("AddV2") == 4
    assert kinds.count("Conv2D") == 1 + 4 * 2 + 1
    assert "AddN" in kinds
    assert "AddV2Grad" not in kinds
    assert any(op.inplace for op in graph.operations if op.forward)
    assert any(len(op.writes) == 2 for op in graph.operations)


def test_u_nets_have_skips():
    graph = synthetic.unet(3)
    joins = [op for op in graph.operations if op.kind == "ConcatV2"]
    assert len(joins) == 3
    assert all(len(op.reads) == 2 for op in joins)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [3, 4, 10, 100, 300])
def test_random_layered(n, seed):
    graph = synthetic.random_layered(n, seed)
    assert graph == synthetic.random_layered(n, seed)
    assert len(graph.operations) == n
    assert all(op.repeatable and op.forward and len(op.writes) == 1 for op in graph.operations)
    assert graph.outputs == ()
    source, sink = graph.operations[0], graph.operations[-1]
    assert (source.name, sink.name) == ("0", str(n - 1))
    assert source.seconds == sink.seconds == 0
    assert all(op.reads for op in graph.operations[1:])
    assert all(graph.readers[b] for b in range(n) if graph.producer[b] != n - 1)
    assert simulate(graph, Schedule.base(graph)).peak > 0


def test_random_layered_follows_its_parameters():
    few = synthetic.random_layered(200, edge_density=0.05, skip_density=0.0)
    many = synthetic.random_layered(200, edge_density=0.6, skip_density=0.3)
    edges = [sum(len(op.reads) for op in g.operations) for g in (few, many)]
    assert edges[0] * 2 < edges[1]
    assert synthetic.random_layered(50, 1) != synthetic.random_layered(50, 2)


def test_random_graphs_have_every_feature():
    graphs = [synthetic.random_graph(seed, 12, repeatable_backward=0.3) for seed in range(100)]
    ops = [op for g in graphs for op in g.operations]
    for feature in (
        lambda op: op.workspace,
        lambda op: op.inplace,
        lambda op: op.after,
        lambda op: len(op.writes) == 2,
        lambda op: not op.writes,
        lambda op: not op.reads,
        lambda op: op.forward and not op.repeatable,
        lambda op: not op.forward and op.repeatable,
        lambda op: not op.forward and not op.repeatable,
        lambda op: op.seconds == 0,
    ):
        assert any(feature(op) for op in ops)
        assert not all(feature(op) for op in ops)
    assert any(b.size == 0 for g in graphs for b in g.buffers)
    assert {len(g.outputs) for g in graphs} == {1, 2, 3}
    assert any(g.resident for g in graphs)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 10**9), st.integers(1, 25))
def test_random_graphs_are_reproducible_and_valid(seed, n):
    graph = synthetic.random_graph(seed, n)
    assert graph == synthetic.random_graph(seed, n)
    assert len(graph.operations) == n
    assert graph.seconds > 0
    simulate(graph, Schedule.base(graph))


def test_plain_random_graphs():
    for seed in range(50):
        graph = synthetic.random_graph(seed, 10, plain=True)
        for op in graph.operations:
            assert (op.workspace, op.inplace, op.after, len(op.writes)) == (0, (), (), 1)
            assert op.seconds > 0
        assert all(b.size > 0 for b in graph.buffers)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: synthetic.chain(0), "n must be at least 1"),
        (lambda: synthetic.chain(3, size=[1, 2]), "2 sizes given for 3 layers"),
        (lambda: synthetic.chain(3, seconds=[1.0]), "1 times given for 3 layers"),
        (lambda: synthetic.unet(0), "depth"),
        (lambda: synthetic.resnet(1, 0), "blocks"),
        (lambda: synthetic.double_chain(-1), "n must"),
        (lambda: synthetic.random_layered(2), "at least 3"),
        (lambda: synthetic.random_graph(0, 0), "n_ops"),
    ],
)
def test_mistakes(make, words):
    with pytest.raises(GraphError, match=words):
        make()
