"""`optckpt compare`: strategies side by side, predicted and measured."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from optckpt.budget import Budget
from optckpt.cli.answers import INTERRUPTED, MISTAKE, JsonOption, complain, mistakes, output
from optckpt.cli.options import (
    AnyBudgetOption,
    OutOption,
    TargetArgument,
    TimeLimitOption,
    folder_for,
    names_of,
    out_folder,
    seconds_of,
    settings_for,
)
from optckpt.errors import OptckptError
from optckpt.report import files, progress, table


def compare(
    target: TargetArgument = None,
    budget: AnyBudgetOption = None,
    strategies: Annotated[
        str | None,
        typer.Option("--strategies", metavar="A,B,C", help="Instead of the configuration's."),
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Predict only; run nothing but the costs.")
    ] = False,
    out: OutOption = None,
    as_json: JsonOption = False,
    time_limit: TimeLimitOption = None,
) -> None:
    """Plan a model with several strategies, run each, and tell them apart.

    Prints a table, and writes it (comparison.json), the memory over the step (memory.png), the
    training graph and the plans.
    """
    from optckpt.compare import compare as run

    with mistakes(as_json) as answer:
        settings = settings_for(target)
        names = None if strategies is None else names_of(strategies)
        seconds = seconds_of(time_limit)
        parsed = None if budget is None else Budget.parse(budget)
        path = out_folder(out, target, settings)
        with folder_for(path) as folder, progress.status_line(Console(stderr=True)) as show:
            result = run(
                settings, parsed, names, measure=not no_measure, time_limit=seconds, show=show
            )
            show("writing the report")
            try:
                written = files.write_comparison(result, folder)
                failed = None
            except OSError as e:
                written, failed = [], f"cannot write into {folder}: {e.strerror or e}"
        if as_json:
            answer(result.to_json())
        else:
            console = output()
            console.print(table.comparison_table(result))
            for line in table.remarks(result):
                console.print(line, style="yellow", markup=False, highlight=False)
            if written:
                paths = ", ".join(map(str, written))
                console.print(f"written: {paths}", markup=False, highlight=False)
        if failed is not None:
            raise OptckptError(failed)
        if result.interrupted:
            complain("interrupted; what was found so far is printed")
            raise typer.Exit(INTERRUPTED)
        if result.infeasible is not None:
            complain(result.infeasible)
            raise typer.Exit(MISTAKE)
