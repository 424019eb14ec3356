"""The command line: `optckpt solve`, `optckpt compare` and `optckpt cache`.

Exit codes: 0 done; 2 a mistake of the user's, or a budget that no schedule was found for (one
line on stderr says which); 130 interrupted, with the best result so far printed if there is one.
With --json, one object is printed in any case: the result, or {"error": the line, "kind": its
class}.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

import optckpt
from optckpt import cli_cache
from optckpt.budget import Budget, format_bytes
from optckpt.cli_answers import (
    DONE,
    INTERRUPTED,
    MISTAKE,
    JsonOption,
    complain,
    fail,
    mistakes,
    output,
)
from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph, write_text
from optckpt.interruption import interruption
from optckpt.planner import advice_when_stopped, covering, which_schedules, widest
from optckpt.report import files, progress, table
from optckpt.schedule import Certificate, Plan, Repeats, Schedule
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.floor import proven_floor

# typer names the subclass only; its base lies in another package, depending on the version.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train under a memory budget: what to keep and what to compute again, at the least cost.",
)


app.add_typer(cli_cache.app, name="cache")


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


BudgetOption = Annotated[
    str, typer.Option("--budget", metavar="B", help='Bytes, "6GiB", or "80%" of the plain peak.')
]
TimeLimitOption = Annotated[
    str | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Wall time for one solve."),
]


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
    order: Annotated[
        str,
        typer.Option(
            "--order",
            metavar="fixed|free",
            help="Keep the graph's order of operations, or change it where that helps.",
        ),
    ] = registry.SolveOptions().order,
    repeat: Annotated[
        str,
        typer.Option(
            "--repeat",
            metavar="forward|all",
            help="Execute again forward operations alone, or all that the graph allows.",
        ),
    ] = "all",
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
    with mistakes(as_json) as answer:
        _check_strategy(strategy)
        seconds = _seconds(time_limit)
        limits = registry.SolveOptions(order=cast(registry.Order, order))
        if repeat not in get_args(Repeats):
            raise OptckptError(f"--repeat must be 'forward' or 'all', got {repeat!r}")
        if seconds is not None:
            limits = replace(limits, time_limit=seconds)
        parsed = Budget.parse(budget)
        if schedule is not None:
            _check_target(schedule, graph)
        problem = _load_graph(graph)
        repeats = cast(Repeats, repeat)
        code, result, plan, barred = _solve(problem, parsed, strategy, limits, repeats)
        try:
            # First, because a reader of the output may be gone.
            if schedule is not None and plan is not None:
                _write_schedule(schedule, problem, plan)
        finally:
            if as_json:
                answer(result)
            else:
                output().print(table.solve_table(result, problem))
        if code:
            complain(_failure(problem, result, code, repeats, parsed, barred))
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

    with mistakes(as_json) as answer:
        settings = find_config(config)
        names = None if strategies is None else _names(strategies)
        seconds = _seconds(time_limit)
        parsed = None if budget is None else Budget.parse(budget)
        path = out or Path("out") / (config.stem if config else settings.model.name)
        with _folder(path) as folder, progress.status_line(Console(stderr=True)) as show:
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


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptckptError("--strategies names no strategy; give one or more, joined by commas")
    for name in names:
        _check_strategy(name)
    return names


def _check_strategy(name: str) -> None:
    """Refuse a strategy that is unknown, or that nobody can use from here."""
    registry.get(name)
    if name == "explicit":
        raise OptckptError(
            "strategy 'explicit' is for Python, where SolveOptions(checkpoints=...) names the "
            "buffers to keep: use another strategy on the command line"
        )


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """A folder that can be written into; if nothing was, what was created for it is gone again."""
    created = [p for p in (path, *path.parents) if not p.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as e:
            raise OptckptError(f"cannot write into {path}: {e.strerror or e}") from None
        yield path
    finally:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()


def _check_target(path: Path, graph: str) -> None:
    """Refuse a file for the schedule that cannot be written, before anything is solved."""
    problem = None
    try:
        folder = Path(os.path.realpath(path)).parent
        if path.is_dir():
            problem = "it is a folder"
        elif not folder.is_dir():
            problem = f"there is no folder {folder}"
        elif path.exists() and not path.is_file():
            pass  # A device or a pipe, which is written to.
        elif not os.access(folder, os.W_OK):
            problem = f"the folder {folder} cannot be written into"
        elif path.exists() and Path(graph).exists() and path.samefile(graph):
            problem = "it is the graph itself"
    except OSError as e:
        problem = e.strerror or str(e)
    if problem is not None:
        raise OptckptError(f"cannot write the schedule {path}: {problem}")


def _solve(
    graph: TrainingGraph,
    budget: Budget,
    strategy: str,
    options: registry.SolveOptions,
    repeats: Repeats,
) -> tuple[int, dict[str, Any], Plan | None, tuple[int, ...]]:
    """Exit code, the object to print, the plan if there is a schedule, and `Solution.barred`."""
    allowed = widest(graph, repeats)
    base = Schedule.base(graph)
    plain = simulate(graph, base).peak
    limit = budget.resolve(plain)
    reached = registry.Progress(0.0, None, 0.0)
    interrupted = False
    barred: tuple[int, ...] = ()

    with progress.status_line(Console(stderr=True)) as show:

        def on_progress(state: registry.Progress) -> None:
            nonlocal reached
            reached = state
            show(f"{strategy}: {progress.describe(state)}")

        show(f"{strategy}: solving {len(graph.operations)} operations")
        options = replace(options, progress=on_progress)
        begin = time.perf_counter()
        try:
            with interruption() as was_interrupted:
                solution = registry.solve(allowed, limit, strategy, options)
            interrupted = was_interrupted()
            cert, found, barred = solution.certificate, solution.schedule, solution.barred
        except KeyboardInterrupt:
            # The strategy had nothing to hand over. The plain step is a schedule if it fits.
            interrupted = True
            found = base if plain <= limit else None
            cert = Certificate(
                solver=strategy,
                status="stopped" if found is None else "optimal",
                cost=None if found is None else 0.0,
                bound=reached.bound if found is None else 0.0,
                seconds=time.perf_counter() - begin,
            )
    cert = covering(cert, allowed, graph)
    judged = None if found is None else simulate(graph, found)
    result = {
        "strategy": strategy,
        "order": options.order,
        "repeat": repeats,
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
            floor=proven_floor(allowed, options.order).bytes,
            overhead=judged.overhead,
            schedule=found,
            certificate=cert,
        )
    fits = judged is not None and judged.peak <= limit
    return INTERRUPTED if interrupted else DONE if fits else MISTAKE, result, plan, barred


def _failure(
    graph: TrainingGraph,
    result: dict[str, Any],
    code: int,
    repeats: Repeats,
    budget: Budget,
    barred: tuple[int, ...],
) -> str:
    """Why `solve` did not end well, in one sentence."""
    limit, status = result["budget"], result["status"]
    if code == INTERRUPTED:
        if result["executions"] is None:
            return "interrupted; no schedule was found yet"
        return "interrupted; the best result so far is printed"
    asked = f"{format_bytes(limit)} ({limit} bytes)"
    if status == "over-budget":
        peak = result["peak"]
        return (
            f"strategy {result['strategy']!r} does not fit the budget of {asked}: its lowest peak "
            f"is {format_bytes(peak)} ({peak} bytes); raise the budget or use strategy 'optimal'"
        )
    floor = proven_floor(widest(graph, repeats), result["order"])
    where = floor.place(graph)
    low = (
        f"{which_schedules(graph, repeats)} at least {format_bytes(floor.bytes)} "
        f"({floor.bytes} bytes{where and f', at {where}'})"
    )
    if status == "infeasible":
        share = f', or write "{limit}%" if a share of the plain step\'s peak is meant'
        hint = share if limit <= 100 and budget.fraction is None else ""
        return f"no schedule fits the budget of {asked}: {low}; raise the budget{hint}"
    return (
        f"no schedule within {asked} was found in {result['seconds']:.1f} s, and none was ruled "
        f"out; {low}; {advice_when_stopped(graph, barred, '--time-limit')}"
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


def _seconds(time_limit: str | None) -> float | None:
    if time_limit is None:
        return None
    try:
        return registry.SolveOptions(float(time_limit)).time_limit
    except ValueError:
        raise OptckptError(
            f"--time-limit must be a number of seconds, got {time_limit!r}"
        ) from None
    except OptckptError as e:
        raise OptckptError(str(e).replace("time_limit", "--time-limit", 1)) from None
