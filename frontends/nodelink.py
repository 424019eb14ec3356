"""Training graphs from networkx node-link JSON, the format of Checkmate's and MOCCASIN's graphs.

A node is one operation that writes one buffer; an edge says that its target reads its source.
What the fields are called:

- time: `duration` (MOCCASIN) or `cost_cpu` (Checkmate), in any unit, taken as seconds;
- bytes of the output: `out_cost` or `cost_ram`;
- bytes of parameters: `param_cost` or `cost_param` on nodes and `cost_ram_parameters` on the
  graph; their sum is resident, as in Checkmate;
- `backward`: whether the node belongs to the backward pass (false if missing);
- edges under `links` or `edges`, with `source` and `target`, or MOCCASIN's "0" and "1";
- node ids: `id`, or MOCCASIN's `name`.

Every node may be executed again, and no buffer is an output: one that no node reads is in memory
only while it is computed.
"""

from __future__ import annotations

import gzip
import json
import math
import reprlib
import sys
import zlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from optckpt.errors import GraphError
from optckpt.graph import FORMAT, Buffer, Operation, TrainingGraph

_TIME = ("duration", "cost_cpu")
_BYTES = ("out_cost", "cost_ram")
_PARAMETERS = ("param_cost", "cost_param")
_GZIP_MAGIC = b"\x1f\x8b"


def load(path: str | Path) -> TrainingGraph:
    """Read a node-link JSON file, gzipped or not. Raises GraphError naming the file."""
    return _named(path, from_node_link, _read(path))


def load_any(path: str | Path) -> TrainingGraph:
    """Read a graph file of either kind, gzipped or not: ours (`TrainingGraph.save`) or node-link.

    Raises:
        GraphError: names the file, and the node, edge or field at fault.
    """
    data = _read(path)
    if "format" in data or not ({"nodes", "links", "edges"} & data.keys()):
        if "format" not in data:
            raise GraphError(
                f"{path} holds no graph: it has neither a format field ({FORMAT!r}) nor the "
                "nodes and links of a node-link file"
            )
        return _named(path, TrainingGraph.from_json, data)
    return _named(path, from_node_link, data)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        raw = Path(path).read_bytes()
        if raw.startswith(_GZIP_MAGIC):
            raw = gzip.decompress(raw)
        data = json.loads(raw)
    except OSError as e:
        raise GraphError(f"cannot read the graph {path}: {e.strerror or e}") from None
    except RecursionError:
        raise GraphError(f"cannot read the graph {path}: nested too deeply") from None
    except (EOFError, ValueError, zlib.error) as e:
        raise GraphError(f"cannot read the graph {path}: {e}") from None
    if not isinstance(data, dict):
        raise GraphError(f"{path} holds no graph: the top level is not an object")
    return data


def _named(path: str | Path, read: Any, data: dict[str, Any]) -> TrainingGraph:
    try:
        graph: TrainingGraph = read(data)
    except GraphError as e:
        raise GraphError(f"{path}: {e}") from None
    return graph


def from_node_link(data: Mapping[str, Any]) -> TrainingGraph:
    """The training graph of a node-link mapping.

    The base order is `order` of the graph's attributes if there is one; else the ascending node
    ids, or the order in the file, whichever first is topological; else a topological sort.

    Raises:
        GraphError: names the node or edge: a cycle, an unknown or a duplicate node, a missing
            attribute, a negative or non-numeric value, an order that is not valid.
    """
    if data.get("directed") is False:
        raise GraphError("the node-link graph is undirected; edges must lead from writer to reader")
    dag: Any = nx.DiGraph()
    for node, attributes in _nodes(data):
        if node in dag:
            raise GraphError(f"node {_show(node)} is listed twice")
        dag.add_node(node)
        # Not as keywords, some of which (`node_for_adding`) are networkx' own.
        dag.nodes[node].update(attributes)
    for source, target in _edges(data):
        for node in (source, target):
            if node not in dag:
                raise GraphError(
                    f"edge {_show(source)} -> {_show(target)} names the unknown node {_show(node)}"
                )
        dag.add_edge(source, target)
    if not dag:
        raise GraphError("the node-link graph has no nodes")
    _refuse_cycle(dag)
    attributes = _graph_attributes(data)
    order = _base_order(dag, attributes.get("order"))
    index = {node: i for i, node in enumerate(order)}
    resident = _number(attributes, ("cost_ram_parameters",), "the graph", default=0)
    operations = []
    buffers = []
    for i, node in enumerate(order):
        own = dag.nodes[node]
        where = f"node {_show(node)}"
        name = str(own.get("name", node))
        operations.append(
            Operation(
                name=name,
                kind=str(own.get("op", "node")),
                seconds=_number(own, _TIME, where),
                reads=tuple(sorted(index[p] for p in dag.predecessors(node))),
                writes=(i,),
                forward=not _flag(own, "backward", where),
            )
        )
        buffers.append(Buffer(name, math.ceil(_number(own, _BYTES, where))))
        resident += _number(own, _PARAMETERS, where, default=0)
    return TrainingGraph(
        tuple(operations),
        tuple(buffers),
        resident=math.ceil(resident),
        name=str(attributes.get("name", "")),
    )


def _show(value: Any) -> str:
    """`repr`, but short enough for a message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def _entries(data: Mapping[str, Any], *keys: str) -> list[Mapping[str, Any]]:
    for key in keys:
        if key in data:
            rows = data[key]
            if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
                raise GraphError(f"{key!r} of the node-link graph is no list of objects")
            return rows
    raise GraphError(f"the node-link graph lacks {' and '.join(repr(k) for k in keys)}")


def _identifier(value: Any, where: str) -> Hashable:
    if isinstance(value, list):
        return tuple(_identifier(v, where) for v in value)
    if value is None or isinstance(value, dict | bool):
        raise GraphError(f"{where} is no node id: {_show(value)}")
    node: Hashable = value
    return node


def _nodes(data: Mapping[str, Any]) -> list[tuple[Hashable, dict[str, Any]]]:
    found = []
    for i, row in enumerate(_entries(data, "nodes")):
        key = "id" if "id" in row else "name"
        if key not in row:
            raise GraphError(f"node number {i} has neither 'id' nor 'name'")
        node = _identifier(row[key], f"{key!r} of node number {i}")
        found.append((node, {str(k): v for k, v in row.items() if k != "id"}))
    return found


def _edges(data: Mapping[str, Any]) -> list[tuple[Hashable, Hashable]]:
    found = []
    for i, row in enumerate(_entries(data, "links", "edges")):
        first, second = ("source", "target") if "source" in row else ("0", "1")
        if first not in row or second not in row:
            raise GraphError(f"edge number {i} has neither 'source' and 'target' nor '0' and '1'")
        found.append(
            (
                _identifier(row[first], f"{first!r} of edge number {i}"),
                _identifier(row[second], f"{second!r} of edge number {i}"),
            )
        )
    return found


def _graph_attributes(data: Mapping[str, Any]) -> dict[str, Any]:
    attributes = data.get("graph", {})
    try:
        return dict(attributes)
    except (TypeError, ValueError):
        raise GraphError("'graph' of the node-link graph is no object") from None


def _number(
    attributes: Mapping[str, Any],
    keys: Sequence[str],
    where: str,
    default: float | None = None,
) -> float:
    key = next((k for k in keys if k in attributes), None)
    if key is None:
        if default is not None:
            return default
        raise GraphError(f"{where} lacks {' and '.join(repr(k) for k in keys)}")
    value = attributes[key]
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not 0 <= value <= sys.float_info.max:  # NaN is not within
        raise GraphError(
            f"{where}: {key!r} must be a number, finite and not negative; it is {_show(value)}"
        )
    number: float = value
    return number


def _flag(attributes: Mapping[str, Any], key: str, where: str) -> bool:
    value = attributes.get(key, False)
    if value not in (True, False):
        raise GraphError(f"{where}: {key!r} must be true or false; it is {_show(value)}")
    return bool(value)


def _refuse_cycle(dag: Any) -> None:
    try:
        cycle = [source for source, _ in nx.find_cycle(dag)]
    except nx.NetworkXNoCycle:
        return
    shown = [_show(node) for node in [*cycle, cycle[0]]]
    if len(shown) > 10:
        shown[6:-3] = [f"... ({len(cycle)} nodes) ..."]
    raise GraphError(f"the node-link graph has a cycle: {' -> '.join(shown)}")


def _base_order(dag: Any, given: Any) -> list[Hashable]:
    listed = list(dag)
    if given is not None:
        if not isinstance(given, list):
            raise GraphError(f"'order' of the graph is no list of nodes: {_show(given)}")
        order = [_identifier(node, "an entry of 'order'") for node in given]
        seen: set[Hashable] = set()
        for node in order:
            if node not in dag:
                raise GraphError(f"the graph's 'order' names the unknown node {_show(node)}")
            if node in seen:
                raise GraphError(f"the graph's 'order' names node {_show(node)} twice")
            seen.add(node)
        for node in listed:
            if node not in seen:
                raise GraphError(f"the graph's 'order' lacks node {_show(node)}")
        wrong = _violated(dag, order)
        if wrong:
            raise GraphError(
                f"the graph's 'order' is not valid: node {_show(wrong[1])} reads "
                f"{_show(wrong[0])}, which comes later"
            )
        return order
    if all(isinstance(node, int | float) for node in listed):
        by_id = sorted(listed)
        if not _violated(dag, by_id):
            return by_id
    if not _violated(dag, listed):
        return listed
    position = {node: i for i, node in enumerate(listed)}
    return list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))


def _violated(dag: Any, order: Sequence[Hashable]) -> tuple[Hashable, Hashable] | None:
    position = {node: i for i, node in enumerate(order)}
    return next(((a, b) for a, b in dag.edges if position[a] > position[b]), None)
