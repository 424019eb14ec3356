"""Several strategies on one model under one budget: predicted, and really run.

Nothing of TensorFlow is loaded here: the model is traced, costed and run by processes of
`optckpt.step_process`, so that no strategy's allocator has seen another strategy.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from optckpt.budget import Budget
from optckpt.config import Config, find_config
from optckpt.errors import BudgetError, InfeasibleBudgetError, OptckptError
from optckpt.graph import TrainingGraph
from optckpt.interruption import interruption
from optckpt.planner import widest
from optckpt.schedule import Plan
from optckpt.solvers import registry
from optckpt.solvers.floor import static_floor
from optckpt.step_process import StepError, StepProcess
from optckpt.traced import Traced, plan_of, sent, trace

PLAIN = "plain"
"""The row of the step as tf.gradients makes it, to which the others are compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy. Sizes are bytes, resident included; None: unknown, see `reason`."""

    strategy: str
    status: str
    """The certificate's, or "failed" if there is no plan."""
    reason: str | None = None
    """Why there is no plan, or why it could not be measured."""
    predicted_peak: int | None = None
    """What the device's allocator is predicted to report."""
    measured_peak: int | None = None
    """Highest allocator peak over some steps after the warm-up."""
    budget_met: bool | None = None
    """By the measured peak if there is one, else by the predicted one."""
    predicted_overhead: float | None = None
    """Extra time as a fraction of the plain step, by the costs."""
    time_ratio: float | None = None
    """Measured time / that of the plain step run in the same round; median over the rounds."""
    time_ratio_quartiles: tuple[float, float] | None = None
    gap: float | None = None
    """Predicted overhead less the best bound that any strategy proved; None over the budget."""
    plan_seconds: float | None = None
    re_executions: int | None = None
    gradients_equal: bool | None = None
    """Whether losses, gradients and state of some training steps are the plain step's, bit by
    bit."""
    gradient_difference: float | None = None
    """Largest difference of an element, relative to the largest element of its tensor."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. Sizes are bytes, resident included; times are seconds."""

    model: Mapping[str, Any]
    """The network's parameters."""
    device: str
    budget: int
    plain_peak: int
    """Predicted peak of the plain step."""
    floor: int
    """Proven lower bound on the peak of every schedule in base order that `solver.repeat`
    allows."""
    operations: int
    plain_seconds: float | None
    """Median measured time of the plain step."""
    trace_seconds: float
    cost_seconds: float
    rows: tuple[Row, ...]
    interrupted: bool = False
    graph: TrainingGraph | None = field(default=None, repr=False, compare=False)
    plans: Mapping[str, Plan] = field(default_factory=dict, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping; `graph` and `plans` are left out."""
        data = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("graph", "plans")
        }
        data["model"] = dict(self.model)
        data["rows"] = [asdict(row) for row in self.rows]
        return {"format": "optckpt.comparison", "version": 1, **data}

    @property
    def infeasible(self) -> str | None:
        """The message of a strategy that proved that nothing fits, if one did."""
        return next((r.reason for r in self.rows if r.status == "infeasible"), None)


def compare(
    config: Config | str | Path | None = None,
    budget: Budget | int | float | str | None = None,
    strategies: Sequence[str] | None = None,
    *,
    measure: bool = True,
    time_limit: float | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Trace the configured model, measure its costs, plan every strategy, and run each.

    Args:
        config: as `find_config` takes it.
        budget: instead of the configuration's; without either, the memory of the device.
        strategies: names, instead of the configuration's.
        measure: whether to run the steps, or only to predict.
        time_limit: seconds for each solve, instead of the configuration's.
        show: told in a few words what is being done.

    A strategy that does not fit is measured all the same; one that fails has its reason in its
    row. Ctrl-C ends the measuring; what there is by then is returned as `interrupted`.

    Raises:
        ConfigError, BudgetError: a mistake in the arguments.
        OptckptError: an unknown strategy, or a model that cannot be traced.
    """
    settings = find_config(config)
    if time_limit is not None:
        limits = settings.solver.model_copy(update={"time_limit": time_limit})
        settings = settings.model_copy(update={"solver": limits})
    names = list(dict.fromkeys(strategies or settings.compare.strategies))
    for name in names:
        registry.get(name)
    wanted = settings.budget if budget is None else budget
    parsed = None if wanted is None else Budget.parse(wanted)

    with tempfile.TemporaryDirectory(prefix="optckpt-") as folder:
        work = Path(folder)
        found = trace(settings, show)
        graph, peak = found.graph, found.plain_peak
        limit = found.budget(parsed)
        result = Comparison(
            model=settings.model.model_dump(mode="json"),
            device=found.device,
            budget=limit,
            plain_peak=peak,
            floor=static_floor(widest(graph, settings.solver.repeat)).bytes,
            operations=len(graph.operations),
            plain_seconds=None,
            trace_seconds=found.trace_seconds,
            cost_seconds=found.cost_seconds,
            rows=(),
            graph=graph,
        )
        rows = [
            Row(
                PLAIN,
                "feasible" if peak <= limit else "over-budget",
                predicted_peak=peak,
                predicted_overhead=0.0,
                re_executions=0,
            )
        ]
        plans: dict[str, Plan] = {}
        seconds = None
        interrupted = False
        try:
            for name in names:
                with interruption() as pressed:
                    row, plan = _plan(found, limit, name, settings, show)
                rows.append(row)
                if plan is not None:
                    plans[name] = plan
                    plan.save(work / f"{name}.json")
                if pressed():
                    raise KeyboardInterrupt
            if measure:
                seconds = _measure(rows, plans, settings, sent(settings), work, show)
        except KeyboardInterrupt:
            interrupted = True
    rows = [_judged(row, limit) for row in _with_gaps(rows, plans, graph)]
    return replace(
        result, plain_seconds=seconds, rows=tuple(rows), interrupted=interrupted, plans=plans
    )


def _plan(
    found: Traced,
    limit: int,
    name: str,
    settings: Config,
    show: Callable[[str], None],
) -> tuple[Row, Plan | None]:
    begin = time.perf_counter()
    try:
        plan = plan_of(found, settings, Budget(bytes=limit), strategy=name, show=show)
    except InfeasibleBudgetError as e:
        return _no_plan(name, "infeasible", str(e), begin), None
    except BudgetError as e:
        return _no_plan(name, "stopped", str(e), begin), None
    except OptckptError as e:
        return _no_plan(name, "failed", str(e), begin), None
    row = Row(
        name,
        plan.certificate.status,
        predicted_peak=plan.predicted_peak,
        predicted_overhead=plan.overhead,
        re_executions=len(plan.schedule) - len(found.graph.operations),
        plan_seconds=time.perf_counter() - begin,
    )
    return row, plan


def _no_plan(name: str, status: str, reason: str, begin: float) -> Row:
    return Row(name, status, reason, plan_seconds=time.perf_counter() - begin)


def _measure(
    rows: list[Row],
    plans: Mapping[str, Plan],
    settings: Config,
    config: Mapping[str, Any],
    work: Path,
    show: Callable[[str], None],
) -> float | None:
    """Run every planned step and replace the rows; returns the plain step's median seconds.

    At most two processes are alive: the plain step's, and that of the strategy at hand. Only one
    of them computes at any time.
    """
    plain_times: list[float] = []
    with StepProcess(show) as plain:
        plain_runs = True
        try:
            rows[0] = replace(rows[0], **_start(plain, PLAIN, None, settings, config, work, show))
            rows[0] = replace(rows[0], time_ratio=1.0)
        except StepError as e:
            rows[0] = replace(rows[0], reason=str(e))
            plain_runs = False
        for i, row in enumerate(rows):
            if row.strategy not in plans:
                continue
            with StepProcess(show) as process:
                try:
                    measured = _start(
                        process, row.strategy, plans[row.strategy], settings, config, work, show
                    )
                    rows[i] = replace(row, **measured)
                    if plain_runs:
                        equal, difference = _same(
                            work / f"{PLAIN}.npz", work / f"{row.strategy}.npz"
                        )
                        rows[i] = replace(
                            rows[i], gradients_equal=equal, gradient_difference=difference
                        )
                        show(f"{row.strategy}: timing")
                        ratios = _time_in_turns(plain, process, settings, plain_times)
                        quartiles = np.percentile(ratios, [25, 75])
                        rows[i] = replace(
                            rows[i],
                            time_ratio=statistics.median(ratios),
                            time_ratio_quartiles=(float(quartiles[0]), float(quartiles[1])),
                        )
                except StepError as e:
                    rows[i] = replace(rows[i], reason=str(e))
    return statistics.median(plain_times) if plain_times else None


def _start(
    process: StepProcess,
    name: str,
    plan: Plan | None,
    settings: Config,
    config: Mapping[str, Any],
    work: Path,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Build the step, take its peak, record its gradients under `work`."""
    show(f"{name}: building the step")
    process.ask("load", config=config)
    process.ask("build", plan=None if plan is None else str(work / f"{name}.json"))
    show(f"{name}: measuring the peak")
    peak = process.ask("peak", warmup=settings.compare.warmup)["peak"]
    show(f"{name}: comparing gradients")
    process.ask("gradients", path=str(work / f"{name}.npz"))
    return {"measured_peak": peak}


def _time_in_turns(
    plain: StepProcess, other: StepProcess, settings: Config, plain_times: list[float]
) -> list[float]:
    """Ratios of the times of the same round; who goes first alternates."""
    steps = settings.compare.steps
    ratios = []
    for number in range(-1, settings.compare.repeats):
        order = (plain, other) if number % 2 else (other, plain)
        taken = {id(p): float(p.ask("duration", steps=steps)["seconds"]) for p in order}
        if number >= 0:  # The first round wakes both processes up.
            plain_times.append(taken[id(plain)] / steps)
            ratios.append(taken[id(other)] / taken[id(plain)])
    return ratios


def _same(plain: Path, other: Path) -> tuple[bool, float]:
    """Whether all arrays agree in every bit, and their largest relative difference."""
    largest = 0.0
    equal = True
    with np.load(plain) as a, np.load(other) as b:
        if sorted(a.files) != sorted(b.files):
            return False, float("inf")
        for name in a.files:
            x, y = a[name], b[name]
            if x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes():
                continue
            equal = False
            if x.shape != y.shape:
                return False, float("inf")
            scale = float(np.max(np.abs(x), initial=0.0)) or 1.0
            largest = max(largest, float(np.max(np.abs(x - y), initial=0.0)) / scale)
    return equal, largest


def _with_gaps(rows: Sequence[Row], plans: Mapping[str, Plan], graph: TrainingGraph) -> list[Row]:
    """Rows with the distance to the best bound proven for what they fit into."""

    def best_bound(plan: Plan, target: int) -> float:
        covering = ("any order", "base order") if plan.schedule.in_base_order else ("any order",)
        backward = any(n and not graph.operations[o].forward for o, n in plan.schedule.steps())
        repeats = ("all",) if backward else ("all", "forward")
        # A bound for a larger target holds for a smaller one, not the other way round.
        return max(
            (
                p.certificate.bound
                for p in plans.values()
                if p.target is not None
                and p.target >= target
                and p.certificate.valid_for in covering
                and p.certificate.repeats in repeats
            ),
            default=0.0,
        )

    done = []
    for row in rows:
        plan = plans.get(row.strategy)
        if plan is not None and plan.target is not None and plan.live_peak <= plan.target:
            row = replace(row, gap=max(0.0, plan.overhead - best_bound(plan, plan.target)))
        done.append(row)
    return done


def _judged(row: Row, limit: int) -> Row:
    peak = row.predicted_peak if row.measured_peak is None else row.measured_peak
    return replace(row, budget_met=None if peak is None else peak <= limit)
