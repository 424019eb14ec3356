"""Memory that oneDNN's kernels hold without a tensor of the graph that says so."""

from __future__ import annotations

import functools
import os

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from optckpt.frontends.tf_ops import default_device_type, element_count

_GRADIENT_OF = {"MaxPool": "MaxPoolGrad", "MaxPool3D": "MaxPool3DGrad"}
_POOLS = {gradient: pool for pool, gradient in _GRADIENT_OF.items()}


@functools.cache
def _is_enabled() -> bool:
    return bool(_pywrap_util_port.IsMklEnabled()) and os.environ.get(
        "TF_ENABLE_ONEDNN_OPTS", "1"
    ) not in ("0", "false")


def _is_paired(pool: tf.Operation) -> bool:
    return (
        _is_enabled()
        and default_device_type(pool.device) == "CPU"
        and pool.inputs[0].dtype in (tf.float32, tf.bfloat16)
        and any(
            c.type == _GRADIENT_OF[pool.type] and c.inputs[1] is pool.outputs[0]
            for c in pool.outputs[0].consumers()
        )
    )


def hidden_bytes(op: tf.Operation) -> int:
    """Bytes beside its output that `op` holds as long as the output is held.

    A max pooling that has a gradient remembers where each maximum was: one byte per element, in
    an output that oneDNN's graph pass adds and hands on to the gradient.
    """
    if op.type in _GRADIENT_OF and _is_paired(op):
        return element_count(op.outputs[0]) or 0
    return 0


def needs_no_workspace(op: tf.Operation) -> bool:
    """Whether `op` in its graph needs no workspace, though it does when it is run alone.

    Alone, the gradient of max pooling finds the maxima anew (three times the bytes of its input).
    """
    if op.type in _POOLS:
        pool = op.inputs[1].op
        return pool.type == _POOLS[op.type] and _is_paired(pool)
    return hidden_bytes(op) > 0
