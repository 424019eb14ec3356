"""What a worker process does first. Imported by the scripts of workers, without the package."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import BinaryIO

LOOK_EVERY = 0.5
"""Seconds between two looks at whether the parent is still there."""


def begin() -> BinaryIO:
    """Set the process up; returns the stream for its answers, where its output would have gone.

    The script's argument is the parent's process id.
    """
    # The folder of the script must not shadow modules that OR-Tools imports.
    del sys.path[0]
    # Ctrl-C reaches the whole process group; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A solver does not notice that nobody waits for its answer any more.
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    # Solvers print to stdout; the answers must be alone there.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return answers


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    os._exit(1)
