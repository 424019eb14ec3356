"""`optckpt plan`: a budget in, a plan file out."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from optckpt.cli.answers import INTERRUPTED, JsonOption, complain, mistakes, output
from optckpt.cli.options import (
    AnyBudgetOption,
    OutOption,
    TargetArgument,
    TimeLimitOption,
    budget_of,
    check_strategy,
    folder_for,
    out_folder,
    settings_for,
)
from optckpt.errors import OptckptError
from optckpt.interruption import interruption
from optckpt.report import progress, words


def plan(
    target: TargetArgument = None,
    budget: AnyBudgetOption = None,
    max_overhead: Annotated[
        float | None,
        typer.Option(
            "--max-overhead",
            metavar="X",
            help="Instead of a budget: the fewest bytes for at most this share of extra time.",
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="S", help="Instead of the configuration's.")
    ] = None,
    time_limit: TimeLimitOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan one training step within a budget, and write the plan.

    Writes plan.json, which `optckpt.gradients(..., plan=...)`, `optckpt.keras.apply(...,
    plan=...)` and `optckpt explain` take, and the graph that it belongs to, graph.json. Ctrl-C
    ends the search with the best schedule so far.

    Examples:

        optckpt plan configs/unet.yaml --budget 80%

        optckpt plan train.py:make_model --budget 2GiB --json
    """
    from optckpt.planner import check_fits
    from optckpt.traced import plan_of, trace

    with mistakes(as_json) as answer:
        settings = settings_for(target, time_limit)
        if strategy is not None:
            check_strategy(strategy)
        wanted = budget_of(budget, settings) if budget or max_overhead is None else None
        path = out_folder(out, target, settings)
        with folder_for(path) as folder, progress.status_line(Console(stderr=True)) as show:
            found = trace(settings, show)
            with interruption() as was_interrupted:
                made = check_fits(
                    plan_of(found, settings, wanted, max_overhead, strategy, show=show)
                )
            interrupted = was_interrupted()
            try:
                made.save(folder / "plan.json")
                found.graph.save(folder / "graph.json")
            except OSError as e:
                raise OptckptError(f"cannot write into {folder}: {e.strerror or e}") from None
        if as_json:
            answer({**made.to_json(), "path": str(folder / "plan.json"), "device": found.device})
        else:
            console = output()
            console.print(words.plan_table(made, found.graph))
            for line in words.certificate(made):
                console.print(line, markup=False, highlight=False)
            console.print(
                f"written: {folder / 'plan.json'}, {folder / 'graph.json'}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if interrupted:
            complain("interrupted; the best schedule so far is written")
            raise typer.Exit(INTERRUPTED)
