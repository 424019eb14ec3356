"""The command line: `optckpt solve` and `optckpt compare`.

Exit codes: 0 done; 2 a mistake of the user's, or a budget that no schedule was found for (one
line on stderr says which); 130 interrupted, with the best result so far printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import optckpt
from optckpt.budget import Budget, format_bytes
from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph, write_text
from optckpt.interruption import interruption
from optckpt.report import files, progress, table
from optckpt.schedule import Certificate, Plan, Schedule
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.floor import static_floor

DONE, MISTAKE, INTERRUPTED = 0, 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train under a memory budget: what to keep and what to compute again, at the least cost.",
)


def main() -> None:
    """Run the command line; ends the process."""
    try:
        app(prog_name="optckpt")
    except BrokenPipeError:
        # The reader of our output has gone; a second failure while Python flushes helps no one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


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


BudgetOption = Annotated[
    str, typer.Option("--budget", metavar="B", help='Bytes, "6GiB", or "80%" of the plain peak.')
]
TimeLimitOption = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Wall time for one solve."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, no table.")]


@app.command()
def solve(
    graph: Annotated[
        str,
        typer.Argument(
            metavar="GRAPH",
            help="A training graph: optckpt's JSON, or networkx node-link JSON; may be gzipped.",
        ),
    ],
    budget: BudgetOption,
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="S", help="How to choose what runs again.")
    ] = "optimal",
    time_limit: TimeLimitOption = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--schedule",
            metavar="OUT.json",
            help="Write the plan here: `schedule` holds the index of the operation of each "
            "execution, in order, and `names` its name. Plan.load reads it back.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the cheapest schedule of a graph within a budget."""
    with _mistakes():
        registry.get(strategy)
        limits = _solve_options(registry.SolveOptions(), time_limit)
        parsed = Budget.parse(budget)
        problem = _load_graph(graph)
        code, result, plan = _solve(problem, parsed, strategy, limits)
        if as_json:
            typer.echo(json.dumps(result))
        else:
            _output().print(table.solve_table(result, problem))
        if schedule is not None and plan is not None:
            _write_schedule(schedule, problem, plan)
        if code:
            _complain(_failure(problem, result, code))
            raise typer.Exit(code)


@app.command()
def compare(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A YAML file; without it, $OPTCKPT_CONFIG, ./optckpt.yaml or the defaults.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="B", help="Instead of the configuration's budget."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option("--strategies", metavar="A,B,C", help="Instead of the configuration's."),
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Predict only; run nothing but the costs.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for what is written: out/CONFIG."),
    ] = None,
    as_json: JsonOption = False,
    time_limit: TimeLimitOption = None,
) -> None:
    """Plan a reference network with several strategies, run each, and tell them apart.

    Prints a table, and writes it (comparison.json), the memory over the step (memory.png), the
    training graph and the plans.
    """
    from optckpt.compare import compare as run
    from optckpt.config import find_config

    with _mistakes():
        settings = find_config(config)
        names = None if strategies is None else _names(strategies)
        _solve_options(registry.SolveOptions(), time_limit)
        folder = out or Path("out") / (config.stem if config else settings.model.name)
        _make_folder(folder)
        with progress.status_line(Console(stderr=True)) as show:
            result = run(
                settings, budget, names, measure=not no_measure, time_limit=time_limit, show=show
            )
            show("writing the report")
            written = files.write_comparison(result, folder)
        if as_json:
            typer.echo(json.dumps(result.to_json()))
        else:
            console = _output()
            console.print(table.comparison_table(result))
            for line in table.remarks(result):
                console.print(line, style="yellow", markup=False, highlight=False)
            console.print("written: " + ", ".join(map(str, written)), markup=False, highlight=False)
        if result.interrupted:
            _complain("interrupted; what was found so far is printed")
            raise typer.Exit(INTERRUPTED)
        if result.infeasible is not None:
            _complain(result.infeasible)
            raise typer.Exit(MISTAKE)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptckptError("--strategies names no strategy; give one or more, joined by commas")
    for name in names:
        registry.get(name)
    return names


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OptckptError(f"cannot write into {folder}: {e.strerror}") from None


def _solve(
    graph: TrainingGraph, budget: Budget, strategy: str, options: registry.SolveOptions
) -> tuple[int, dict[str, Any], Plan | None]:
    """Exit code, the object to print, and the plan if there is a schedule."""
    base = Schedule.base(graph)
    plain = simulate(graph, base).peak
    limit = budget.resolve(plain)
    reached = registry.Progress(0.0, None, 0.0)
    interrupted = False

    with progress.status_line(Console(stderr=True)) as show:

        def on_progress(state: registry.Progress) -> None:
            nonlocal reached
            reached = state
            show(f"{strategy}: {progress.describe(state)}")

        show(f"{strategy}: solving {len(graph.operations)} operations")
        options = replace(options, progress=on_progress)
        try:
            with interruption() as was_interrupted:
                solution = registry.solve(graph, limit, strategy, options)
            interrupted = was_interrupted()
            cert, found = solution.certificate, solution.schedule
        except KeyboardInterrupt:
            # The strategy had nothing to hand over. The plain step is a schedule if it fits.
            interrupted = True
            found = base if plain <= limit else None
            cert = Certificate(
                solver=strategy,
                status="stopped" if found is None else "optimal",
                cost=None if found is None else 0.0,
                bound=reached.bound if found is None else 0.0,
                seconds=reached.seconds,
            )
    judged = None if found is None else simulate(graph, found)
    result = {
        "strategy": strategy,
        "status": cert.status,
        "budget": limit,
        "plain_peak": plain,
        "peak": None if judged is None else judged.peak,
        "overhead": None if judged is None else judged.overhead,
        "bound": cert.bound,
        "gap": cert.gap,
        "seconds_first": cert.seconds_first,
        "seconds": cert.seconds,
        "executions": None if found is None else len(found),
    }
    plan = None
    if found is not None and judged is not None:
        plan = Plan(
            fingerprint=graph.fingerprint,
            strategy=cert.solver,
            budget=limit,
            target=limit,
            plain_peak=plain,
            predicted_peak=judged.peak,
            live_peak=judged.peak,
            floor=static_floor(graph).bytes,
            overhead=judged.overhead,
            schedule=found,
            certificate=cert,
        )
    fits = judged is not None and judged.peak <= limit
    return INTERRUPTED if interrupted else DONE if fits else MISTAKE, result, plan


def _failure(graph: TrainingGraph, result: dict[str, Any], code: int) -> str:
    """Why `solve` did not end well, in one sentence."""
    limit, status = result["budget"], result["status"]
    if code == INTERRUPTED:
        return "interrupted; the best result so far is printed"
    asked = f"{format_bytes(limit)} ({limit} bytes)"
    if status == "over-budget":
        peak = result["peak"]
        return (
            f"strategy {result['strategy']!r} does not fit the budget of {asked}: its lowest peak "
            f"is {format_bytes(peak)} ({peak} bytes); raise the budget or use strategy 'optimal'"
        )
    floor = static_floor(graph)
    where = (
        f", at operation {graph.operations[floor.operation].name!r}" if floor.operation >= 0 else ""
    )
    low = f"every schedule needs at least {format_bytes(floor.bytes)} ({floor.bytes} bytes{where})"
    if status == "infeasible":
        return f"no schedule fits the budget of {asked}: {low}; raise the budget"
    return (
        f"no schedule within {asked} was found in {result['seconds']:.1f} s, and none was ruled "
        f"out; {low}; raise the budget or --time-limit"
    )


def _write_schedule(path: Path, graph: TrainingGraph, plan: Plan) -> None:
    """The plan's JSON and, beside its `schedule`, the `names` of the operations executed."""
    names = [graph.operations[o].name for o in plan.schedule.executions]
    try:
        write_text(path, json.dumps({**plan.to_json(), "names": names}))
    except OSError as e:
        raise OptckptError(f"cannot write the schedule {path}: {e.strerror}") from None


def _load_graph(path: str) -> TrainingGraph:
    from optckpt.frontends.nodelink import load_any

    return load_any(path)


def _solve_options(
    options: registry.SolveOptions, time_limit: float | None
) -> registry.SolveOptions:
    if time_limit is None:
        return options
    if not 0 < time_limit < float("inf"):
        raise OptckptError(f"--time-limit must be a positive number of seconds, got {time_limit}")
    return replace(options, time_limit=time_limit)


def _output() -> Console:
    """Of standard output; wide enough for our tables where that is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=100)


def _complain(message: str) -> None:
    typer.echo(f"optckpt: error: {message}", err=True)


@contextmanager
def _mistakes() -> Iterator[None]:
    """What is raised on purpose ends in a message and an exit code, not in a traceback."""
    try:
        yield
    except OptckptError as e:
        _complain(str(e))
        raise typer.Exit(MISTAKE) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
