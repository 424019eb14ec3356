"""Compiled inner loops: numba, with its machine code kept on disk and Ctrl-C kept alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call; keep the machine code on disk where there is a place for it.

    Other threads run meanwhile.
    """
    try:
        machine_code: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        machine_code = numba.njit(function, nogil=True)
    return machine_code


def interruptible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call compiled code; an interrupt during it surfaces as KeyboardInterrupt."""
    try:
        return function(*arguments)
    except SystemError as e:
        # numba wraps it in a chain of these errors.
        root: BaseException | None = e
        while isinstance(root, SystemError):
            root = root.__cause__
        if isinstance(root, KeyboardInterrupt):
            raise root from None
        raise
