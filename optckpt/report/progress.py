"""One line on a terminal that says what is being done, and how far a solver has got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from optckpt.solvers.registry import Progress

Status = Callable[[str], None]
"""Shows a text in place of the one before."""


@contextmanager
def status_line(console: Console) -> Iterator[Status]:
    """A function that shows its argument on `console` (of stderr), if that is a terminal.

    The line is gone at the end of the context.
    """
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


def describe(progress: Progress) -> str:
    """What a running solver has reached: "8.2 s: extra time 14.60 %, at least 13.10 %"."""
    bound = f"at least {100 * progress.bound:.2f} %"
    if progress.incumbent is None:
        return f"{progress.seconds:.1f} s: nothing fits yet, extra time {bound}"
    return f"{progress.seconds:.1f} s: extra time {100 * progress.incumbent:.2f} %, {bound}"
