"""Strategies on many graphs under many budgets: extra time, proven bounds, and how soon.

    python benchmarks/solvers.py [INSTANCE ...] [--budgets +10%,80%] [--strategies optimal,sqrt_n]

An INSTANCE is a reference network, a graph file, or a generator such as chain:1000 (see
instances.py); without any, all reference networks. Each answer is appended at once to
results.jsonl in the folder of --cache; what is there is not solved again, so that an interrupted
run goes on where it stopped. At the end solvers.md and solvers.json are written into the folder of
--out, about the instances, budgets and strategies of this call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from instances import NETWORKS, Instance, load

from optckpt.budget import format_bytes
from optckpt.errors import OptckptError
from optckpt.frontends.synthetic import chain
from optckpt.graph import write_text
from optckpt.interruption import interruption
from optckpt.simulate import simulate
from optckpt.solvers import registry
from optckpt.solvers.registry import Progress, SolveOptions

logger = logging.getLogger("optckpt.benchmarks.solvers")

BUDGETS = ("+10%", "+25%", "+50%", "+75%", "90%", "80%", "70%")
NOT_BY_DEFAULT = ("explicit", "milp")
"""One needs to be told what to keep, the other is for graphs of some dozen operations."""

Record = dict[str, Any]


def known_strategies() -> list[str]:
    """Those that run on any graph without being told more, as registered."""
    return [name for name in registry.names() if name not in NOT_BY_DEFAULT]


# --- Answers ---------------------------------------------------------------------------------


def answer(instance: Instance, limit: int, strategy: str, options: SolveOptions) -> Record:
    """What a strategy finds under `limit` bytes. Times are seconds, costs shares of the step.

    `seconds_best` is when the final schedule was known. A strategy that refuses the graph has the
    status "refused" and a `reason`.
    """
    best: tuple[float, float] | None = None

    def watch(state: Progress) -> None:
        nonlocal best
        if state.incumbent is not None and (best is None or state.incumbent < best[0]):
            best = state.incumbent, state.seconds

    try:
        solution = registry.solve(instance.graph, limit, strategy, replace(options, progress=watch))
    except OptckptError as e:
        return {"status": "refused", "reason": str(e)}
    cert = solution.certificate
    found = None if solution.schedule is None else simulate(instance.graph, solution.schedule)
    return {
        "status": cert.status,
        "peak": None if found is None else found.peak,
        "overhead": None if found is None else found.overhead,
        "re_executions": None if found is None else found.re_executions,
        "bound": cert.bound,
        "gap": cert.gap,
        "valid_for": cert.valid_for,
        "seconds_first": cert.seconds_first,
        "seconds_best": cert.seconds_first if best is None else best[1],
        "seconds": cert.seconds,
    }


@functools.cache
def warm_up(strategy: str) -> None:
    """Import the strategy and let it compile what it compiles at its first call."""
    # Whatever fails here fails in the question that follows, too.
    with contextlib.suppress(Exception):
        registry.solve(chain(12), 11 << 20, strategy, SolveOptions(time_limit=1.0))


def question(instance: Instance, limit: int, strategy: str, options: SolveOptions) -> Record:
    """What is asked; equal questions have equal keys."""
    asked = {
        "instance": instance.key,
        "budget": limit,
        "strategy": strategy,
        "time_limit": options.time_limit,
        "accepted_gap": options.gap,
        "seed": options.seed,
        "threads": options.threads,
    }
    return {"key": hashlib.sha256(json.dumps(asked).encode()).hexdigest(), **asked}


class Results:
    """The answers so far, by key, and the file to which new ones are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: dict[str, Record] = {}
        if not path.exists():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                self.records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                logger.warning("%s:%d cannot be read and is left out", path, number)

    def add(self, record: Record) -> None:
        self.records[record["key"]] = record
        # A run that was killed while writing has left half a line.
        before = self._path.read_bytes()[-1:] if self._path.exists() else b""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if before in (b"", b"\n") else "\n") + json.dumps(record) + "\n")


def run(
    instances: Iterable[Instance],
    budgets: Sequence[str],
    strategies: Sequence[str],
    options: SolveOptions,
    results: Results,
) -> tuple[list[Record], int]:
    """The records of all combinations, and how many of them had to be solved.

    Ctrl-C ends it with the records there are; the answer that it cut short is not kept. A strategy
    that crashes is logged, and has no record.
    """
    records: list[Record] = []
    solved = 0
    for instance in instances:
        facts = {
            "name": instance.name,
            "operations": len(instance.graph.operations),
            "plain_peak": instance.peak,
            "floor": instance.floor,
        }
        for text in budgets:
            limit = instance.budget(text)
            for strategy in strategies:
                asked = question(instance, limit, strategy, options)
                if asked["key"] not in results.records:
                    try:
                        with interruption() as pressed:
                            warm_up(strategy)
                            found = answer(instance, limit, strategy, options)
                        if pressed():
                            raise KeyboardInterrupt
                    except KeyboardInterrupt:
                        print("interrupted; the same command goes on from here", file=sys.stderr)
                        return records, solved
                    except Exception:
                        logger.exception("%s, %s, %s crashed", instance.name, text, strategy)
                        continue
                    results.add({**asked, **found})
                    solved += 1
                record = {**facts, "share": text, **results.records[asked["key"]]}
                records.append(record)
                print(line(record), flush=True)
    return records, solved


# --- The report ------------------------------------------------------------------------------

HEAD = """\
| instance | budget | bytes | strategy | status | peak, % | extra time, % | bound, % | gap, % \
| first, s | best, s | in all, s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(record: Record) -> str:
    """One row of the Markdown table."""

    def percent(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{100 * value:.{digits}f}"

    def seconds(name: str) -> str:
        value = record.get(name)
        return "-" if value is None else f"{value:.2f}"

    gap = record.get("gap")
    fits = record["status"] in ("optimal", "feasible")
    cells = [
        record["name"], budget_text(record["share"]), format_bytes(record["budget"]),
        record["strategy"], record["status"], percent(share_of_plain(record), 1),
        percent(record.get("overhead")),
        percent(record.get("bound")), percent(gap) if fits else "-",
        seconds("seconds_first") if fits else "-", seconds("seconds_best") if fits else "-",
        seconds("seconds"),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def share_of_plain(record: Record) -> float | None:
    """Peak of the schedule / peak of the plain step."""
    peak, plain = record.get("peak"), record["plain_peak"]
    return None if peak is None or not plain else peak / plain


def budget_text(share: str) -> str:
    """A budget for people."""
    return f"floor {share}" if share.startswith("+") else share


def with_gaps(records: Sequence[Record]) -> list[Record]:
    """The records with their `gap`: extra time less the best bound that holds for the schedule.

    Of the bounds that any strategy proved for the same instance and budget, those "in any order"
    hold for all schedules, the others for all that keep the base order. One that lies above the
    extra time found is of the latter kind, and the schedule has another order.
    """
    bounds: dict[tuple[str, int], list[float]] = {}
    for r in records:
        bounds.setdefault((r["instance"], r["budget"]), []).append(r.get("bound") or 0.0)
    found = []
    for r in records:
        cost = r.get("overhead")
        gap = None
        if cost is not None and r["status"] in ("optimal", "feasible"):
            held = [b for b in bounds[r["instance"], r["budget"]] if b <= cost + 1e-9]
            gap = max(0.0, cost - max(held, default=0.0))
        found.append({**r, "gap": gap})
    return found


def machine() -> dict[str, str | int]:
    """Where it ran: what matters for the times, nothing that names the machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        rows = (row.partition(":") for row in info.read_text(encoding="utf-8").splitlines())
        model = next((v.strip() for k, _, v in rows if k.strip() == "model name"), model)
    found: dict[str, str | int] = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
        os.cpu_count() or 1,
        "cpu": model,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }  # fmt: skip
    if hasattr(os, "sysconf"):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for package in ("optckpt", "ortools", "numba", "numpy", "tensorflow"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def report(records: Sequence[Record], options: SolveOptions, folder: Path) -> None:
    """Write solvers.md and solvers.json."""
    records = with_gaps(records)
    where = machine()
    size = where.get("memory")
    memory = f", {size / 2**30:.0f} GiB" if isinstance(size, int) else ""
    versions = ", ".join(
        f"{name} {where[name]}"
        for name in ("python", "optckpt", "ortools", "numba", "numpy", "tensorflow")
        if name in where
    )
    rows = "\n".join(map(line, records))
    graphs = {r["instance"]: r for r in records}
    about = "\n".join(
        f"| {r['name']} | {r['operations']} | {format_bytes(r['plain_peak'])} | "
        f"{format_bytes(r['floor'])} |"
        for r in graphs.values()
    )
    text = f"""\
# Strategies on many graphs

Made by `python benchmarks/solvers.py`; at most {options.time_limit:g} s for each solve, which may
stop at a gap of {100 * options.gap:g} %.

Machine: {where["cores"]} cores, {where["cpu"]}{memory}, {where["system"]}; {versions}. The
reference networks were traced and their operations measured on it.

- **budget**: floor +25% is the floor plus 25 % of the way to the plain step's peak; 80% is a share
  of that peak.
- **peak**: of the schedule, as a share of the plain step's.
- **extra time**: of the re-executions, as a share of the plain step's time; of a strategy that is
  over the budget, at the lowest peak that it reaches.
- **bound**: what the strategy itself has proven; **gap**: extra time less the best bound of any.
- **first, best, in all**: seconds until the first schedule within the budget, until the final one,
  and until the strategy ended.

| instance | operations | plain peak | floor |
| --- | --- | --- | --- |
{about}

{HEAD}
{rows}
"""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "solvers.md", text)
    data = {"format": "optckpt.solver-benchmark", "version": 1, "machine": where}
    write_text(folder / "solvers.json", json.dumps({**data, "results": records}, indent=1))


# --- The command -----------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = SolveOptions()
    parser.add_argument("instances", nargs="*", metavar="INSTANCE", default=list(NETWORKS))

    def option(name: str, default: Any, text: str, **kind: Any) -> None:
        parser.add_argument(name, default=default, help=f"{text} (%(default)s)", **kind)

    shown = ",".join(BUDGETS).replace("%", "%%")
    parser.add_argument(
        "--budgets", default=",".join(BUDGETS), metavar="A,B",
        help="+25%% is the floor plus 25 %% of what lies between it and the plain peak; or a share "
        f"of the peak, or bytes ({shown})",
    )  # fmt: skip
    option("--strategies", ",".join(known_strategies()), "names, joined by commas", metavar="A,B")
    option("--time-limit", defaults.time_limit, "for each solve", type=float, metavar="SECONDS")
    option(
        "--gap", defaults.gap, "share of the step to which a solve need not be exact", type=float
    )
    option("--seed", defaults.seed, "of what is random", type=int)
    option("--threads", defaults.threads, "of a solver; 0: as it likes", type=int)
    option("--cache", Path("out/benchmarks"), "for traced networks and answers", type=Path)
    option("--out", Path("docs/benchmarks"), "for the report", type=Path)
    parser.add_argument("--fresh", action="store_true", help="solve again what is known")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve what is not known yet and write the report.

    Returns the exit code: 0 if all was answered, 1 if some is missing (interrupted, crashed), 2 for
    a mistake in the arguments.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    given = parse(arguments)
    try:
        options = SolveOptions(given.time_limit, given.gap, given.seed, given.threads)
        strategies = list(dict.fromkeys(given.strategies.split(",")))
        for name in strategies:
            registry.get(name)
        given.cache.mkdir(parents=True, exist_ok=True)
        instances = [load(text, given.cache) for text in dict.fromkeys(given.instances)]
        budgets = list(dict.fromkeys(given.budgets.split(",")))
        for instance in instances:
            for text in budgets:
                instance.budget(text)
    except OptckptError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    results = Results(given.cache / "results.jsonl")
    if given.fresh:
        results.records.clear()
    print(HEAD)
    records, solved = run(instances, budgets, strategies, options, results)
    print(f"{solved} solved, {len(records) - solved} known", file=sys.stderr)
    report(records, options, given.out)
    return 0 if len(records) == len(instances) * len(budgets) * len(strategies) else 1


if __name__ == "__main__":
    sys.exit(main())
