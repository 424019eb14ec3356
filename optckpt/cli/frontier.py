"""`optckpt frontier`: what less memory would cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from optckpt.cli.answers import INTERRUPTED, JsonOption, complain, mistakes, output
from optckpt.cli.options import (
    OutOption,
    TargetArgument,
    TimeLimitOption,
    folder_for,
    out_folder,
    settings_for,
)
from optckpt.errors import OptckptError
from optckpt.graph import write_text
from optckpt.report import progress, words


def frontier(
    target: TargetArgument = None,
    points: Annotated[
        int, typer.Option("--points", metavar="N", min=2, help="Budgets, floor to plain peak.")
    ] = 9,
    time_limit: TimeLimitOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the memory-time curve: the least extra time for each of several budgets.

    Prints the curve with its floor and its knee (where saving more begins to cost much more), and
    writes it as frontier.json and frontier.png. The sizes are those of live tensors; the time limit
    is for the whole curve.

    Examples:

        optckpt frontier configs/unet.yaml --points 5

        optckpt frontier train.py:make_model --time-limit 60 --json
    """
    from optckpt.interruption import interruption
    from optckpt.report.figures import frontier_figure
    from optckpt.solvers.frontier import frontier as run
    from optckpt.traced import trace

    with mistakes(as_json) as answer:
        settings = settings_for(target, time_limit)
        path = out_folder(out, target, settings)
        with folder_for(path) as folder, progress.status_line(Console(stderr=True)) as show:
            found = trace(settings, show)
            show(f"the frontier of {len(found.graph.operations)} operations")
            done = 0

            def tell(point: object) -> None:
                nonlocal done
                done += 1
                show(f"the frontier: {done} of {points} budgets")

            with interruption() as was_interrupted:
                curve = run(found.graph, points, settings.solve_options(), progress=tell)
            interrupted = was_interrupted()
            data = words.frontier_json(curve, found)
            try:
                write_text(folder / "frontier.json", json.dumps(data, indent=2))
                frontier_figure(curve, folder / "frontier.png", title=found.name)
            except OSError as e:
                raise OptckptError(f"cannot write into {folder}: {e.strerror or e}") from None
        if as_json:
            answer(data)
        else:
            console = output()
            console.print(words.frontier_table(curve, found))
            for line in words.frontier_words(curve):
                console.print(line, markup=False, highlight=False)
            written = ", ".join(str(folder / n) for n in ("frontier.json", "frontier.png"))
            console.print(f"written: {written}", markup=False, highlight=False, soft_wrap=True)
        if interrupted:
            complain("interrupted; the curve as far as it was found is printed")
            raise typer.Exit(INTERRUPTED)
