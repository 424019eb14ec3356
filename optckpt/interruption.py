"""Ctrl-C: notices it also where the code at hand answers it and goes on."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 5.0
"""Seconds after which Ctrl-C is raised again if the context is still there."""


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed within the context.

    A strategy answers KeyboardInterrupt by handing over its best schedule, so that its caller
    cannot tell from the result. Where Python swallows the exception, as in the callbacks that it
    runs while it frees or loads something, it is raised a second time after PATIENCE seconds.
    Outside the main thread nothing is noticed.
    """
    pressed = False
    again = threading.Timer(PATIENCE, _thread.interrupt_main)
    again.daemon = True
    if threading.current_thread() is not threading.main_thread():
        yield lambda: pressed
        return

    def handle(number: int, frame: Any) -> None:
        nonlocal pressed
        first, pressed = not pressed, True
        if first:
            again.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        again.cancel()
        signal.signal(signal.SIGINT, before)
