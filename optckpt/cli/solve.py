"""`optckpt solve`: the solver alone, on a graph in a file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from optckpt.budget import Budget, format_bytes
from optckpt.cli.answers import DONE, INTERRUPTED, MISTAKE, JsonOption, complain, mistakes, output
from optckpt.cli.options import BudgetOption, TimeLimitOption, check_strategy, seconds_of
from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph, write_text
from optckpt.interruption import interruption
from optckpt.planner import advice_when_stopped, covering, which_schedules, widest
from optckpt.report import progress, table
from optckpt.schedule import Certificate, Plan, Repeats, Schedule
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.floor import proven_floor


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
        check_strategy(strategy)
        seconds = seconds_of(time_limit)
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
