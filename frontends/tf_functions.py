"""The functions that operations call (calls, branches, loops), pruned as the executor prunes them.

TensorFlow inlines such operations before it runs them, and then drops what nobody needs: outputs
of a branch that only a dropped gradient reads, say.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

from optckpt.frontends import tf_ops

log = logging.getLogger("optckpt.frontends.tensorflow")

LOOPS = tf_ops.words("While StatelessWhile")
BRANCHES = tf_ops.words("If StatelessIf Case StatelessCase")

Live = frozenset[int]
"""Indices of the outputs that somebody needs."""


def function_graph(op: tf.Operation, name: str) -> Any:
    """The graph of the function `name` that `op` calls (with `inputs` and `outputs`), or None."""
    level = op.graph
    while level is not None:
        graph = getattr(level._get_function(name), "graph", None)
        if graph is not None:
            return graph
        level = getattr(level, "outer_graph", None)
    definition = tf_ops.function_def(op.graph, name)
    if definition is None:
        return None
    # A branch does not take the index that selects it.
    inputs = op.inputs[1:] if op.type in BRANCHES else op.inputs
    shapes: list[Any] | None = [t.shape for t in inputs]
    if len(inputs) != len(definition.signature.input_arg):
        shapes = None
    try:
        return function_def_to_graph.function_def_to_graph(definition, input_shapes=shapes)
    except Exception as error:  # Whatever TensorFlow raises on a function it cannot import.
        log.debug("function %r cannot be looked into: %s", name, error)
        return None


def function_names(op: tf.Operation) -> list[str]:
    """Names of the functions that `op` calls: of a loop the condition first."""
    attrs = op.node_def.attr
    if op.type in LOOPS:
        return [attrs["cond"].func.name, attrs["body"].func.name]
    if op.type in ("If", "StatelessIf"):
        return [attrs["then_branch"].func.name, attrs["else_branch"].func.name]
    if op.type in BRANCHES:
        return [f.name for f in attrs["branches"].list.func]
    return [attrs["f"].func.name]


def called_names(op: tf.Operation) -> list[str]:
    """Names of all functions in the attributes of `op`, of whatever type it is."""
    names = []
    for value in op.node_def.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        elif value.HasField("list"):
            names.extend(f.name for f in value.list.func)
    return names


class Body:
    """A function's graph as far as some of its results need it, in the order of execution."""

    def __init__(
        self, graph: Any, order: list[tf.Operation], live: Live, all_of: Functions
    ) -> None:
        """`order`: the operations of `graph`, sorted; `live`: indices of the results needed."""
        self.inputs = list(graph.inputs)
        self.outputs = [t if o in live else None for o, t in enumerate(graph.outputs)]
        arguments = {t.op for t in self.inputs}
        kept = {id(t) for t in self.outputs if t is not None}
        read = set(kept)
        ends = set(getattr(graph, "control_outputs", ()))
        steps = []
        for op in reversed(order):
            results = frozenset(o for o, t in enumerate(op.outputs) if id(t) in read)
            if op in arguments or not (results or op in ends):
                continue
            inputs = list(range(len(op.inputs)))
            if tf_ops.is_call(op):
                inputs = sorted(all_of.reads(op, results))
            read.update(id(op.inputs[i]) for i in inputs)
            ends.update(op.control_inputs)
            steps.append((op, results, inputs))
        seen = set(kept)
        found = []
        for op, results, inputs in steps:
            last = {id(op.inputs[i]): op.inputs[i] for i in inputs if id(op.inputs[i]) not in seen}
            seen.update(last)
            found.append(Step(op, results, frozenset(inputs), tuple(last.values())))
        self.steps = found[::-1]
        self.reads = frozenset(i for i, t in enumerate(self.inputs) if id(t) in read)

    def source(self, output: int) -> tf.Tensor | None:
        """The tensor that is handed on as this output; None if nobody needs it."""
        t = self.outputs[output]
        while t is not None and t.op.type == "Identity":
            t = t.op.inputs[0]
        return t

    def passed(self, output: int) -> int | None:
        """The argument that is handed on unchanged as this output, or None."""
        t = self.source(output)
        return next((i for i, a in enumerate(self.inputs) if a is t), None)


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a body."""

    op: tf.Operation
    live: Live
    """Indices of the outputs that are needed."""
    reads: frozenset[int]
    """Indices of the inputs that are needed."""
    dying: tuple[tf.Tensor, ...]
    """The inputs that nobody reads later."""


class Functions:
    """Looks up the bodies of operations; remembers what it has found."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, str], tuple[Any, list[tf.Operation]] | None] = {}
        self._bodies: dict[tuple[int, str, Live], Body] = {}
        self._found: dict[tf.Operation, bool] = {}

    def known(self, op: tf.Operation) -> bool:
        """Whether `op` calls functions that can all be looked into."""
        if op not in self._found:
            self._found[op] = tf_ops.is_call(op) and self._can_look(op)
        return self._found[op]

    def of(self, op: tf.Operation, live: Live) -> list[Body]:
        """The bodies of a `known` operation: of a loop the condition and the body."""
        names = function_names(op)
        if op.type in LOOPS:
            everything = frozenset((0,))
            return [self._body(op, names[0], everything), self._body(op, names[1], live)]
        return [self._body(op, name, live) for name in names]

    def reads(self, op: tf.Operation, live: Live) -> frozenset[int]:
        """Indices of the inputs that a call needs in order to make its outputs `live`."""
        if not self.known(op):
            return frozenset(range(len(op.inputs)))
        if op.type in LOOPS:
            return self.carried(op, live)
        skipped = int(op.type in BRANCHES)
        read = {i + skipped for body in self.of(op, live) for i in body.reads}
        return frozenset(read | set(range(skipped)))

    def carried(self, op: tf.Operation, live: Live) -> Live:
        """Indices of the variables that a loop needs in order to make its outputs `live`."""
        while True:
            read = live.union(*(body.reads for body in self.of(op, live)))
            if read == live:
                return live
            live = read

    def _can_look(self, op: tf.Operation) -> bool:
        graphs = [self._graph(op, name) for name in function_names(op)]
        skipped = int(op.type in BRANCHES)
        results = graphs[1:] if op.type in LOOPS else graphs
        return (
            bool(results)
            and all(g is not None and len(g[0].inputs) == len(op.inputs) - skipped for g in graphs)
            and all(g is not None and len(g[0].outputs) == len(op.outputs) for g in results)
        )

    def _graph(self, op: tf.Operation, name: str) -> tuple[Any, list[tf.Operation]] | None:
        key = (id(op.graph), name)
        if key not in self._graphs:
            graph = function_graph(op, name)
            usable = graph is not None and hasattr(graph, "inputs")
            self._graphs[key] = (graph, _in_order(graph.get_operations())) if usable else None
        return self._graphs[key]

    def _body(self, op: tf.Operation, name: str, live: Live) -> Body:
        key = (id(op.graph), name, live)
        if key not in self._bodies:
            found = self._graph(op, name)
            assert found is not None
            self._bodies[key] = Body(*found, live, self)
        return self._bodies[key]


def _in_order(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """A topological order, ties by creation (a loop is older than lists its gradient gave it)."""
    ops = set(operations)
    waiting = {}
    ready = []
    for op in ops:
        before = {p for p in (*(t.op for t in op.inputs), *op.control_inputs) if p in ops}
        waiting[op] = len(before)
        if not before:
            ready.append((op._id, op))
    heapq.heapify(ready)
    order = []
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        after = {c for t in op.outputs for c in t.consumers()} | set(op._control_outputs)
        for c in after:
            if c in waiting:
                waiting[c] -= 1
                if not waiting[c]:
                    heapq.heappush(ready, (c._id, c))
    return order
