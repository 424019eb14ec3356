"""How the command line answers: exit codes, errors in one sentence, results as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from optckpt.errors import OptckptError

DONE, MISTAKE, INTERRUPTED = 0, 2, 130

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help='Print one JSON object, no table; of a mistake, its "error" and "kind".'
    ),
]


def output() -> Console:
    """Of standard output; wide enough for our tables where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def complain(message: str) -> None:
    typer.echo(f"optckpt: error: {message}", err=True)


def fail(message: str, kind: str, as_json: bool = False) -> int:
    """Say what is wrong; returns the exit code."""
    if as_json:
        typer.echo(json.dumps({"error": message, "kind": kind}))
    complain(message)
    return MISTAKE


@contextmanager
def mistakes(as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """What is raised on purpose ends in a message and an exit code, not in a traceback.

    Yields the function that prints the result as JSON. Where that was printed, a mistake found
    afterwards is told on stderr alone.
    """
    printed = False

    def answer(result: Mapping[str, Any]) -> None:
        nonlocal printed
        printed = True
        typer.echo(json.dumps(result))

    try:
        yield answer
    except OptckptError as e:
        raise typer.Exit(fail(str(e), type(e).__name__, as_json and not printed)) from None
    except KeyboardInterrupt:
        fail("interrupted", "KeyboardInterrupt", as_json and not printed)
        raise typer.Exit(INTERRUPTED) from None
