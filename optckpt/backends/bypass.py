"""Gradients reach what reads them one by one, not all at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from optckpt.backends.tensorflow import overrides_gradient
from optckpt.frontends.tf_traced import changes


def bypass_joins(operations: Iterable[tf.Operation], gradients: Sequence[tf.Tensor]) -> int:
    """Let the readers of an IdentityN of several gradients read the gradients themselves.

    Keras' optimizers pass all gradients through one such operation (the all-reduce over a single
    replica), which waits for the last of them: no variable could be updated before. Returns how
    many inputs have been redirected. Nothing is computed otherwise.
    """
    source = {id(g): g for g in gradients}
    count = 0
    for op in operations:
        if op.type != "IdentityN" or len(op.inputs) < 2 or not _is_plain(op):
            continue
        for given, out in zip(op.inputs, op.outputs, strict=True):
            gradient = source.get(id(given))
            if gradient is None or gradient.op.device != op.device:
                continue
            source[id(out)] = gradient
            for reader in set(out.consumers()):
                for i, t in enumerate(reader.inputs):
                    if t is out:
                        changes(op.graph).redirect(reader, i, gradient)
                        count += 1
    return count


def _is_plain(op: tf.Operation) -> bool:
    """Whether the operation neither waits for others nor has a gradient of its own."""
    return not op.control_inputs and not overrides_gradient(op)
