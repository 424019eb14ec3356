"""Whether XLA will compile what is being traced."""

from __future__ import annotations

import sys

import tensorflow as tf

from optckpt.errors import CaptureError


def refuse_xla() -> None:
    """Raise CaptureError if the function being traced will be compiled by XLA.

    XLA merges re-executed operations with the originals, control edges or not, so the budget
    would silently not be kept. Tracing does not hand jit_compile down to the graph, hence the
    look at the callers.
    """
    advice = (
        "under XLA (jit_compile=True) the compiler undoes recomputation and no budget can be "
        "kept: set jit_compile=False on the tf.function that contains optckpt.gradients"
    )
    if tf.config.optimizer.get_jit():
        raise CaptureError(f"tf.config.optimizer.set_jit is on; {advice}")
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if getattr(owner, "_jit_compile", None) is True and hasattr(owner, "python_function"):
            raise CaptureError(f"function {getattr(owner, '_name', '?')!r}: {advice}")
        frame = frame.f_back  # type: ignore[assignment]
