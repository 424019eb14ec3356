import json
import os
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optckpt.errors import GraphError
from optckpt.frontends import synthetic
from optckpt.graph import Buffer, Operation, TrainingGraph, write_text

FIRST = Operation("first", "Relu", 1.0, (), (0,))
SECOND = Operation("second", "Relu", 1.0, (0,), (1,), inplace=(0,))
BUFFERS = (Buffer("a", 8, "float32"), Buffer("b", 8, "float32"))
GRAPH = TrainingGraph((FIRST, SECOND), BUFFERS, (1,), resident=4, name="two")


def graph_with(first=FIRST, second=SECOND, buffers=BUFFERS, **more):
    return TrainingGraph((first, second), buffers, **more)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"buffers": (Buffer("a", -1), BUFFERS[1])}, ["'a'", "negative size"]),
        ({"resident": -1}, ["resident"]),
        ({"first": replace(FIRST, seconds=-1.0)}, ["'first'", "time"]),
        ({"first": replace(FIRST, seconds=float("nan"))}, ["'first'", "nan"]),
        ({"first": replace(FIRST, seconds=float("inf"))}, ["'first'", "inf"]),
        ({"first": replace(FIRST, workspace=-1)}, ["'first'", "workspace"]),
        ({"second": replace(SECOND, reads=(7,), inplace=())}, ["'second'", "unknown buffer 7"]),
        ({"second": replace(SECOND, writes=(-1,))}, ["'second'", "unknown buffer -1"]),
        ({"first": replace(FIRST, reads=(1,))}, ["'first'", "reads buffer 'b'", "before"]),
        ({"second": replace(SECOND, reads=(0, 1), inplace=())}, ["'second'", "'b'", "before"]),
        ({"second": replace(SECOND, reads=())}, ["'second'", "cannot reuse buffer 'a'"]),
        ({"first": replace(FIRST, after=(0,))}, ["'first'", "number 0"]),
        ({"first": replace(FIRST, after=(1,))}, ["'first'", "number 1"]),
        ({"first": replace(FIRST, repeat_before=(0,))}, ["'first'", "unknown operation 0"]),
        ({"first": replace(FIRST, repeat_before=(1, 2))}, ["'first'", "unknown operation 2"]),
        ({"second": replace(SECOND, repeat_before=(-1,))}, ["'second'", "unknown operation -1"]),
        ({"second": replace(SECOND, writes=(0,))}, ["'a'", "'first'", "'second'"]),
        ({"second": replace(SECOND, writes=())}, ["'b'", "written by no operation"]),
        ({"outputs": (2,)}, ["unknown output buffer 2"]),
    ],
)
def test_contradictions_are_refused_by_name(change, words):
    with pytest.raises(GraphError) as error:
        graph_with(**change)
    for word in words:
        assert word in str(error.value)


def test_derived_facts():
    assert GRAPH.producer == (0, 1)
    assert GRAPH.readers == ((1,), ())
    assert GRAPH.seconds == 2.0
    assert GRAPH.first_backward == 2
    assert graph_with(second=replace(SECOND, forward=False)).first_backward == 1
    twice = graph_with(second=replace(SECOND, reads=(0, 0)))
    assert twice.readers == ((1,), ())


def test_an_empty_graph_is_a_graph():
    empty = TrainingGraph((), ())
    assert empty.seconds == 0
    assert TrainingGraph.from_json(empty.to_json()) == empty


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.4]))
def test_json_round_trip(seed, limited):
    graph = synthetic.random_graph(seed, 1 + seed % 15, repeatable_backward=0.3)
    graph = synthetic.with_random_limits(graph, seed, limited)
    again = TrainingGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph
    assert again.fingerprint == graph.fingerprint
    assert again.producer == graph.producer


def test_save_and_load(tmp_path):
    path = tmp_path / "graph.json"
    GRAPH.save(path)
    assert TrainingGraph.load(path) == GRAPH
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [link, target]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "new")
    reader.join(timeout=60)
    assert read == ["new"]
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def damaged(**change):
    data = GRAPH.to_json()
    for key, value in change.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    return data


def damaged_operation(**change):
    data = GRAPH.to_json()
    for key, value in change.items():
        if value is ...:
            del data["operations"][1][key]
        else:
            data["operations"][1][key] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (damaged(format="other"), ["'other'", "optckpt.training-graph"]),
        (damaged(format=...), ["None"]),
        (damaged(version=2), ["version 2", "version 1"]),
        (damaged(version="1"), ["'1'"]),
        (damaged(operations=...), ["'operations'"]),
        (damaged(buffers=...), ["'buffers'"]),
        (damaged(buffers=[["a", 8]]), ["malformed"]),
        (damaged(buffers=[["a", "big", ""], ["b", 8, ""]]), ["malformed", "big"]),
        (damaged(outputs=5), ["malformed"]),
        (damaged(outputs=[9]), ["unknown output buffer 9"]),
        (damaged(operations=[{"name": "x"}]), ["'kind'"]),
        (damaged(operations=[3]), ["malformed", "entry 0 of 'operations'", "3"]),
        (damaged(resident="much"), ["malformed", "much"]),
        (damaged(resident=float("inf")), ["malformed", "'resident' of the graph", "inf"]),
        (damaged(resident=float("nan")), ["malformed", "nan"]),
        (damaged(resident=True), ["malformed", "True"]),
        (damaged(resident=10**400), ["add up to more than"]),
        (damaged(buffers=[["a", 1.5, ""], ["b", 8, ""]]), ["[name, bytes, dtype]", "1.5"]),
        (damaged(buffers=[["a", 2**53, ""], ["b", 8, ""]]), ["sizes add up to more than"]),
        (damaged(operations=None), ["'operations'", "a list", "None"]),
        *(
            (damaged_operation(**{key: value}), ["operation number 1", repr(key)])
            for key, value in [
                ("forward", "no"),
                ("repeatable", 1),
                ("reads", [0.5]),
                ("reads", "0"),
                ("writes", [True]),
                ("inplace", None),
                ("after", {}),
                ("workspace", 7.5),
                ("name", 7),
                ("seconds", "1"),
                ("seconds", float("inf")),
                ("seconds", float("nan")),
                ("seconds", 10**400),
                ("seconds", ...),
            ]
        ),
    ],
)
def test_damaged_json_is_refused(data, words):
    with pytest.raises(GraphError) as error:
        TrainingGraph.from_json(data)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3"])
def test_load_names_the_file(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(GraphError, match=r"bad\.json"):
        TrainingGraph.load(path)


def test_load_of_a_missing_file(tmp_path):
    with pytest.raises(GraphError, match=r"nothing\.json"):
        TrainingGraph.load(tmp_path / "nothing.json")


def test_fingerprint_ignores_names_and_costs():
    renamed = TrainingGraph(
        tuple(replace(op, name=f"x{i}") for i, op in enumerate(GRAPH.operations)),
        tuple(replace(b, name=f"y{i}") for i, b in enumerate(GRAPH.buffers)),
        GRAPH.outputs,
        resident=99,
        name="other",
    )
    assert renamed.fingerprint == GRAPH.fingerprint
    assert GRAPH.with_costs([3.0, 4.0], [1, 2]).fingerprint == GRAPH.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        graph_with(first=replace(FIRST, kind="Conv2D"), outputs=(1,)),
        graph_with(first=replace(FIRST, repeatable=False), outputs=(1,)),
        graph_with(second=replace(SECOND, forward=False), outputs=(1,)),
        graph_with(second=replace(SECOND, inplace=()), outputs=(1,)),
        graph_with(second=replace(SECOND, after=(0,)), outputs=(1,)),
        graph_with(first=replace(FIRST, repeat_before=(1,)), outputs=(1,)),
        graph_with(second=replace(SECOND, reads=(), inplace=()), outputs=(1,)),
        graph_with(buffers=(Buffer("a", 9, "float32"), BUFFERS[1]), outputs=(1,)),
        graph_with(buffers=(Buffer("a", 8, "float16"), BUFFERS[1]), outputs=(1,)),
        graph_with(outputs=(0, 1)),
        graph_with(),
    ],
)
def test_fingerprint_sees_structure_sizes_and_dtypes(other):
    assert other.fingerprint != GRAPH.fingerprint


def test_with_costs():
    dear = GRAPH.with_costs([3.0, 4.0])
    assert [op.seconds for op in dear.operations] == [3.0, 4.0]
    assert [op.workspace for op in dear.operations] == [0, 0]
    roomy = GRAPH.with_costs([3.0, 4.0], [5, 6])
    assert [op.workspace for op in roomy.operations] == [5, 6]
    assert roomy.buffers == GRAPH.buffers
    with pytest.raises(GraphError, match="1 times given for 2 operations"):
        GRAPH.with_costs([1.0])
    with pytest.raises(GraphError, match="'second'"):
        GRAPH.with_costs([1.0, -1.0])
    with pytest.raises(GraphError, match="add up to infinity"):
        GRAPH.with_costs([1e308, 1e308])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_only_forward_repeats(seed):
    graph = synthetic.random_graph(seed, 1 + seed % 15, repeatable_backward=0.5)
    narrow = graph.only_forward_repeats
    assert narrow.only_forward_repeats is narrow
    assert (narrow is graph) == (narrow == graph)
    for op, before in zip(narrow.operations, graph.operations, strict=True):
        assert op.repeatable == (before.repeatable and before.forward)
        assert replace(op, repeatable=before.repeatable) == before
    assert narrow == replace(graph, operations=narrow.operations)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_without_repeat_limits(seed):
    graph = synthetic.random_graph(seed, 2 + seed % 15, repeatable_backward=0.5)
    assert graph.without_repeat_limits is graph
    limited = synthetic.with_random_limits(graph, seed)
    assert limited.without_repeat_limits == graph
    assert (limited.fingerprint == graph.fingerprint) == (limited == graph)


def test_limits_that_were_never_stored_are_none():
    """Graphs stored before operations had such limits are read, with the same fingerprint."""
    assert "repeat_before" not in json.dumps(GRAPH.to_json())
    with pytest.raises(GraphError, match="repeat_before"):
        TrainingGraph.from_json(damaged_operation(repeat_before=["0"]))
