"""Worker processes: how they are started, and what they do first.

The scripts of workers import this without the package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

LOOK_EVERY = 0.5
"""Seconds between two looks at whether the parent is still there."""


def start(script: str) -> subprocess.Popen[bytes]:
    """Run `script`, a file of this folder that calls `begin`, with pipes to and from it."""
    env = dict(os.environ)
    # The child must find the same OR-Tools, however this process found it.
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        # Ctrl-C in a terminal is for the caller alone.
        start_new_session=True,
    )


def begin() -> BinaryIO:
    """Set the process up; returns the stream for its answers, where its output would have gone."""
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
