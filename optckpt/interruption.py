"""Ctrl-C: notices it also where the code at hand answers it and goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed within the context.

    A strategy answers KeyboardInterrupt by handing over its best schedule, so that its caller
    cannot tell from the result. Outside the main thread nothing is noticed.
    """
    pressed = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: pressed
        return

    def handle(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
