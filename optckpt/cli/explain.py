"""`optckpt explain`: why a plan keeps what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optckpt.cli.answers import JsonOption, mistakes, output
from optckpt.errors import OptckptError
from optckpt.report import words
from optckpt.schedule import Plan


def explain(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan file, or the folder that it is in.")
    ],
    operation: Annotated[
        str | None,
        typer.Option("--op", metavar="NAME", help="One operation: its name, or a part of it."),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            metavar="FILE",
            help="The graph that it was made for; graph.json beside the plan.",
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option("--depth", metavar="N", min=1, help="Scopes of a name that make a layer."),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Say which layers are kept, which are computed again, and what sets peak and floor.

    Examples:

        optckpt explain out/unet/plan.json

        optckpt explain out/unet --op down1/conv1
    """
    from optckpt.explain import explain as run
    from optckpt.explain import explain_operation
    from optckpt.frontends.nodelink import load_any

    with mistakes(as_json) as answer:
        file = plan / "plan.json" if plan.is_dir() else plan
        made = Plan.load(file)
        beside = graph or file.parent / "graph.json"
        if not beside.exists():
            raise OptckptError(
                f"there is no {beside}: give the graph that {file} was made for with --graph"
            )
        step = load_any(str(beside))
        console = output()
        if operation is not None:
            one = explain_operation(step, made, operation, depth)
            if as_json:
                answer(one.to_json())
            else:
                console.print(words.operation_table(one))
                console.print(one.reason, markup=False, highlight=False)
            return
        found = run(step, made, depth)
        if as_json:
            answer(found.to_json())
            return
        console.print(words.layer_table(found))
        for line in (*words.certificate(made), *words.peak_and_floor(found)):
            console.print(line, markup=False, highlight=False)
