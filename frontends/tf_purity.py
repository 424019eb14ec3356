"""Which operations may be executed again.

An operation is pure if executing it twice on the same inputs is the same as executing it once. Of
what calls functions (calls, branches, loops) the bodies decide. Two kinds of handles may go in and
out:

- Lists and optionals. Their operations change nothing: whoever adds to a list that somebody else
  holds gets another list, with the same elements (copy on write; a test shows it).
- Variables that are read only. What is read again must not have been overwritten: `Variables`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_functions import called_names, function_graph
from optckpt.frontends.tf_versions import VARIABLE_READS

_LISTS = tf_ops.words("""
    EmptyTensorList TensorListReserve TensorListFromTensor TensorListPushBack TensorListPopBack
    TensorListSetItem TensorListGetItem TensorListStack TensorListConcat TensorListConcatV2
    TensorListGather TensorListLength TensorListElementShape
    OptionalFromValue OptionalNone OptionalGetValue OptionalHasValue
    """)
_HANDED_ON = tf_ops.words("Identity IdentityN StopGradient PreventGradient")
# Element by element, where the input is a list.
_WITH_LISTS = _LISTS | _HANDED_ON | tf_ops.words("ZerosLike AddN")
# What they do to variables cannot be seen.
_PYTHON = tf_ops.words("EagerPyFunc PyFunc PyFuncStateless")
_ARGUMENTS = tf_ops.words("Placeholder PlaceholderWithDefault PlaceholderV2 _Arg Const")


def may_hold_list(op: tf.Operation) -> bool:
    """Whether lists or optionals go in or out."""
    return any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


class Purity:
    """Says of the operations of one graph whether they are pure; remembers the functions."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, str], bool] = {}

    def of(self, op: tf.Operation) -> bool:
        """Whether `op` is pure, if it calls functions given the values of the variables it reads.

        Anything random with hidden state, collective, or on strings and references is not, nor is
        what changes a variable.
        """
        kind = op.type
        if kind in tf_ops.RESIDENT or tf_ops.is_control_flow_v1(op) or tf_ops.runs_once(kind):
            return False
        dtypes = {t.dtype for t in (*op.inputs, *op.outputs)}
        if tf.string in dtypes or any(map(tf_ops.is_reference, dtypes)):
            return False
        if tf_ops.is_call(op):
            return self._calls(op)
        if op._is_stateful or tf.resource in dtypes:
            return False
        return tf.variant not in dtypes or kind in _WITH_LISTS

    def _calls(self, op: tf.Operation) -> bool:
        return all(self._function(op, name) for name in called_names(op))

    def _function(self, op: tf.Operation, name: str) -> bool:
        key = (id(op.graph), name)
        if key not in self._functions:
            # A function that calls itself is as pure as the rest of it.
            self._functions[key] = True
            graph = function_graph(op, name)
            self._functions[key] = graph is not None and all(
                map(self._inside, graph.get_operations())
            )
        return self._functions[key]

    def _inside(self, op: tf.Operation) -> bool:
        kind = op.type
        if kind in _ARGUMENTS or kind in VARIABLE_READS:
            return True
        dtypes = {t.dtype for t in (*op.inputs, *op.outputs)}
        if tf_ops.runs_once(kind) or any(map(tf_ops.is_reference, dtypes)):
            return False
        definition = op_def_registry.get(kind)
        # An unregistered operation type is a function called by its name.
        if not (self._calls(op) if definition is not None else self._function(op, kind)):
            return False
        if tf_ops.is_call(op) or definition is None:
            return True
        if definition.is_stateful or (tf.resource in dtypes and kind not in _HANDED_ON):
            return False
        return tf.variant not in dtypes or kind in _WITH_LISTS


class Variables:
    """Which variables operations with functions read, and who overwrites these afterwards.

    Valid as long as no operation is added to the graph, but for those that come after all.
    """

    def __init__(self) -> None:
        self._writers: dict[int, list[tf.Operation] | None] = {}
        self._python: bool | None = None

    def written_later(self, op: tf.Operation) -> Sequence[tf.Operation] | None:
        """The operations made after `op` that may change a variable which `op`, pure, reads.

        None if they cannot be known, or if an execution of `op` that is added to the graph
        might see changes that are made later still: outside of the graph of a function that is
        being traced nothing keeps the two apart.
        """
        handles = [(i, t) for i, t in enumerate(op.inputs) if t.dtype == tf.resource]
        if not handles:
            return ()
        if getattr(op.graph, "experimental_acd_manager", None) is None:
            return None
        if self._python is None:
            self._python = any(o.type in _PYTHON for o in op.graph.get_operations())
        if self._python:
            return None
        # This is what tf.function goes by, when it puts what uses a variable in order.
        reads, changed = auto_control_deps_utils.get_read_write_resource_inputs(op)
        found: dict[tf.Operation, None] = {}
        for _, t in handles:
            if t not in reads or t in changed or t.op.type != "Placeholder":
                return None
            writers = self._all_writers(t)
            if writers is None:
                return None
            found.update(dict.fromkeys(w for w in writers if w._id > op._id))
        return tuple(found)

    def _all_writers(self, handle: tf.Tensor) -> Sequence[tf.Operation] | None:
        key = id(handle)
        if key not in self._writers:
            self._writers[key] = _writers(handle)
        return self._writers[key]


def _writers(handle: tf.Tensor) -> list[tf.Operation] | None:
    found = []
    for c in handle.consumers():
        if c.type in VARIABLE_READS:
            continue
        if any(t.dtype == tf.resource for t in c.outputs) and not tf_ops.is_call(c):
            # Under another name it may go anywhere.
            return None
        reads, _ = auto_control_deps_utils.get_read_write_resource_inputs(c)
        if handle not in reads:
            found.append(c)
    return found
