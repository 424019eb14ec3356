"""`optckpt cache`: what is kept between runs, listed and cleared."""

from __future__ import annotations

import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from optckpt.budget import format_bytes
from optckpt.cli.answers import JsonOption, mistakes, output
from optckpt.costs.cache import FILE_NAME, cache_folder
from optckpt.errors import OptckptError
from optckpt.plan_cache import PlanFile, clear_plans, plan_files, plan_folder
from optckpt.reuse import format_age

app = typer.Typer(
    invoke_without_command=True,
    help="List or clear the plans and costs that are kept between runs.",
)

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Instead of $OPTCKPT_CACHE_DIR, else the user's cache folder.",
    ),
]


@app.callback()
def show(context: typer.Context, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """List the plans and costs that are kept between runs."""
    if context.invoked_subcommand is not None:
        # `optckpt cache --folder DIR clear` says the same as `optckpt cache clear --folder DIR`.
        context.obj = (folder, as_json)
        return
    with mistakes(as_json) as answer:
        base = folder or cache_folder()
        try:
            plans = plan_files(plan_folder(base))
        except OSError as e:
            raise _unreadable(base, e) from None
        costs = _costs(base)
        if as_json:
            answer(
                {
                    "folder": str(base),
                    "plans": [_row(file) for file in plans],
                    "costs": costs,
                }
            )
            return
        console = output()
        if plans:
            console.print(_table(plans))
        total = sum(file.size for file in plans)
        entries = costs["entries"]
        console.print(
            f"{base}: {len(plans)} plan{'' if len(plans) == 1 else 's'} ({format_bytes(total)}), "
            f"{'a damaged file of' if entries is None else entries} measured costs "
            f"({format_bytes(costs['bytes'])})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def clear(
    context: typer.Context,
    plans: Annotated[bool, typer.Option("--plans", help="The plans alone.")] = False,
    costs: Annotated[bool, typer.Option("--costs", help="The measured costs alone.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete the plans and the measured costs that are kept, or one of both."""
    outer_folder, outer_json = context.obj or (None, False)
    as_json = as_json or outer_json
    with mistakes(as_json) as answer:
        base = folder or outer_folder or cache_folder()
        both = plans == costs
        what = "plans and measured costs" if both else "plans" if plans else "measured costs"
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise OptckptError(f"give --yes to delete the {what} in {base}")
            if not typer.confirm(f"Delete the {what} in {base}?"):
                return
        count = freed = 0
        measured: int | None = 0
        try:
            if both or plans:
                count, freed = clear_plans(plan_folder(base))
                with suppress(OSError):
                    plan_folder(base).rmdir()
            if both or costs:
                measured = _costs(base)["entries"]
                freed += _clear_costs(base)
        except OSError as e:
            raise _unreadable(base, e) from None
        if as_json:
            answer({"folder": str(base), "plans": count, "costs": measured, "bytes": freed})
        else:
            typer.echo(
                f"{base}: deleted {count} plan{'' if count == 1 else 's'} and "
                f"{'a damaged file of' if measured is None else measured} measured costs "
                f"({format_bytes(freed)})"
            )


def _unreadable(base: Path, error: OSError) -> OptckptError:
    return OptckptError(f"cannot use the cache {base}: {error.strerror or error}")


def _row(file: PlanFile) -> dict[str, Any]:
    """What is listed of one file: its latest plan. None but path and size if it is damaged."""
    stored = file.stored[0] if file.stored else None
    row: dict[str, Any] = {"path": str(file.path), "bytes": file.size, "damaged": stored is None}
    row["alternatives"] = len(file.stored)
    plan = None if stored is None else stored.plan
    row["fingerprint"] = None if plan is None else plan.fingerprint
    row["strategy"] = None if plan is None else plan.strategy
    row["budget"] = None if plan is None else plan.budget
    row["peak"] = None if plan is None else plan.predicted_peak
    row["plain_peak"] = None if plan is None else plan.plain_peak
    row["overhead"] = None if plan is None else plan.overhead
    row["gap"] = None if plan is None else plan.certificate.gap
    row["made_at"] = None if stored is None else stored.made_at
    return row


def _table(files: list[PlanFile]) -> Table:
    table = Table()
    table.add_column("fingerprint")
    table.add_column("strategy")
    for name in ("budget", "peak", "overhead", "age", "bytes"):
        table.add_column(name, justify="right")
    for file in files:
        row = _row(file)
        if row["damaged"]:
            table.add_row("unreadable", "-", "-", "-", "-", "-", str(file.size))
            continue
        table.add_row(
            row["fingerprint"][:12],
            row["strategy"],
            "none" if row["budget"] is None else format_bytes(row["budget"]),
            format_bytes(row["peak"]),
            f"{100 * row['overhead']:.2f} %",
            format_age(time.time() - row["made_at"]),
            str(file.size),
        )
    return table


def _cost_files(base: Path) -> list[Path]:
    names = [FILE_NAME + suffix for suffix in ("", "-wal", "-shm", ".corrupt")]
    return [base / name for name in names if (base / name).is_file()]


def _costs(base: Path) -> dict[str, Any]:
    """Path, number of entries (None if the file is damaged) and bytes of the measured costs."""
    path = base / FILE_NAME
    entries: int | None = 0
    if path.is_file():
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
                entries = int(file.execute("SELECT COUNT(*) FROM costs").fetchone()[0])
        except sqlite3.Error:
            entries = None
    size = sum(p.stat().st_size for p in _cost_files(base))
    return {"path": str(path), "entries": entries, "bytes": size}


def _clear_costs(base: Path) -> int:
    """Delete the measured costs; returns the bytes freed."""
    freed = 0
    for path in _cost_files(base):
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    return freed
