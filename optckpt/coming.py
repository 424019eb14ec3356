"""Memory that will be taken when a step begins, but is not while it is planned.

A variable that was made while a function was traced may not be initialised yet, or share its memory
with others: TensorFlow computes equal initial values once. The first update gives each its own. A
step in the body of a loop begins with what the loop carries and with what was computed before it.
And an argument may be larger than in the call for which a function is traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from optckpt.frontends.tensorflow import Capture
from optckpt.frontends.tf_bodies import Bodies
from optckpt.frontends.tf_heap import Block
from optckpt.frontends.tf_lists import bytes_of
from optckpt.frontends.tf_resident import handle_bytes
from optckpt.frontends.tf_versions import VARIABLE_READS
from optckpt.sizes import arguments_of


def blocks_to_come(found: Capture) -> tuple[int, ...]:
    """Bytes of each block on the step's device that is not there yet.

    Blocks that the allocator does not count are left out. Which variables share their memory is
    known on a CPU alone.
    """
    return (*_of_variables(found), *_from_around(found))


def larger_arguments(found: Capture) -> tuple[tuple[int, int], ...]:
    """(bytes, bytes in use now) of each argument of the step that takes more at the sizes that the
    step is planned at than now, in the call for which it is traced."""
    given = arguments_of(found.tf_graph) if found.arguments else {}
    larger = []
    for placeholder, size in found.arguments:
        value = given.get(id(placeholder))
        if value is None or not _is_on(value, found.device):
            continue
        here = bytes_of(value)
        if here < size:
            larger.append((size, here if here >= found.count_from else 0))
    return tuple(larger)


def _of_variables(found: Capture) -> list[int]:
    coming: list[int] = []
    shared: dict[Hashable, tuple[int, list[bool]]] = {}
    with tf.init_scope():
        if not tf.executing_eagerly():
            return []
        for handle, inner in _handles(found.tf_graph):
            size = handle_bytes(handle)
            if size < found.count_from or not _is_on(handle, found.device):
                continue
            if not tf.raw_ops.VarIsInitializedOp(resource=handle):
                coming.append(size)
            elif "CPU" in found.device.upper():
                group = shared.setdefault(_address(handle), (size, []))
                group[1].append(_is_written(inner))
    for size, written in shared.values():
        coming += [size] * min(sum(written), len(written) - 1)
    return coming


def _from_around(found: Capture) -> list[int]:
    """What the graph around that of the step computes for it, and what a loop carries."""
    graph = found.tf_graph
    captures = getattr(graph, "captures", ())
    blocks: dict[int, Block] = {}
    bodies = Bodies()
    for outer, inner in captures:
        if inner.dtype == tf.resource:
            continue
        origin = _origin(outer)
        if origin is not None:
            blocks.update((id(b), b) for b in bodies.value(origin).blocks)
    sizes = [b.size for b in blocks.values()]
    if isinstance(graph, WhileBodyFuncGraph):
        captured = {id(inner) for _, inner in captures}
        carried = [t for t in graph.inputs if id(t) not in captured]
        sizes += [bytes_of(t) or 0 for t in carried if t.dtype != tf.resource]
    return [size for size in sizes if size >= found.count_from]


def _origin(tensor: tf.Tensor) -> tf.Tensor | None:
    """What stands for `tensor` in the graph that computes it; None if it is there before."""
    while hasattr(tensor, "graph") and not hasattr(tensor, "numpy"):
        if tensor.op.type != "Placeholder":
            return tensor
        tensor = _captured(tensor)
    return None


def _handles(graph: tf.Graph) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """(eager handle, the tensor that stands for it in `graph`) of each variable."""
    for outer, inner in getattr(graph, "captures", ()):
        if inner.dtype != tf.resource:
            continue
        while outer is not None and not hasattr(outer, "numpy"):
            outer = _captured(outer)
        if outer is not None:
            yield outer, inner


def _captured(inner: tf.Tensor) -> tf.Tensor | None:
    """What a tensor stands for in the graph around its own, if it stands for anything there."""
    captures = getattr(inner.graph, "captures", ())
    return next((outer for outer, mine in captures if mine is inner), None)


def _is_on(handle: tf.Tensor, device: str) -> bool:
    return bool(handle.device.endswith(device.removeprefix("/")))


def _address(handle: tf.Tensor) -> int:
    entry = handle._handle_data.shape_and_type[0]
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(entry.dtype))
    return int(value._numpy().__array_interface__["data"][0])


def _is_written(handle: tf.Tensor) -> bool:
    names = [handle]
    for t in names:
        for op in t.consumers():
            if op.type in ("Identity", "Switch"):
                names += op.outputs
            elif op.type not in VARIABLE_READS:
                return True
    return False
