"""Sums add in the order in which they do without a rewrite (see `optckpt.frontends.tf_sums`).

Their inputs are put in that order. Where the kernel might still take over the memory of another one
than the first two, the first becomes a copy that nothing else holds: the kernel then takes that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.python.framework import ops

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_capture import Capture
from optckpt.frontends.tf_sharing import AtEverySize, AtSomeSize, Noted, tells
from optckpt.frontends.tf_sums import Sums, at_any_size, may_take, takes_first
from optckpt.frontends.tf_traced import Changes, Reading, changes, next_mark
from optckpt.frontends.tf_unique import Unique

_GRADIENT = "OptckptCopy"


@ops.RegisterGradient(_GRADIENT)  # type: ignore[untyped-decorator]
def _gradient_of_copy(_: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    return gradient


def keep_orders(
    capture: Capture, clones: Sequence[tuple[tf.Operation, tf.Operation]], scope: str
) -> list[tf.Operation]:
    """Make the sums of a graph that was rewritten add in the order that `capture.sums` says.

    `clones` are the operations that the rewrite has added, each with the one that it executes
    again. Returns the copies made. O(members), or O(operations + edges) if it is not plain of some
    sum which input's memory it takes over.
    """
    orders = dict(capture.sums)
    orders.update((clone, orders[op]) for clone, op in clones if op in orders)
    if not orders:
        return []
    known = changes(capture.tf_graph)
    for op, order in orders.items():
        _permute(known, op, order)
    held = {id(t) for t in capture.outputs}
    most = Noted(AtSomeSize())
    unique = Unique()
    unsure = [op for op in orders if op in known.copies or not takes_first(op, held, most, unique)]
    if not unsure:
        return []
    reading = Reading(capture.tf_graph)
    needed = reading.reached([t.op for t in capture.outputs])
    nodes = reading.closure((*capture.members, *(clone for clone, _ in clones)))
    backward = (
        op._id
        for unit, operation in zip(capture.units, capture.graph.operations, strict=True)
        if not operation.forward
        for op in unit
        if op in needed
    )
    unused_from = min(backward, default=0)
    look = functools.partial(
        Sums, unsure, nodes, reading, capture.outputs, unused_from=unused_from, timed=False
    )
    sums = look(sharing=most)
    fates = sums.fates
    least = AtEverySize()
    if not most.is_as(least) and not all(map(tells, nodes)):
        other = look(sharing=least, twins=sums.twins)
        fates = {op: list(map(at_any_size, other.fates[op], found)) for op, found in fates.items()}
    copies = []
    for op, found in fates.items():
        if max(may_take(found)) > 1:
            copies.append(_copy_first(known, op, sums.late_makers(op), scope))
    return copies


def _permute(known: Changes, op: tf.Operation, order: tuple[int, ...]) -> None:
    if order == tuple(range(len(order))):
        return
    copy = known.copies.get(op)
    now = list(op.inputs)
    if copy is not None:
        now[0] = copy.inputs[0]
    for i, source in enumerate(order):
        if i or copy is None:
            known.redirect(op, i, now[source])
        else:
            known.redirect(copy, 0, now[source])
    before = known.orders.get(op, tuple(range(len(order))))
    known.orders[op] = tuple(before[i] for i in order)


def _copy_first(
    known: Changes, op: tf.Operation, makers: Iterable[tf.Operation], scope: str
) -> tf.Operation:
    """Make `op` read a copy of its first input, made when all its inputs are there."""
    graph = op.graph
    source = op.inputs[0]
    definition = node_def_pb2.NodeDef(
        name=graph.unique_name(f"{scope}/{op.name.removeprefix(scope + '/')}_first"),
        # The kernel copies nothing if nobody else holds its input.
        op="Snapshot",
        device=op.device,
    )
    definition.attr["T"].type = source.dtype.as_datatype_enum
    definition.attr["_gradient_op_type"].s = _GRADIENT.encode()
    definition.attr[tf_ops.MARK].s = next_mark()
    context = op._get_control_flow_context()
    made = ops.Operation.from_node_def(
        definition,
        graph,
        inputs=[source],
        output_types=[source.dtype],
        control_inputs=list(
            dict.fromkeys(
                (
                    *op.control_inputs,
                    *(
                        m
                        for m in makers
                        if m is not source.op and m._get_control_flow_context() is context
                    ),
                )
            )
        ),
    )
    if context is not made._get_control_flow_context():
        made._set_control_flow_context(context)
    known.added[made] = None
    known.copies[op] = made
    known.redirect(op, 0, made.outputs[0])
    return made
