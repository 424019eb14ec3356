"""Cost models by name, and the one way to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optckpt.costs.cache import Cost, CostCache, default_cache
from optckpt.errors import OptckptError
from optckpt.graph import TrainingGraph
from optckpt.registry import Registry

ProgressCallback = Callable[[int, int, str], None]
"""Called with operations done, operations in all, and the name of the operation at hand."""


class Inner(Protocol):
    """What an operation that calls functions needs in memory beside its inputs and outputs."""

    def workspace(self, of: Callable[[Any], int] | None = None, /) -> int:
        """Bytes; `of`: the workspace of each `tf.Operation` inside."""


class Captured(Protocol):
    """What a cost model needs of a capture."""

    @property
    def graph(self) -> TrainingGraph: ...

    @property
    def units(self) -> Sequence[Sequence[Any]]:
        """The `tf.Operation`s of each operation of the graph, in execution order."""

    @property
    def inside(self) -> Mapping[int, Inner]:
        """For each operation of the graph that calls functions, what it needs inside."""

    @property
    def device(self) -> str:
        """Where operations without a device of their own run."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What a cost model may be told. Analytic models ignore what does not concern them."""

    cache: CostCache | None = None
    """None: nothing is read or stored."""
    progress: bool | ProgressCallback = True
    """True: a bar on stderr if that is a terminal and it takes longer than a second."""
    repeats: int = 3
    """Least number of timed executions per signature; the fastest counts."""


class CostModel(Protocol):
    """Signature of a cost model: one cost per operation of the graph."""

    def __call__(self, capture: Captured, options: CostOptions) -> Sequence[Cost]: ...


# Imported when first used, so that TensorFlow loads only when needed.
_models: Registry[CostModel] = Registry(
    "cost model",
    {
        "measured": "optckpt.costs.measured:measured",
        "flops": "optckpt.costs.flops:flops",
        "unit": "optckpt.costs.unit:unit",
    },
)


@dataclass(frozen=True, slots=True)
class _Default:
    name: str = field(default="the default cache")


DEFAULT_CACHE = _Default()
"""Stands for the process-wide cache, looked up when a model runs."""


def names() -> list[str]:
    """All known cost models, built-in ones first."""
    return _models.names()


def register(name: str, model: CostModel) -> None:
    """Add a cost model, or replace one, under `name` for this process."""
    _models.register(name, model)


def get(name: str) -> CostModel:
    """The cost model called `name`. Raises OptckptError listing the known names."""
    return _models.get(name)


def cost(
    capture: Captured,
    model: str | CostModel = "measured",
    *,
    cache: CostCache | str | Path | _Default | None = DEFAULT_CACHE,
    progress: bool | ProgressCallback = True,
    repeats: int = 3,
) -> TrainingGraph:
    """The captured graph with the seconds and workspace (bytes) of each operation filled in.

    Args:
        capture: what a frontend returned; only `graph`, `units` and `device` are used.
        model: `measured` (each distinct operation is run on its device), `flops` (a roofline
            from shapes), `unit` (one second each), the name of a registered model, or a model.
        cache: where measurements are kept: by default a file in the user's cache folder, or a
            `CostCache`, or a folder; None: measure afresh and store nothing.
        progress: True for a bar when it takes long, False for none, or a callable.
        repeats: least number of timed executions of each distinct operation.

    Raises:
        OptckptError: if the model is unknown. An operation that cannot be measured never
            raises: it is estimated, and the log says so.
    """
    run = get(model) if isinstance(model, str) else model
    if repeats < 1:
        raise OptckptError(f"repeats must be at least 1, got {repeats}")
    if isinstance(cache, _Default):
        store: CostCache | None = default_cache()
    elif cache is None or isinstance(cache, CostCache):
        store = cache
    else:
        store = CostCache(cache)
    costs = run(capture, CostOptions(store, progress, repeats))
    return capture.graph.with_costs([c.seconds for c in costs], [c.workspace for c in costs])
