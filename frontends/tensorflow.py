"""Capture: a TensorFlow graph with its gradients becomes a `TrainingGraph`, with the map back.

Works on any graph-mode graph: the FuncGraph of a `tf.function` (also while it is traced, and
the body of a while loop) and a `tf.compat.v1.Graph`. Nothing in the graph is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from optckpt.graph import TrainingGraph


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured step: the framework-free graph, and what each of its parts is in TensorFlow."""

    graph: TrainingGraph
    """Times and workspaces are 0 until `optckpt.costs` has measured them."""
    tf_graph: tf.Graph
    """The live graph that was captured."""
    units: tuple[tuple[tf.Operation, ...], ...]
    """The TensorFlow operations of each `graph.operations[i]`, in execution order."""
    tensors: tuple[tf.Tensor, ...]
    """The tensor that owns each `graph.buffers[b]`; others may be views of it."""
    device: str
    """Device the step runs on: "/device:CPU:0", "/device:GPU:1", ..."""
    chained: tuple[bool, ...]
    """Whether the rewritten graph fixes the place of each unit by control edges."""
    internal: tuple[int, ...]
    """Bytes of the tensors that are made and used up inside each unit."""
    views: dict[int, tuple[int, tuple[tuple[tf.Operation, int, int], ...]]]
    """id(tensor) -> (buffer, chain of (view operation, input index, output index) from the
    buffer's own tensor to this one), for every tensor that shares a buffer's memory."""
    count_from: int
    """Blocks smaller than this many bytes are not counted by the device's allocator."""
    chain_from: int
    """Operations on tensors smaller than this many bytes are left to themselves."""
