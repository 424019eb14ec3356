"""What TensorFlow merges finds the same partner in every execution.

The oneDNN pass merges a BiasAddGrad with a Conv2DBackpropFilter that reads the same tensor. If the
two are executed again from that very tensor there are several to choose from; it takes whichever
it meets first, in an order that differs from one time to the next, and merges nothing if that is
not the right one. The last bits of the bias' gradient tell.

A Conv2D with its BiasAdd is merged as in the plain graph where the result depends on it, below 32
bits: neither gets a control edge, which would prevent it; the Conv2D's input comes from an Identity
that waits instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from optckpt.backends.identity import identity, input_name
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_traced import changes


def is_rounded_between(unit: tuple[tf.Operation, ...]) -> bool:
    """Whether the bits of a sum with a bias tell if oneDNN has merged it with the convolution.

    Below 32 bits the separate kernels round the convolution's result before the bias is added.
    """
    return any(op.type == "BiasAdd" and op.outputs[0].dtype.size < 4 for op in unit[1:])


def has_controls(unit: tuple[tf.Operation, ...]) -> bool:
    """Whether control edges that were there before keep oneDNN from merging the operations."""
    return any(op.control_inputs for op in unit)


def may_be_merged(unit: tuple[tf.Operation, ...], rounded: bool) -> bool:
    """Whether TensorFlow may merge the operation with its neighbours, or compute it otherwise.

    A control edge that says no more than a data edge still keeps the graph optimiser from moving
    the operation, so it is left out only where a merged kernel is wanted. The oneDNN pass merges
    whatever has the same control inputs: where the plan does not keep the two side by side, the
    chain's edge, which no two operations have in common, prevents it.
    """
    if rounded and has_controls(unit):
        return False
    op = unit[0]
    if op.type == "Conv2D":
        return bool(op.inputs[0].op.type != "Pad")
    return len(unit) > 1 or op.type in _MERGED_ALONE


_MERGED_ALONE = tf_ops.MERGED_BY_OPTIMIZER - tf_ops.words("BiasAdd Pad")


def separate_partners(units: Iterable[Sequence[tf.Operation]], scope: str) -> int:
    """Let each execution of a BiasAddGrad with its partner read the gradient by a name of its own.

    `units`: the operations that stay together, each execution. Returns how many were separated
    from others; their input is now an Identity, which takes no memory.
    """
    seen: set[int] = set()
    count = 0
    for unit in units:
        first = unit[0]
        if first.type != "BiasAddGrad":
            continue
        shared = first.inputs[0]
        if id(shared) in seen:
            alias = identity(shared, first, input_name(first, scope))
            for op in unit:
                for i, t in enumerate(op.inputs):
                    if t is shared:
                        changes(op.graph).redirect(op, i, alias)
            count += 1
        seen.add(id(shared))
    return count
