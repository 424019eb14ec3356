"""Memory that the variables of a step will take, but have not been given yet.

A variable that was made while a function was traced may not be initialised yet, or share its memory
with others: TensorFlow computes equal initial values once. The first update gives each its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import tensorflow as tf

from optckpt.frontends.tensorflow import Capture
from optckpt.frontends.tf_resident import handle_bytes
from optckpt.frontends.tf_versions import VARIABLE_READS


def blocks_to_come(found: Capture) -> tuple[int, ...]:
    """Bytes of each block that the captured step's variables on its device do not have yet.

    Blocks that the allocator does not count are left out. Which variables share their memory is
    known on a CPU alone.
    """
    coming: list[int] = []
    shared: dict[Hashable, tuple[int, list[bool]]] = {}
    with tf.init_scope():
        if not tf.executing_eagerly():
            return ()
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
    return tuple(coming)


def _handles(graph: tf.Graph) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """(eager handle, the tensor that stands for it in `graph`) of each variable."""
    for outer, inner in getattr(graph, "captures", ()):
        if inner.dtype != tf.resource:
            continue
        while outer is not None and not hasattr(outer, "numpy"):
            around = {id(i): o for o, i in getattr(outer.graph, "captures", ())}
            outer = around.get(id(outer))
        if outer is not None:
            yield outer, inner


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
