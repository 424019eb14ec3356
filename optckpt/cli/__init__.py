"""The command line: `optckpt COMMAND`, a module for each command.

Exit codes: 0 done; 2 a mistake of the user's, or a budget that no schedule was found for (one
line on stderr says which); 130 interrupted, with the best result so far printed if there is one.
With --json, one object is printed in any case: the result, or {"error": the line, "kind": its
class}.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, cast

import typer

import optckpt
from optckpt.cli import cache, compare, explain, frontier, plan, profile, solve
from optckpt.cli.answers import DONE, INTERRUPTED, fail

# typer names the subclass only; its base lies in another package, depending on the version.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train under a memory budget: what to keep and what to compute again, at the least cost.",
)


app.command()(profile.profile)
app.command()(plan.plan)
app.command()(frontier.frontier)
app.command()(explain.explain)
app.command()(solve.solve)
app.command()(compare.compare)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; ends the process."""
    arguments = sys.argv[1:] or ["--help"]
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        # Names of files and operations may hold what the terminal's encoding does not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = app(arguments, prog_name="optckpt", standalone_mode=False)
        except UsageError as e:
            command = "optckpt" if e.ctx is None else e.ctx.command_path
            message = e.format_message().rstrip(".").replace("\n", " ")
            code = fail(f"{message}; see {command} --help", "UsageError", as_json)
        except (KeyboardInterrupt, typer.Abort):
            # Before or after the command itself, which answers Ctrl-C on its own.
            fail("interrupted", "KeyboardInterrupt", as_json)
            code = INTERRUPTED
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone; a second failure while Python flushes helps no one.
        _drop_output()
        code = 1
    except OSError as e:
        _drop_output()
        code = fail(f"{e.strerror or e}" + (f": {e.filename}" if e.filename else ""), "OSError")
    raise SystemExit(code or DONE)


def _drop_output() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"optckpt {optckpt.__version__}")
        raise typer.Exit(DONE)


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
