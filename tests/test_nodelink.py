import copy
import gzip
import json

import networkx as nx
import pytest

from optckpt.errors import GraphError
from optckpt.frontends import nodelink, synthetic
from optckpt.schedule import Schedule
from optckpt.simulate import simulate
from optckpt.solvers.registry import solve

CHECKMATE = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "small (train)"},
    "nodes": [
        {"name": "conv", "backward": False, "cost_cpu": 10, "cost_ram": 100, "id": 0},
        {"name": "relu", "backward": False, "cost_cpu": 1.5, "cost_ram": 100, "id": 1},
        {"name": "loss", "backward": False, "cost_cpu": 0, "cost_ram": 4, "id": 2},
        {"name": "relu_backward", "backward": True, "cost_cpu": 2, "cost_ram": 50, "id": 3},
        {"name": "conv_backward", "backward": True, "cost_cpu": 20, "cost_ram": 60, "id": 4},
    ],
    "links": [
        {"source": 0, "target": 1},
        {"source": 1, "target": 2},
        {"source": 1, "target": 3},
        {"source": 2, "target": 3},
        {"source": 0, "target": 4},
        {"source": 3, "target": 4},
    ],
}
MOCCASIN = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "layers", "source_node": 0, "target_node": 1, "order": [0, 3, 2, 1]},
    "nodes": [
        {"out_cost": 70, "param_cost": 0, "duration": 0, "name": 0},
        {"out_cost": 40, "param_cost": 0, "duration": 0, "name": 1},
        {"out_cost": 20, "param_cost": 5, "duration": 514, "name": 2},
        {"out_cost": 30, "param_cost": 6, "duration": 100, "name": 3},
    ],
    "links": [
        {"0": 0, "1": 2},
        {"0": 0, "1": 3},
        {"0": 2, "1": 1},
        {"0": 3, "1": 1},
    ],
}


def changed(data, change):
    data = copy.deepcopy(data)
    change(data)
    return data


def test_checkmate():
    graph = nodelink.from_node_link(CHECKMATE)
    assert graph.name == "small (train)"
    assert [op.name for op in graph.operations] == [n["name"] for n in CHECKMATE["nodes"]]
    assert [op.seconds for op in graph.operations] == [10, 1.5, 0, 2, 20]
    assert [b.size for b in graph.buffers] == [100, 100, 4, 50, 60]
    assert [op.reads for op in graph.operations] == [(), (0,), (1,), (1, 2), (0, 3)]
    assert [op.forward for op in graph.operations] == [True, True, True, False, False]
    assert all(op.repeatable for op in graph.operations)
    assert (graph.outputs, graph.resident) == ((), 0)


def test_moccasin():
    graph = nodelink.from_node_link(MOCCASIN)
    assert [op.name for op in graph.operations] == ["0", "3", "2", "1"]
    assert [op.seconds for op in graph.operations] == [0, 100, 514, 0]
    assert [op.reads for op in graph.operations] == [(), (0,), (0,), (1, 2)]
    assert graph.resident == 11
    assert all(op.forward and op.repeatable for op in graph.operations)


def test_peak_counts_outputs_until_their_last_use():
    graph = nodelink.from_node_link(CHECKMATE)
    profile = simulate(graph, Schedule.base(graph)).profile
    assert profile == (100, 200, 204, 254, 210)
    graph = nodelink.from_node_link(MOCCASIN)
    assert simulate(graph, Schedule.base(graph)).profile == (81, 111, 131, 101)


def test_parameters_are_resident():
    data = changed(CHECKMATE, lambda d: d["graph"].update(cost_ram_parameters=1000))
    data["nodes"][0]["cost_param"] = 24.5
    assert nodelink.from_node_link(data).resident == 1025


def test_edges_under_either_key():
    data = changed(MOCCASIN, lambda d: d.update(edges=d.pop("links")))
    assert nodelink.from_node_link(data) == nodelink.from_node_link(MOCCASIN)


def test_what_networkx_writes():
    dag = nx.DiGraph(name="written")
    dag.add_node("a", duration=1, out_cost=2)
    dag.add_node("b", duration=3, out_cost=4.2)
    dag.add_edge("a", "b")
    for key in ("edges", "links"):
        graph = nodelink.from_node_link(json.loads(json.dumps(nx.node_link_data(dag, edges=key))))
        assert [op.name for op in graph.operations] == ["a", "b"]
        assert [b.size for b in graph.buffers] == [2, 5]
    multi = nx.MultiDiGraph(dag)
    multi.add_edge("a", "b")
    graph = nodelink.from_node_link(nx.node_link_data(multi, edges="links"))
    assert graph.operations[1].reads == (0,)


@pytest.mark.parametrize("key", ["node_for_adding", "self", "attr", "u_of_edge", "v_of_edge", ""])
def test_attributes_may_have_any_name(key):
    """Also that of a parameter of networkx' functions."""
    data = changed(CHECKMATE, lambda d: d["nodes"][1].update({key: 3}))
    for edge in data["links"]:
        edge[key] = 3
    assert nodelink.from_node_link(data) == nodelink.from_node_link(CHECKMATE)


def reversed_nodes(data):
    data["nodes"].reverse()


def test_base_order_by_ids_then_file_then_sorted():
    by_id = nodelink.from_node_link(changed(CHECKMATE, reversed_nodes))
    assert by_id == nodelink.from_node_link(CHECKMATE)

    def as_strings(data):
        for node in data["nodes"]:
            node["id"] = f"n{9 - node['id']}"
        for edge in data["links"]:
            edge.update(source=f"n{9 - edge['source']}", target=f"n{9 - edge['target']}")

    in_file_order = nodelink.from_node_link(changed(CHECKMATE, as_strings))
    assert in_file_order.fingerprint == by_id.fingerprint
    neither = changed(changed(CHECKMATE, as_strings), reversed_nodes)
    assert nodelink.from_node_link(neither).fingerprint == by_id.fingerprint


def set_node(index, **values):
    def change(data):
        for key, value in values.items():
            if value is ...:
                del data["nodes"][index][key]
            else:
                data["nodes"][index][key] = value

    return change


def set_graph(**values):
    return lambda data: data["graph"].update(values)


def add_edge(**edge):
    return lambda data: data["links"].append(edge)


@pytest.mark.parametrize(
    ("data", "change", "words"),
    [
        (CHECKMATE, set_node(3, cost_cpu=...), ["node 3", "'duration' and 'cost_cpu'"]),
        (CHECKMATE, set_node(3, cost_ram=...), ["node 3", "'out_cost' and 'cost_ram'"]),
        (CHECKMATE, set_node(1, cost_ram=-1), ["node 1", "'cost_ram'", "-1"]),
        (CHECKMATE, set_node(1, cost_cpu=float("nan")), ["node 1", "'cost_cpu'", "nan"]),
        (CHECKMATE, set_node(1, cost_cpu=float("inf")), ["node 1", "'cost_cpu'", "inf"]),
        (CHECKMATE, set_node(1, cost_cpu=10**400), ["node 1", "'cost_cpu'", "finite"]),
        (CHECKMATE, set_node(1, cost_ram=10**400), ["node 1", "'cost_ram'", "finite"]),
        (CHECKMATE, set_node(1, cost_ram=2**53), ["sizes add up to more than"]),
        (CHECKMATE, set_graph(cost_ram_parameters=1e300), ["sizes add up to more than"]),
        (CHECKMATE, set_graph(order=10**400), ["'order'", "no list"]),
        (CHECKMATE, add_edge(source=10**400, target=1), ["unknown node 1000"]),
        (CHECKMATE, set_node(1, cost_cpu="7"), ["node 1", "'cost_cpu'", "'7'"]),
        (CHECKMATE, set_node(1, cost_cpu=True), ["node 1", "True"]),
        (CHECKMATE, set_node(1, cost_cpu=None), ["node 1", "None"]),
        (CHECKMATE, set_node(1, backward="no"), ["node 1", "'backward'", "'no'"]),
        (CHECKMATE, set_node(1, id=0), ["node 0", "twice"]),
        (CHECKMATE, set_node(1, id=None), ["node number 1", "None"]),
        (CHECKMATE, set_node(1, id=..., name=...), ["node number 1", "'id'", "'name'"]),
        (MOCCASIN, set_node(2, param_cost=-5), ["node 2", "'param_cost'", "-5"]),
        (CHECKMATE, add_edge(source=0, target=77), ["0 -> 77", "unknown node 77"]),
        (CHECKMATE, add_edge(source="x", target=1), ["'x' -> 1", "unknown node 'x'"]),
        (CHECKMATE, add_edge(source=0), ["edge number 6", "'source' and 'target'"]),
        (CHECKMATE, add_edge(**{"from": 0, "to": 1}), ["edge number 6"]),
        (CHECKMATE, add_edge(source={}, target=1), ["'source' of edge number 6"]),
        (CHECKMATE, add_edge(source=4, target=1), ["cycle", "4", "1"]),
        (CHECKMATE, add_edge(source=2, target=2), ["cycle", "2 -> 2"]),
        (MOCCASIN, set_graph(order=[0, 2, 1, 3]), ["'order'", "node 1 reads 3"]),
        (MOCCASIN, set_graph(order=[0, 2, 3]), ["'order'", "lacks node 1"]),
        (MOCCASIN, set_graph(order=[0, 2, 3, 1, 2]), ["'order'", "node 2 twice"]),
        (MOCCASIN, set_graph(order=[0, 2, 3, 8]), ["'order'", "unknown node 8"]),
        (MOCCASIN, set_graph(order="0 2 3 1"), ["'order'", "no list"]),
        (MOCCASIN, set_graph(cost_ram_parameters="big"), ["the graph", "cost_ram_parameters"]),
        (CHECKMATE, lambda d: d.update(directed=False), ["undirected"]),
        (CHECKMATE, lambda d: d.update(nodes=[], links=[]), ["no nodes"]),
        (CHECKMATE, lambda d: d.update(nodes={}), ["'nodes'", "list"]),
        (CHECKMATE, lambda d: d.update(links=[1]), ["'links'", "list"]),
        (CHECKMATE, lambda d: d.update(graph=3), ["'graph'"]),
        (CHECKMATE, lambda d: d.pop("nodes"), ["lacks 'nodes'"]),
        (CHECKMATE, lambda d: d.pop("links"), ["lacks 'links' and 'edges'"]),
    ],
)
def test_mistakes_are_named(tmp_path, data, change, words):
    data = changed(data, change)
    with pytest.raises(GraphError) as error:
        nodelink.from_node_link(data)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 200
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(GraphError, match=r"wrong\.json"):
        nodelink.load(path)


def test_long_cycles_are_shown_in_part():
    nodes = [{"id": i, "cost_cpu": 1, "cost_ram": 1} for i in range(500)]
    links = [{"source": i, "target": (i + 1) % 500} for i in range(500)]
    with pytest.raises(
        GraphError, match=r"cycle: 0 -> 1 -> .*\(500 nodes\).* -> 499 -> 0$"
    ) as error:
        nodelink.from_node_link({"nodes": nodes, "links": links})
    assert len(str(error.value)) < 200


def written(path, text, packed):
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_both_kinds(tmp_path, packed):
    ours = synthetic.unet(1)
    path = written(tmp_path / "ours.json", json.dumps(ours.to_json()), packed)
    assert nodelink.load_any(path) == ours
    path = written(tmp_path / "theirs.json", json.dumps(MOCCASIN), packed)
    theirs = nodelink.from_node_link(MOCCASIN)
    assert nodelink.load_any(path) == nodelink.load(path) == nodelink.load_any(str(path)) == theirs


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"{}", b'{"a": 1}', b'{"format": "x"}', b"\xff\xfe", b"\x1f\x8bno",
     gzip.compress(b"[1]", mtime=0), gzip.compress(b'{"nodes": []}', mtime=0)[:-4],
     b"\x1f\x8b\x08" + bytes(40), b'{"nodes": ' + b"9" * 5000 + b"}", b"[" * 100_000],
)  # fmt: skip
def test_files_that_hold_no_graph(tmp_path, content):
    path = tmp_path / "none.json"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"none\.json"):
        nodelink.load_any(path)


def test_missing_files(tmp_path):
    with pytest.raises(GraphError, match=r"absent\.json"):
        nodelink.load_any(tmp_path / "absent.json")
    with pytest.raises(GraphError, match=r"cannot read the graph .*: Is a directory$"):
        nodelink.load_any(tmp_path)


def test_strategies_run_on_it():
    graph = nodelink.from_node_link(CHECKMATE)
    assert solve(graph, 254, "chen_greedy").certificate.status == "feasible"
    assert solve(nodelink.from_node_link(MOCCASIN), None, "sqrt_n").certificate.cost == 0
