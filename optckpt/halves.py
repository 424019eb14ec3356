"""A function cut in two: what gives its results, and what gives its gradients.

Tensors of the first half that the second reads are what is kept in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from optckpt.errors import CaptureError


@dataclass(eq=False)
class Trace:
    """A function with its gradients, as it was traced and rewritten."""

    graph: tf.Graph
    arguments: list[tf.Tensor]
    structure: Any
    """What the function returns."""
    results: list[tf.Tensor]
    slopes: list[tf.Tensor]
    """What the gradients of the floating-point results are read from."""
    variables: list[tf.Variable]
    gradients: list[Any]
    """Of the arguments, then of the variables: tensors, IndexedSlices, Nones."""
    begin_backward: int
    """Number of operations that the graph had before there were any gradients."""


@dataclass(eq=False)
class Halves:
    """A part that can be called."""

    trace: Trace
    forward: Any
    """Arguments -> results and what is kept."""
    backward: Any
    """Arguments, what is kept, slopes -> components of the gradients."""


def call_halves(halves: Halves, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of the function for these arguments; differentiated by the second half."""
    trace = halves.trace

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: tf.Tensor) -> Any:
        # The halves are not to be differentiated: that would keep all that they compute.
        with record.stop_recording():
            outputs = halves.forward(*given)
        results, kept = outputs[: len(trace.results)], outputs[len(trace.results) :]
        for v in trace.variables:
            resource_variable_ops.variable_accessed(v)

        def grad(*slopes: Any, variables: Any = None) -> Any:
            mine = [
                tf.zeros_like(y) if s is None else s
                for y, s in zip(results, slopes, strict=True)
                if is_differentiable(y)
            ]
            gradients = _packed(trace.gradients, halves.backward(*given, *kept, *mine))
            of_arguments = gradients[: len(given)]
            if variables is None:
                return of_arguments
            of = {v.ref(): g for v, g in zip(trace.variables, gradients[len(given) :], strict=True)}
            return of_arguments, [of.get(v.ref()) for v in variables]

        return results, grad

    found: list[tf.Tensor] = list(call(*tensors))
    return found


def cut(trace: Trace, name: str) -> Halves:
    """The two halves of a rewritten trace, as functions; `name`: of the function, for messages.

    Raises:
        CaptureError: if something of the backward pass comes before the results.
    """
    index = {op: i for i, op in enumerate(trace.graph.get_operations())}
    before = list(index)[: trace.begin_backward]
    roots = [t.op for t in trace.results] + [op for op in before if _has_effect(op)]
    first = _closure(roots, set(), index)
    for t in trace.slopes:
        if t.op in first:
            raise CaptureError(
                f"{name!r} cannot be cut between its forward and its backward pass: operation "
                f"{t.op.name!r} of the backward pass comes first"
            )
    gradients = components(trace.gradients)
    roots = [g.op for g in gradients]
    roots += [op for op in index if _has_effect(op) and op not in first and op not in before]
    second = _closure(roots, set(first), index)
    # Constants are not worth keeping.
    there = {id(t) for t in (*trace.arguments, *trace.slopes, *_captured(trace.graph))}
    read = {id(t): t for op in second for t in op.inputs if t.op in first}
    read |= {id(t): t for t in gradients if t.op in first}
    constants = {t.op for t in read.values() if t.op.type == "Const"}
    kept = [t for t in read.values() if t.op not in constants and id(t) not in there]
    rest = [*constants, *second]

    def forward(*given: tf.Tensor) -> list[tf.Tensor]:
        known = _inputs(trace.graph, trace.arguments, given)
        _copy(first, known, trace.graph)
        return [known[id(t)] for t in (*trace.results, *kept)]

    def backward(*given: tf.Tensor) -> list[tf.Tensor]:
        inputs = (*trace.arguments, *kept, *trace.slopes)
        known = _inputs(trace.graph, inputs, given)
        _copy(rest, known, trace.graph)
        return [known[id(t)] for t in gradients]

    def function(half: Any, inputs: Sequence[tf.Tensor]) -> Any:
        # Inlined into the function around, its operations would mingle with others.
        alone = {"_noinline": True}
        made = tf.function(half, autograph=False, experimental_attributes=alone)
        return made.get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in inputs))

    return Halves(
        trace,
        function(forward, trace.arguments),
        function(backward, (*trace.arguments, *kept, *trace.slopes)),
    )


def _closure(
    roots: Iterable[tf.Operation], known: set[tf.Operation], index: Mapping[tf.Operation, int]
) -> dict[tf.Operation, None]:
    """`roots` and all that they wait for, but for `known`, in an order in which they may run."""
    order: dict[tf.Operation, None] = {}
    entered = set(known)
    stack = [(op, False) for op in sorted(set(roots), key=index.__getitem__, reverse=True)]
    while stack:
        op, done = stack.pop()
        if done:
            order[op] = None
        elif op not in entered:
            entered.add(op)
            stack.append((op, True))
            above = {t.op for t in op.inputs} | set(op.control_inputs)
            stack += [(p, False) for p in sorted(above - entered, key=lambda p: -index[p])]
    return order


def _captured(graph: tf.Graph) -> list[tf.Tensor]:
    return [inner for _, inner in graph.captures]


def _inputs(
    source: tf.Graph, inputs: Sequence[tf.Tensor], given: Sequence[tf.Tensor]
) -> dict[int, tf.Tensor]:
    """id(tensor of `source`) -> what stands for it in the graph that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    known = {id(inner): graph.capture(outer) for outer, inner in source.captures}
    return known | {id(t): g for t, g in zip(inputs, given, strict=True)}


def _copy(
    operations: Iterable[tf.Operation], known: dict[int, tf.Tensor], source: tf.Graph
) -> None:
    """Copy operations into the graph that is being traced; `known` gets their outputs."""
    graph = tf.compat.v1.get_default_graph()
    for function in source._functions.values():
        graph._add_function_recursive(function)
    made: dict[tf.Operation, tf.Operation] = {}
    for op in operations:
        if all(id(t) in known for t in op.outputs) and op.outputs:
            continue
        definition = op.node_def
        definition.name = graph.unique_name(op.name)
        del definition.input[:]
        definition.attr.pop("_class", None)
        new = ops.Operation.from_node_def(
            definition,
            graph,
            inputs=[known[id(t)] for t in op.inputs],
            output_types=None,
            control_inputs=[made[p] for p in op.control_inputs if p in made],
            op_def=op.op_def,
        )
        made[op] = new
        for old, t in zip(op.outputs, new.outputs, strict=True):
            t.set_shape(old.shape)
            handle_data_util.copy_handle_data(old, t)
            known[id(old)] = t


def is_differentiable(tensor: Any) -> bool:
    """Whether gradients flow to tensors of its dtype."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _has_effect(op: tf.Operation) -> bool:
    return bool(op_is_stateful(op)) and op.type not in ("ReadVariableOp", "Placeholder")


def components(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """The tensors of gradients, each once."""
    found: dict[int, tf.Tensor] = {}
    for g in tf.nest.flatten(list(gradients), expand_composites=True):
        if g is not None:
            found[id(g)] = g
    return list(found.values())


def _packed(like: Sequence[Any], tensors: Sequence[tf.Tensor]) -> list[Any]:
    """Tensors for the `_components` of `like`, in its structure."""
    given = {id(t): new for t, new in zip(components(like), tensors, strict=True)}

    def stand_in(g: Any) -> Any:
        return None if g is None else given[id(g)]

    packed: list[Any] = tf.nest.map_structure(stand_in, list(like), expand_composites=True)
    return packed
