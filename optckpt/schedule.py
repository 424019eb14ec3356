"""Schedule, Certificate and Plan: what a solver answers and what the backend follows."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from optckpt.budget import format_bytes
from optckpt.errors import PlanError
from optckpt.fields import NULL, NUMBER, OBJECT, TEXT, WHOLE, Kind, Reader
from optckpt.graph import TrainingGraph, write_text

PLAN_FORMAT = "optckpt.plan"
PLAN_VERSION = 1

Status = Literal["optimal", "feasible", "over-budget", "infeasible", "stopped"]
"""optimal: proven within the tolerance; feasible: fits, gap open (or a heuristic);
over-budget: a heuristic's schedule that does not fit; infeasible: proven that none fits;
stopped: a limit was reached before any fitting schedule was found."""

Repeats = Literal["forward", "all"]
"""Which operations a schedule may execute again: those of the forward pass alone, or backward ones
as well."""


Source = Literal["solved", "cache", "cache, other costs"]
"""Where a plan is from. solved: made for this step; cache: solved before, with the same costs;
"cache, other costs": solved before with other costs or sizes, of whose bound as much is left as is
proven for the present ones."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The executions of a step, in order, each the index of an operation of the graph.

    Every operation appears at least once; its first appearance is the original execution,
    later ones are re-executions. Live ranges, peak and cost are derived by `simulate`.
    """

    executions: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.executions)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield (operation, how many times it was executed before)."""
        seen: dict[int, int] = {}
        for op in self.executions:
            count = seen.get(op, 0)
            yield op, count
            seen[op] = count + 1

    @property
    def in_base_order(self) -> bool:
        """Whether the first executions of the operations follow the graph's order."""
        first = [op for op, count in self.steps() if not count]
        return first == sorted(first)

    def out_of(self, order: Sequence[int]) -> Schedule:
        """What this schedule of `graph.in_order(order)` is as one of `graph`."""
        return Schedule(tuple(order[o] for o in self.executions))

    @classmethod
    def base(cls, graph: TrainingGraph) -> Schedule:
        """The plain step: every operation once, in base order."""
        return cls(tuple(range(len(graph.operations))))


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a solver claims and what it has proven. Fractions are of the plain step's time."""

    solver: str
    status: Status
    cost: float | None
    """Extra time of the schedule as a fraction of the plain step; None without a schedule."""
    bound: float
    """Proven lower bound on the extra time of every schedule covered by `valid_for`."""
    seconds: float
    """Wall time spent solving."""
    seconds_first: float | None = None
    """Wall time until the first schedule within the budget; None if there was none."""
    valid_for: str = "base order"
    """What the bound covers: schedules in the given base order, or in any order."""
    repeats: Repeats = "all"
    """Which operations the schedules it covers may execute again: forward ones alone, or all that
    the graph marks as repeatable."""

    @property
    def gap(self) -> float | None:
        """cost - bound, never negative; None without a schedule."""
        return None if self.cost is None else max(0.0, self.cost - self.bound)


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's answer: a schedule (None if it found none) and its certificate."""

    schedule: Schedule | None
    certificate: Certificate
    interrupted: bool = False
    """Whether Ctrl-C ended the search: whoever searches on has to stop."""
    barred: tuple[int, ...] = ()
    """Repeatable operations that the search did not repeat in the end, because it had repeated
    some of them later than `Operation.repeat_before` allows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one graph under one budget, with its certificate. Sizes are bytes."""

    fingerprint: str
    """Of the TrainingGraph it was made for."""
    strategy: str
    budget: int | None
    """Peak bytes allowed, resident included; None: the strategy ran without a budget."""
    target: int | None
    """Live bytes solved for: the budget less a margin and what the allocator loses in chunks; what
    the certificate's bound refers to."""
    plain_peak: int
    """Peak of the plain step, predicted in the same way as `predicted_peak`."""
    predicted_peak: int
    """Peak that the device's allocator is predicted to report, resident included."""
    live_peak: int
    """Simulated peak of the live bytes alone, resident included; what the certificate is about."""
    floor: int
    """Proven lower bound on the peak, resident included: of every schedule in base order, or in
    any order if the strategy was free to change it. Also of schedules that execute backward
    operations again, unless these were ruled out."""
    overhead: float
    """Extra time / time of the plain step, by the measured costs."""
    schedule: Schedule = field(repr=False)
    certificate: Certificate
    source: Source = "solved"
    calibrated: tuple[int, ...] = ()
    """Peaks above the budget that the device reported in steps under earlier plans; because of
    them this plan was made for less (see `optckpt.calibration`)."""

    def __str__(self) -> str:
        """One line for people."""
        certificate = self.certificate
        allowed = "no budget" if self.budget is None else f"budget {format_bytes(self.budget)}"
        covered = f"{certificate.valid_for}, {certificate.repeats} operations repeated"
        return (
            f"{self.strategy} ({certificate.status}): {allowed}, predicted peak "
            f"{format_bytes(self.predicted_peak)} (plain step {format_bytes(self.plain_peak)}, "
            f"floor {format_bytes(self.floor)}), {100 * self.overhead:.2f} % more time, at least "
            f"{100 * certificate.bound:.2f} % needed ({covered})"
        )

    def check_graph(self, graph: TrainingGraph) -> None:
        """Raise PlanError unless the plan was made for this graph."""
        if graph.fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another graph (fingerprint {self.fingerprint[:12]}, this "
                f"graph has {graph.fingerprint[:12]} and {len(graph.operations)} operations): the "
                "structure, a size or a dtype differs; make a new plan for this graph"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping that `from_json` reads back to an equal plan."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["schedule"] = list(self.schedule.executions)
        data["calibrated"] = list(self.calibrated)
        data["certificate"] = asdict(self.certificate)
        return {"format": PLAN_FORMAT, "version": PLAN_VERSION, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_json` wrote. Raises PlanError on another format, version or bad field."""
        _JSON.header(data, PLAN_FORMAT, PLAN_VERSION)

        def read(key: str, kind: Kind) -> Any:
            return _JSON.field(data, key, kind, "the plan")

        return cls(
            fingerprint=read("fingerprint", TEXT),
            strategy=read("strategy", TEXT),
            budget=read("budget", WHOLE | NULL),
            target=read("target", WHOLE | NULL),
            plain_peak=read("plain_peak", WHOLE),
            predicted_peak=read("predicted_peak", WHOLE),
            live_peak=read("live_peak", WHOLE),
            floor=read("floor", WHOLE),
            overhead=float(read("overhead", NUMBER)),
            schedule=Schedule(_JSON.items(data, "schedule", WHOLE, "the plan")),
            certificate=_certificate(read("certificate", OBJECT)),
            source=_JSON.field(data, "source", _SOURCE, "the plan", "solved"),
            calibrated=_JSON.items(data, "calibrated", WHOLE, "the plan", []),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by `save`. Raises PlanError naming the file."""
        data = _JSON.load(path)
        try:
            return cls.from_json(data)
        except PlanError as e:
            raise PlanError(f"{path}: {e}") from None


_JSON = Reader("plan", PlanError)
_REPEATS = Kind(f"one of {', '.join(get_args(Repeats))}", lambda value: value in get_args(Repeats))
_SOURCE = Kind(f"one of {', '.join(get_args(Source))}", lambda value: value in get_args(Source))
_STATUS = Kind(f"one of {', '.join(get_args(Status))}", lambda value: value in get_args(Status))
_CERTIFICATE = {
    "solver": TEXT,
    "status": _STATUS,
    "cost": NUMBER | NULL,
    "bound": NUMBER,
    "seconds": NUMBER,
    "seconds_first": NUMBER | NULL,
    "valid_for": TEXT,
    "repeats": _REPEATS,
}
_LATER: dict[str, tuple[Any, ...]] = {"repeats": ("all",)}
"""What the fields mean that older plans do not have."""


def _certificate(data: Mapping[str, Any]) -> Certificate:
    where = "the certificate"
    for key in data:
        if key not in _CERTIFICATE:
            raise PlanError(f"plan has a malformed field: {where} has no {reprlib.repr(key)}")
    return Certificate(
        **{
            key: _JSON.field(data, key, kind, where, *_LATER.get(key, ()))
            for key, kind in _CERTIFICATE.items()
        }
    )
