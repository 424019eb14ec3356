"""Drives `optckpt.measure_step`: one training step that really runs, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from optckpt.errors import OptckptError


class StepError(OptckptError, RuntimeError):
    """The step could not run: out of memory, refused, or its process died."""


class StepProcess:
    """A process that has built one version of the step and answers requests about it.

    Use as a context manager; the process ends with it. Ctrl-C does not reach the process.

    Args:
        show: told what the process is doing, where it says so.
        environment: variables set for the process beside those of this one.
    """

    def __init__(
        self,
        show: Callable[[str], None] = lambda text: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._show = show
        self._errors = tempfile.TemporaryFile(  # noqa: SIM115 - closed by __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        # Warnings say that memory ran out; they go into the file and are read only then.
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", **(environment or {})}
        # The child must find the same packages, however this process found them.
        env["PYTHONPATH"] = os.pathsep.join(str(Path(p or ".").resolve()) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "optckpt.measure_step"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=env,
            start_new_session=True,
        )

    def __enter__(self) -> StepProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                # What is still to be written to a dead process is lost, and that is fine.
                with suppress(OSError):
                    pipe.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            StepError: says in words why there is none.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StepError(self._epitaph()) from None
        while line := self._process.stdout.readline():
            reply = json.loads(line)
            if "progress" in reply:
                self._show(reply["progress"])
            elif "error" in reply:
                kind, message = reply["error"], reply["message"]
                raise StepError(message if kind == "refused" else f"{kind}: {message}")
            else:
                done: dict[str, Any] = reply["done"]
                return done
        raise StepError(self._epitaph())

    def _epitaph(self) -> str:
        """What the process died of, with the last it said."""
        code = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        text = "".join(said)
        if any(words in text for words in _OUT_OF_MEMORY):
            return f"out of memory: the process died ({_cause(code)})"
        if code == -signal.SIGKILL:
            return "the process was killed (SIGKILL), most likely for lack of memory"
        return f"the process died ({_cause(code)})" + (f": {said[-1]}" if said else "")


_OUT_OF_MEMORY = ("ResourceExhausted", "RESOURCE_EXHAUSTED", "OOM when allocating", "bad_alloc")


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
