"""Bytes of what loops collect in lists: TensorArrays, and values kept for a loop's gradient.

A list is a tensor of type variant whose elements the executor does not show. What a loop puts
into its lists is read off its body.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from optckpt.frontends import tf_ops

log = logging.getLogger("optckpt.frontends.tensorflow")

LOOPS = tf_ops.words("While StatelessWhile")
_EMPTY_LISTS = tf_ops.words("EmptyTensorList TensorListReserve")
# Operations whose result is no memory of its own.
_SHARED = tf_ops.words("ReadVariableOp Const TensorListGetItem")
# Operation that puts an element into a list -> its input that is the element.
_PUSHES = {"TensorListPushBack": 1, "TensorListSetItem": 2}


def collected(loop: tf.Operation) -> tuple[tuple[int, int], ...]:
    """For each output of a While, (elements, bytes of each) that its body puts into that list.

    (0, 0) for outputs that are no lists, for lists that were filled before, and for elements
    that share the memory of a variable or of another list's. So, with a warning, for a list whose
    length is not known.
    """
    sizes = [(0, 0)] * len(loop.outputs)
    unknown = []
    lists = [
        i
        for i, t in enumerate(loop.inputs)
        if t.dtype == tf.variant and t.op.type in _EMPTY_LISTS and i < len(sizes)
    ]
    if not lists:
        return tuple(sizes)
    body = _Function.of(loop, "body")
    if body is None:
        return tuple(sizes)
    trips = _trips(loop, body)
    seen: set[str | int] = set()
    for i in lists:
        pushed = _pushed(body, i)
        if pushed is None:
            continue
        root = body.root(pushed)
        if isinstance(root, int):
            # A carried value is what the last iteration returned; an invariant one is no copy.
            after = body.root(body.returned(root))
            if after == root:
                continue
            root = after
        elif body.nodes[root.split(":")[0]].op in _SHARED:
            continue
        if root in seen:
            continue
        seen.add(root)
        made = loop.inputs[i].op
        shape = tf_ops.constant(made.inputs[0])
        length = tf_ops.constant(made.inputs[1])
        count = length[0] if length and length[0] >= 0 else trips
        element = tf.as_dtype(made.get_attr("element_dtype"))
        if tf_ops.is_opaque(element):
            continue
        if shape is None or count is None or min(shape, default=0) < 0:
            unknown.append(made.name)
        else:
            sizes[i] = count, int(np.prod(shape, dtype=np.int64)) * element.size
    if unknown:
        log.warning(
            "what loop %r keeps for its gradient is missing from the prediction of memory, as the "
            "number or the shape of its values is not known (%s): give the loop "
            "maximum_iterations and fixed shapes",
            loop.name,
            ", ".join(unknown[:3]),
        )
    return tuple(sizes)


def _pushed(body: _Function, i: int) -> str | None:
    """What the body puts into list number `i`, by name."""
    end = body.root(body.returned(i))
    if isinstance(end, int):
        return None
    node = body.nodes[end.split(":")[0]]
    index = _PUSHES.get(node.op)
    return None if index is None else str(node.input[index])


def _trips(loop: tf.Operation, body: _Function) -> int | None:
    """An upper bound on the iterations of a loop that counts up to a constant, or None."""
    cond = _Function.of(loop, "cond")
    if cond is None:
        return None
    bounds = []
    tests = [cond.root(cond.returned(0))]
    while tests:
        end = tests.pop()
        if isinstance(end, int):
            continue
        node = cond.nodes[end.split(":")[0]]
        if node.op == "LogicalAnd":
            tests += [cond.root(name) for name in node.input[:2]]
        elif node.op in ("Less", "LessEqual"):
            bounds.append(_count_up(loop, body, cond, node))
    return min((b for b in bounds if b is not None), default=None)


def _count_up(loop: tf.Operation, body: _Function, cond: _Function, test: Any) -> int | None:
    """How often `test`, counter < bound, holds if the body adds a constant to the counter."""
    counter, bound = (cond.root(name) for name in test.input[:2])
    if not isinstance(counter, int):
        return None
    limit = _value(loop, bound, cond)
    start = _value(loop, counter, cond)
    after = body.root(body.returned(counter))
    if limit is None or start is None or isinstance(after, int):
        return None
    add = body.nodes[after.split(":")[0]]
    if add.op not in ("Add", "AddV2") or body.root(add.input[0]) != counter:
        return None
    step = _value(loop, body.root(add.input[1]), body)
    if step is None or step <= 0:
        return None
    span = limit - start + int(test.op == "LessEqual")
    return max(0, -(-span // step))


def _value(loop: tf.Operation, source: str | int, function: _Function) -> int | None:
    if isinstance(source, int):
        values: list[int] | None = tf_ops.constant(loop.inputs[source])
        return values[0] if values and len(values) == 1 else None
    node = function.nodes[source.split(":")[0]]
    if node.op != "Const":
        return None
    value = tensor_util.MakeNdarray(node.attr["value"].tensor)
    return int(value.reshape(())) if value.size == 1 and value.dtype.kind in "iu" else None


class _Function:
    """A FunctionDef that can be walked from its results to its arguments."""

    def __init__(self, definition: Any) -> None:
        self.nodes = {node.name: node for node in definition.node_def}
        self._arguments = {a.name: i for i, a in enumerate(definition.signature.input_arg)}
        self._returned = [definition.ret[a.name] for a in definition.signature.output_arg]

    @classmethod
    def of(cls, op: tf.Operation, attribute: str) -> _Function | None:
        name = op.node_def.attr[attribute].func.name
        definition = tf_ops.function_def(op.graph, name)
        return None if definition is None else cls(definition)

    def returned(self, i: int) -> str:
        """Name of what the function returns as number `i`."""
        return str(self._returned[i])

    def root(self, name: str) -> str | int:
        """The argument number, or the operation's output, whose memory `name` shares."""
        while name not in self._arguments:
            node = self.nodes[name.split(":")[0]]
            if node.op not in tf_ops.SIMPLE_VIEWS:
                return name
            name = node.input[0]
        return self._arguments[name]
