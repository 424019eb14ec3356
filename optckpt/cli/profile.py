"""`optckpt profile`: what each operation costs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from optckpt.cli.answers import JsonOption, mistakes, output
from optckpt.cli.options import TargetArgument, settings_for
from optckpt.report import progress, words


def profile(
    target: TargetArgument = None,
    by: Annotated[
        str, typer.Option("--by", metavar="kind|layer|op", help="How operations are gathered.")
    ] = "kind",
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows shown.")] = 20,
    depth: Annotated[
        int,
        typer.Option("--depth", metavar="N", min=1, help="Scopes of a name that make a layer."),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure a training step operation by operation: seconds, activations, workspaces.

    Examples:

        optckpt profile configs/unet.yaml

        optckpt profile train.py:make_model --by layer --top 10
    """
    from optckpt.errors import OptckptError
    from optckpt.profile import profile as run
    from optckpt.traced import trace

    with mistakes(as_json) as answer:
        if by not in ("kind", "layer", "op"):
            raise OptckptError(f"--by must be 'kind', 'layer' or 'op', got {by!r}")
        settings = settings_for(target)
        with progress.status_line(Console(stderr=True)) as show:
            found = trace(settings, show)
        result = run(found.graph, depth)
        if as_json:
            answer(
                {
                    "name": found.name,
                    "device": found.device,
                    "plain_peak": found.plain_peak,
                    "resident": found.graph.resident,
                    **result.to_json(),
                }
            )
            return
        rows = {"kind": result.by_kind, "layer": result.by_layer, "op": result.single}[by]
        console = output()
        console.print(words.profile_table(found, result, rows[:top], by))
        if len(rows) > top:
            console.print(f"{len(rows) - top} more: --top {len(rows)}", highlight=False)
