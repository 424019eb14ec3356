"""Which device the operations of a TensorFlow graph are for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_ops import default_device_type
from optckpt.frontends.tf_shapes import tensor_bytes


class Devices:
    """Where operations run, by their device strings and by the variables that they touch."""

    def __init__(self, graph: tf.Graph | None = None) -> None:
        """`graph`: of the operations; a function's variables tell where what reads them runs."""
        self._parsed: dict[str, str] = {}
        self._found: dict[tf.Operation, str] = {}
        default = self._of_text("")
        self._handles = {
            handle: device for handle, device in _captured(graph).items() if device != default
        }

    def of(self, op: tf.Operation) -> str:
        """Where the operation runs: "/device:CPU:0", "/device:GPU:1", ..."""
        found = self._found.get(op)
        if found is None:
            found = self._found[op] = self._look(op)
        return found

    def _look(self, op: tf.Operation) -> str:
        text = op.device
        if not text and self._handles:
            # TensorFlow places it with the variable.
            for t in op.inputs:
                found = self._handles.get(id(t))
                if found is not None:
                    return found
        return self._of_text(text)

    def _of_text(self, text: str) -> str:
        found = self._parsed.get(text)
        if found is None:
            spec = tf.DeviceSpec.from_string(text)
            kind = spec.device_type or default_device_type("")
            self._parsed[text] = found = f"/device:{kind}:{spec.device_index or 0}"
        return found


def shares(devices: Devices, nodes: Iterable[Node]) -> dict[str, float]:
    """Which part of the bytes that operations write is on each device, the largest first.

    Tensors of unknown size do not count.
    """
    placed: dict[str, list[Node]] = {}
    for node in nodes:
        if node.kind not in tf_ops.RESIDENT:
            placed.setdefault(devices.of(node.op), []).append(node)
    if len(placed) < 2:
        return dict.fromkeys(placed, 1.0)
    found = {
        device: sum(tensor_bytes(t) or 0 for node in there for t in node.outputs)
        for device, there in placed.items()
    }
    total = max(1, sum(found.values()))
    return {d: n / total for d, n in sorted(found.items(), key=lambda item: -item[1])}


def _captured(graph: Any) -> dict[int, str]:
    """id(placeholder) -> device of the variable that a function has captured as it."""
    found: dict[int, str] = {}
    # All that is captured of a graph is captured of the one around it.
    around: dict[int, str] | None = None
    for outside, inside in getattr(graph, "captures", ()):
        if inside.dtype != tf.resource:
            continue
        text = getattr(outside, "device", "")
        if text:
            spec = tf.DeviceSpec.from_string(text)
            if spec.device_type:
                found[id(inside)] = f"/device:{spec.device_type}:{spec.device_index or 0}"
            continue
        if around is None:
            around = _captured(getattr(outside, "graph", None))
        if id(outside) in around:
            found[id(inside)] = around[id(outside)]
    return found
