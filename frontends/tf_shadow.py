"""A graph traced with unknown sizes, copied with sizes filled in.

A graph that was traced for any batch size says of hardly any tensor how large it is. Its copy is
given the shapes of its inputs and TensorFlow's own shape inference does the rest; what is captured
and measured on the copy is then carried over to the graph itself (`Shadow.on_live`), operation by
operation. The graph is not changed, and what it computes does not depend on the sizes filled in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import tensorflow as tf

from optckpt.errors import CaptureError
from optckpt.frontends.tf_capture import Capture
from optckpt.frontends.tf_copy import Copy, Shapes, copied
from optckpt.frontends.tf_data_sizes import Values

log = logging.getLogger("optckpt.frontends.tensorflow")


@dataclass(frozen=True, eq=False)
class Shadow:
    """A copy of a graph in which sizes are known."""

    graph: tf.Graph
    copies: Mapping[tf.Operation, tf.Operation]
    """Operation of the graph -> its copy."""

    def carried(self, value: Any) -> Any:
        """The copies of an operation or tensor, or of all those in a list, tuple, dict, dataclass.

        Operations that were not copied are left out.
        """
        return _Carrier(self.copies)(value)

    def on_live(self, found: Capture, live: tf.Graph) -> Capture:
        """What was captured of the copy, as a capture of the graph itself.

        Its `sized` is `found`: sizes and costs are to be taken from there.
        """
        back = _Carrier({copy: op for op, copy in self.copies.items()})
        same = ("graph", "tf_graph", "inside", "views", "sized")
        changed = {
            f.name: back(getattr(found, f.name)) for f in fields(found) if f.name not in same
        }
        views = {}
        for op, copy in self.copies.items():
            for t, mine in zip(copy.outputs, op.outputs, strict=True):
                if id(t) in found.views:
                    b, chain = found.views[id(t)]
                    views[id(mine)] = (b, back(chain))
        return replace(found, **changed, tf_graph=live, views=views, sized=found)


class _Carrier:
    """Puts other operations in the place of operations, and their tensors in that of tensors."""

    def __init__(self, other: Mapping[tf.Operation, tf.Operation]) -> None:
        self._other = other

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tf.Operation):
            return self._other[value]
        if isinstance(value, tf.Tensor):
            return self._other[value.op].outputs[value.value_index]
        if isinstance(value, list | tuple):
            kept = [v for v in value if not isinstance(v, tf.Operation) or v in self._other]
            return type(value)(map(self, kept))
        if isinstance(value, dict):
            return {self(k): self(v) for k, v in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self(getattr(value, f.name)) for f in fields(value)})
        return value


def shadow(
    live: tf.Graph,
    shapes: Shapes,
    among: Collection[tf.Operation] | None = None,
    values: Values | None = None,
) -> Shadow | None:
    """A copy of `live` in which inputs have `shapes`; its other shapes follow.

    Costs about one `tf.graph_util.import_graph_def`. None if the graph has operations that cannot
    be copied (calls by a function's name, as TensorFlow 1 had them).

    Args:
        shapes: of placeholders and of what iterators return; unknown dimensions stay so.
        among: the operations to copy, with all that they depend on; by default all.
        values: of placeholders, where sizes depend on these.

    Raises:
        CaptureError: if these shapes do not go together (names the operation).
    """
    name = getattr(live, "name", "")
    try:
        copy = _copied(live, shapes, among, values)
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not _can_be_copied(live, among):
            log.warning("graph %r cannot be copied to fill in sizes: %s", name, reason)
            return None
        raise CaptureError(
            f"function {name!r} was traced with unknown sizes, and it cannot be planned at the "
            f"sizes {_listed(live, shapes)}, because they do not go together: {reason}; declare "
            "sizes that do (section sizes of the configuration, or optckpt.sizes.at)"
        ) from error
    return Shadow(copy.graph, copy.copies)


def _copied(
    live: tf.Graph,
    shapes: Shapes,
    among: Collection[tf.Operation] | None,
    values: Values | None,
) -> Copy:
    """The copy, with sizes that depend on the data bounded if these bounds go together."""
    try:
        return copied(live, shapes, among, values=values)
    except (ValueError, tf.errors.OpError):
        return copied(live, shapes, among, values=values, bounded=False)


def _can_be_copied(live: tf.Graph, among: Collection[tf.Operation] | None) -> bool:
    try:
        copied(live, {}, among)
    except (ValueError, tf.errors.OpError):
        return False
    return True


def _listed(live: tf.Graph, shapes: Shapes) -> str:
    named = [
        f"{t.op.name} {shapes[id(t)]}"
        for op in live.get_operations()
        for t in op.outputs
        if id(t) in shapes
    ]
    return ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")
