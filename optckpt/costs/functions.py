"""Operations that call functions: loops, branches, calls. What they run and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

from optckpt.costs.constants import Folder

LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


@dataclass(frozen=True)
class Calls:
    """The function bodies that an operation runs."""

    bodies: tuple[Sequence[Any], ...]
    """The `tf.Operation`s of each body, in creation order."""
    times: int
    """How often each body runs."""
    exclusive: bool
    """Whether one body runs (a branch) rather than all of them."""


def called(op: Any, folder: Folder) -> Calls | None:
    """What `op` calls; None if it calls nothing. Bodies that cannot be found are left out.

    A loop runs as often as its constant bound on iterations says (the gradient of a loop as
    often as that loop); without a bound, one iteration is assumed.
    """
    names = _function_names(op)
    if not names:
        return None
    graphs = [g for g in (_graph(op, name) for name in names) if g is not None]
    return Calls(
        bodies=tuple(g.get_operations() for g in graphs),
        times=_trips(op, folder) if op.type in LOOPS else 1,
        exclusive=op.type in BRANCHES,
    )


def _function_names(op: Any) -> list[str]:
    names = []
    for key, attr in op.node_def.attr.items():
        if key.startswith("_"):
            continue
        if attr.HasField("func"):
            names.append(attr.func.name)
        names += [f.name for f in attr.list.func]
    return names


def _graph(op: Any, name: str) -> Any:
    graph = op.graph
    while graph is not None:
        function = graph._get_function(name)
        body = getattr(function, "graph", None)
        if body is not None:
            return body
        graph = getattr(graph, "outer_graph", None)
    definition = _definition(op, name)
    if definition is None:
        return None
    # A branch does not take the index that selects it.
    inputs = op.inputs[1:] if op.type in BRANCHES else op.inputs
    shapes: list[Any] | None = [t.shape for t in inputs]
    if len(inputs) != len(definition.signature.input_arg):
        shapes = None
    try:
        return function_def_to_graph.function_def_to_graph(definition, input_shapes=shapes)
    except Exception:
        return None


def _definition(op: Any, name: str) -> Any:
    for function in op.graph.as_graph_def().library.function:
        if function.signature.name == name:
            return function
    ctx = context.context()
    return ctx.get_function_def(name) if ctx.has_function(name) else None


def _trips(op: Any, folder: Folder) -> int:
    seen = set()
    while op.type in LOOPS and op not in seen and len(op.inputs) > 1:
        seen.add(op)
        # The first two inputs of a loop are its counter and the bound on it.
        bound = op.inputs[1]
        value = folder.value(bound)
        if value is not None and value.size == 1 and value.dtype.kind in "iu":
            return max(1, int(value))
        forward = next((t.op for t in (bound, *op.inputs[2:]) if _counts(t)), None)
        if forward is None:
            return 1
        op = forward
    return 1


def _counts(tensor: Any) -> bool:
    """Whether `tensor` is the number of iterations that a loop has done."""
    return tensor.op.type in LOOPS and tensor.value_index == 0
