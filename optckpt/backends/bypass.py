"""Gradients reach what reads them one by one, not all at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from optckpt.backends.tensorflow import overrides_gradient
from optckpt.frontends.tf_traced import changes


def bypass_joins(
    operations: Sequence[tf.Operation],
    gradients: Sequence[tf.Tensor],
    keep: Iterable[tf.Tensor] = (),
) -> int:
    """Let the readers of an IdentityN of several gradients read the gradients themselves.

    Keras' optimizers pass all gradients, clipped or as they are, through one such operation (the
    all-reduce over a single replica), which waits for the last of them: no variable could be
    updated before. Returns how many inputs have been redirected. Nothing is computed otherwise.

    An IdentityN with a gradient of its own, as that of the all-reduce, stays in sight of whoever
    differentiates later: it is bypassed only on the way to updates. `operations` are all of the
    step, `keep` is what will be used after it.
    """
    source: dict[int, tf.Tensor] = {}
    stack = list(gradients)
    while stack:
        t = stack.pop()
        if id(t) not in source:
            source[id(t)] = t
            stack += [out for reader in t.consumers() for out in reader.outputs]
    joins = [op for op in operations if op.type == "IdentityN" and _is_join(op)]
    open_ended = _open_ended(operations, keep) if any(map(overrides_gradient, joins)) else set()
    count = 0
    for op in joins:
        hidden = open_ended if overrides_gradient(op) else set()
        for given, out in zip(op.inputs, op.outputs, strict=True):
            gradient = source.get(id(given))
            if gradient is None or gradient.op.device != op.device:
                continue
            source[id(out)] = gradient
            for reader in set(out.consumers()) - hidden:
                for i, t in enumerate(reader.inputs):
                    if t is out:
                        changes(op.graph).redirect(reader, i, gradient)
                        count += 1
    return count


def _is_join(op: tf.Operation) -> bool:
    return len(op.inputs) > 1 and not op.control_inputs


def _open_ended(operations: Iterable[tf.Operation], keep: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """The operations from which something follows that may be read later: a tensor that is kept,
    or that nothing has read yet. From all others only effects follow.
    """
    kept = {id(t) for t in keep}
    stack = [op for op in operations if any(id(t) in kept or not t.consumers() for t in op.outputs)]
    found = set(stack)
    while stack:
        for t in stack.pop().inputs:
            if t.op not in found:
                found.add(t.op)
                stack.append(t.op)
    return found
