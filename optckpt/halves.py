"""A function cut in two: what gives its results, and what gives its gradients.

Tensors of the first half that the second reads are what is kept in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps import op_is_stateful
from tensorflow.python.ops import default_gradient, handle_data_util, resource_variable_ops

from optckpt.backends.xla_guards import bar_xla
from optckpt.costs.constants import Folder
from optckpt.errors import CaptureError
from optckpt.frontends.tf_ops import METADATA, SIMPLE_VIEWS
from optckpt.step import is_pushed_forward


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

    name: str
    """Of the function, for messages."""
    trace: Trace
    forward: Any
    """Arguments, captures -> results and what is kept."""
    backward: Any
    """Arguments, captures, what is kept, slopes -> components of the gradients."""


def call_halves(halves: Halves, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of the function for these arguments; differentiated by the second half.

    Raises:
        CaptureError: within a tf.autodiff.ForwardAccumulator, and if second derivatives are taken.
    """
    trace = halves.trace
    captured = _captures_here(trace.graph)
    _refuse_forward_mode(halves.name, [*tensors, *captured, *(v.handle for v in trace.variables)])

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*given: tf.Tensor) -> Any:
        # The halves are not to be differentiated: that would keep all that they compute.
        with record.stop_recording():
            outputs = halves.forward(*given, *captured)
        results, kept = outputs[: len(trace.results)], outputs[len(trace.results) :]
        for v in trace.variables:
            resource_variable_ops.variable_accessed(v)

        def grad(*slopes: Any, variables: Any = None) -> Any:
            mine = [
                tf.zeros_like(y) if s is None else s
                for y, s in zip(results, slopes, strict=True)
                if is_differentiable(y)
            ]
            components = _call_backward(halves, (*given, *captured), kept, mine)
            gradients = _packed(trace.gradients, components)
            of_arguments = gradients[: len(given)]
            if variables is None:
                return of_arguments
            of = {v.ref(): g for v, g in zip(trace.variables, gradients[len(given) :], strict=True)}
            return of_arguments, [of.get(v.ref()) for v in variables]

        return results, grad

    return _held_by_graph(call(*tensors))


def _call_backward(
    halves: Halves,
    inputs: Sequence[tf.Tensor],
    kept: Sequence[tf.Tensor],
    slopes: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """The components of the gradients, which cannot be differentiated: what is kept would be taken
    for constants."""
    _refuse_forward_mode(halves.name, [*inputs, *slopes])
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    # Variables are among the inputs, by their handles: tapes know of them.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def once(*given: tf.Tensor) -> Any:
        with record.stop_recording():
            found = halves.backward(*given[: len(inputs)], *kept, *given[len(inputs) :])

        def again(*slopes: Any) -> Any:
            if here is None or tf.compat.v1.get_default_graph() is here:
                raise CaptureError(_no_second_derivatives(halves.name))
            return _zeros_unless_asked(halves.name, given, slopes)

        return found, again

    return _held_by_graph(once(*inputs, *slopes)) if components(halves.trace.gradients) else []


def _held_by_graph(results: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """What a tf.custom_gradient returned, with its gradient function in the graph itself.

    TensorFlow has it in a registry that forgets nothing, and the function knows the graph: every
    trace would stay in memory.
    """
    found = list(results)
    if found and not tf.executing_eagerly():
        op = found[0].op
        name = op.get_attr("_gradient_op_type").decode()
        op._gradient_function = ops.gradient_registry.lookup(name)
        ops.gradient_registry._registry.pop(name)
    return found


def _zeros_unless_asked(name: str, inputs: Iterable[tf.Tensor], slopes: Iterable[Any]) -> list[Any]:
    """Second derivatives for slopes that are all zero, or a step that fails.

    TensorFlow differentiates a function in advance if some tape records a call of it. Whether
    anybody asks for second derivatives shows when the step runs.
    """
    asked = [
        tf.reduce_any(tf.not_equal(s, 0))
        for s in tf.nest.flatten(list(slopes), expand_composites=True)
        if s is not None and is_differentiable(s)
    ]
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(tf.stack(asked))), [_no_second_derivatives(name)]
    )
    with tf.control_dependencies([check]):
        return [
            tf.identity(default_gradient.zeros_like(t)) if _has_gradient(t) else None
            for t in inputs
        ]


def _has_gradient(tensor: tf.Tensor) -> bool:
    """Whether gradients flow to it, or to the variable of which it is the handle."""
    dtype = default_gradient.shape_and_dtype(tensor)[1]
    return bool(dtype.is_floating or dtype.is_complex)


def _no_second_derivatives(name: str) -> str:
    return (
        f"{name!r} has a budget of its own, and second derivatives of such a part are not "
        "available: leave out the decorator optckpt.budgeted, and for a budget take the gradients "
        "of the whole step with optckpt.gradients, optckpt.GradientTape or in optckpt.whole_step"
    )


def _refuse_forward_mode(name: str, tensors: Sequence[tf.Tensor]) -> None:
    if is_pushed_forward(tensors):
        raise CaptureError(
            f"{name!r} has a budget of its own and is used within a tf.autodiff.ForwardAccumulator,"
            " whose products are not available for such a part: leave out the decorator "
            "optckpt.budgeted, and put optckpt.whole_step around the accumulator for a budget"
        )


def cut(trace: Trace, name: str) -> Halves:
    """The two halves of a rewritten trace, as functions; `name`: of the function, for messages.

    Raises:
        CaptureError: if something of the backward pass comes before the results.
    """
    index = {op: i for i, op in enumerate(trace.graph.get_operations())}
    forward_operations = list(index)[: trace.begin_backward]
    roots = [t.op for t in trace.results] + [op for op in forward_operations if _has_effect(op)]
    first = _closure(roots, set(), index)
    for t in trace.slopes:
        if t.op in first:
            raise CaptureError(
                f"{name!r} cannot be cut between its forward and its backward pass: operation "
                f"{t.op.name!r} of the backward pass comes first"
            )
    gradients = components(trace.gradients)
    roots = [g.op for g in gradients]
    earlier = set(forward_operations)
    roots += [op for op in index if _has_effect(op) and op not in first and op not in earlier]
    second = _closure(roots, set(first), index)
    shapes = _known_shapes(second)
    _move_shapes(first, second, shapes, index)
    # Constants are not worth keeping.
    captured = [inner for _, inner in trace.graph.captures]
    there = {id(t) for t in (*trace.arguments, *trace.slopes, *captured)}
    read = {id(t): t for op in second if op not in shapes for t in op.inputs if t.op in first}
    read |= {id(t): t for t in gradients if t.op in first}
    constants = {t.op for t in read.values() if t.op.type == "Const"}
    kept = [t for t in read.values() if t.op not in constants and id(t) not in there]
    rest = [*constants, *second]

    before = (*trace.arguments, *captured)
    after = (*before, *kept, *trace.slopes)

    def forward(*given: tf.Tensor) -> list[tf.Tensor]:
        known = _inputs(before, given)
        _copy(first, known, trace.graph)
        bar_xla(tf.compat.v1.get_default_graph(), "optckpt")
        return [known[id(t)] for t in (*trace.results, *kept)]

    def backward(*given: tf.Tensor) -> list[tf.Tensor]:
        known = _inputs(after, given)
        for op, values in shapes.items():
            constants_of = zip(op.outputs, values, strict=True)
            known.update((id(t), tf.constant(value)) for t, value in constants_of)
        _copy(rest, known, trace.graph)
        return [known[id(t)] for t in gradients]

    def function(half: Any, inputs: Sequence[tf.Tensor]) -> Any:
        # Inlined into the function around, its operations would mingle with others.
        alone = {"_noinline": True}
        made = tf.function(half, autograph=False, experimental_attributes=alone)
        return made.get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in inputs))

    return Halves(name, trace, function(forward, before), function(backward, after))


def _known_shapes(operations: Iterable[tf.Operation]) -> dict[tf.Operation, list[np.ndarray]]:
    """Those that look at shapes only, with the values of their outputs, if these are known."""
    folder = Folder()
    found = {}
    for op in operations:
        if op.type in METADATA:
            values = [value for t in op.outputs if (value := folder.value(t)) is not None]
            if len(values) == len(op.outputs):
                found[op] = values
    return found


def _move_shapes(
    first: dict[tf.Operation, None],
    second: dict[tf.Operation, None],
    known: Collection[tf.Operation],
    index: Mapping[tf.Operation, int],
) -> None:
    """Move what looks at shapes of the first half there: it would have whole tensors kept."""
    for op in [op for op in second if op.type in METADATA and op not in known]:
        group = _closure([op], set(first), index)
        if all(o.type in METADATA or o.type in SIMPLE_VIEWS for o in group):
            first.update(group)
            for o in group:
                del second[o]


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


def _captures_here(source: tf.Graph) -> list[tf.Tensor]:
    """What `source` captures, as tensors of the graph that is being traced.

    The second half is given these very tensors: the gradients of a branch or a loop take what they
    need from its forward pass, and from nowhere else.
    """
    outer = [t for t, _ in source.captures]
    if tf.executing_eagerly():
        return outer
    graph = tf.compat.v1.get_default_graph()
    return [graph.capture(t) if hasattr(graph, "capture") else t for t in outer]


def _inputs(inputs: Sequence[tf.Tensor], given: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
    """id(tensor of the trace) -> what stands for it in the graph that is being traced."""
    for t, g in zip(inputs, given, strict=True):
        handle_data_util.copy_handle_data(t, g)
    return {id(t): g for t, g in zip(inputs, given, strict=True)}


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
