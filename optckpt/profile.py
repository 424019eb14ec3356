"""Where a step's time and memory go: by operation type, by layer, and the dearest operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optckpt.graph import TrainingGraph
from optckpt.layers import layers_of


@dataclass(frozen=True, slots=True)
class Share:
    """What some operations take. Times are seconds, sizes bytes."""

    name: str
    operations: int
    seconds: float
    fraction: float
    """Of the step's time."""
    activations: int
    """Bytes that forward operations among them write and the backward pass reads."""
    workspace: int
    """The largest of one of them."""


@dataclass(frozen=True)
class Profile:
    """A step's operations, gathered in three ways, each the dearest first."""

    seconds: float
    """Of all operations, one after the other."""
    operations: int
    by_kind: tuple[Share, ...]
    by_layer: tuple[Share, ...]
    single: tuple[Share, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping."""
        return asdict(self)


def profile(graph: TrainingGraph, depth: int = 1) -> Profile:
    """What the operations of a costed graph take; `depth`: scopes of a name that make a layer."""
    ops = graph.operations
    return Profile(
        seconds=graph.seconds,
        operations=len(ops),
        by_kind=_gathered(graph, [op.kind for op in ops]),
        by_layer=_gathered(graph, layers_of(graph, depth)),
        single=_gathered(graph, [op.name for op in ops]),
    )


def _gathered(graph: TrainingGraph, names: Sequence[str]) -> tuple[Share, ...]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        groups[name].append(i)
    total = graph.seconds or 1.0

    def activations(i: int) -> int:
        op = graph.operations[i]
        return sum(
            graph.buffers[b].size
            for b in (op.writes if op.forward else ())
            if any(not graph.operations[r].forward for r in graph.readers[b])
        )

    shares = []
    for name, members in groups.items():
        seconds = sum(graph.operations[i].seconds for i in members)
        shares.append(
            Share(
                name=name,
                operations=len(members),
                seconds=seconds,
                fraction=seconds / total,
                activations=sum(map(activations, members)),
                workspace=max(graph.operations[i].workspace for i in members),
            )
        )
    return tuple(sorted(shares, key=lambda s: -s.seconds))
