"""The progress bar of a long measurement."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from optckpt.costs.registry import ProgressCallback

_PATIENCE = 1.0


class Display:
    """Passes progress on to a callable, or to a bar on stderr, or to nobody.

    The bar appears after a second, and only if stderr is a terminal.
    """

    def __init__(self, progress: bool | ProgressCallback, total: int) -> None:
        self._callback = progress if callable(progress) else None
        self._wanted = progress is True and sys.stderr.isatty()
        self._total = total
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, name: str) -> None:
        """`done` operations are finished and the one called `name` is next."""
        if self._callback is not None:
            self._callback(done, self._total, name)
        if not self._wanted:
            return
        if self._bar is None:
            if time.monotonic() - self._start < _PATIENCE:
                return
            self._bar = Progress(
                TextColumn("measuring operations"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[name]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task("", total=self._total, name=name)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, name=name)
