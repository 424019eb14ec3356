"""The training graph: operations in a base order and the buffers between them.

Framework-free and frozen. Sizes are bytes, times are seconds. A graph comes from a
frontend, gets its costs from `optckpt.costs`, and is what solvers and the simulator see.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from optckpt.errors import GraphError
from optckpt.fields import FLAG, NUMBER, OBJECT, TEXT, WHOLE, Kind, Reader

FORMAT = "optckpt.training-graph"
VERSION = 1
MOST_BYTES = 2**53
"""Limit on the sum of all sizes of a graph; sums up to here are exact as floats, too."""


_JSON = Reader("training graph", GraphError)


def _is_buffer(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and TEXT.fits(row[0])
        and WHOLE.fits(row[1])
        and TEXT.fits(row[2])
    )


_BUFFER = Kind("[name, bytes, dtype]", _is_buffer)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of device memory written by one operation; several tensors (views) may share it."""

    name: str
    size: int
    """Bytes charged while the buffer is in memory."""
    dtype: str = ""
    """Element type, for the fingerprint only."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One schedulable unit of work. Buffers and operations are referred to by index."""

    name: str
    kind: str
    """The framework's operation type (`Conv2D`), or types joined by `+` for a unit."""
    seconds: float
    """Time of one execution."""
    reads: tuple[int, ...]
    """Buffers read. Resident data (variables, inputs, constants) are not listed."""
    writes: tuple[int, ...]
    """Buffers written; every buffer has exactly one writer."""
    workspace: int = 0
    """Bytes needed during the execution beside the buffers read and written."""
    inplace: tuple[int, ...] = ()
    """Buffers among `reads`, any of which `writes[0]` may take over if it dies here."""
    forward: bool = True
    repeatable: bool = True
    """Whether the operation may be executed more than once without changing any result."""
    after: tuple[int, ...] = ()
    """Operations that must have been executed before (control dependencies)."""
    repeat_before: tuple[int, ...] = ()
    """Operations that must not have been executed yet when this one is executed again: they
    overwrite what it reads (a variable)."""


@dataclass(frozen=True)
class TrainingGraph:
    """A training step: forward and backward operations in a valid execution order.

    Raises:
        GraphError: on construction, if an index is out of range, a buffer has no writer or
            two, an operation reads what is written later, a size or time is negative, or they add
            up to too much (MOST_BYTES, infinity).
    """

    operations: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    outputs: tuple[int, ...] = ()
    """Buffers that must be in memory when the step ends (loss, gradients)."""
    resident: int = 0
    """Bytes in memory before, during and after the step (parameters, inputs)."""
    name: str = ""
    producer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Index of the operation that writes each buffer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "producer", self._check())

    def _check(self) -> tuple[int, ...]:
        n_buffers = len(self.buffers)
        producer = [-1] * n_buffers
        for b in self.buffers:
            if b.size < 0:
                raise GraphError(f"buffer {b.name!r} has a negative size ({b.size} bytes)")
        if self.resident < 0:
            raise GraphError(f"resident bytes must not be negative, got {self.resident}")
        for i, op in enumerate(self.operations):
            # `not >=` also catches NaN.
            if not op.seconds >= 0 or op.seconds == float("inf"):
                raise GraphError(f"operation {op.name!r} has an unusable time ({op.seconds} s)")
            if op.workspace < 0:
                raise GraphError(f"operation {op.name!r} has a negative workspace")
            for b_index in (*op.reads, *op.writes):
                if not 0 <= b_index < n_buffers:
                    raise GraphError(f"operation {op.name!r} refers to unknown buffer {b_index}")
            for b_index in op.reads:
                if producer[b_index] < 0:
                    raise GraphError(
                        f"operation {op.name!r} (number {i}) reads buffer "
                        f"{self.buffers[b_index].name!r} before any operation has written it"
                    )
            for b_index in op.inplace:
                if b_index not in op.reads:
                    raise GraphError(
                        f"operation {op.name!r} cannot reuse buffer "
                        f"{self.buffers[b_index].name!r}: it does not read it"
                    )
            for j in op.after:
                if not 0 <= j < i:
                    raise GraphError(
                        f"operation {op.name!r} must run after number {j}, not before it"
                    )
            for j in op.repeat_before:
                if not 0 <= j < len(self.operations) or j == i:
                    raise GraphError(
                        f"operation {op.name!r} cannot be repeated before unknown operation {j}"
                    )
            for b_index in op.writes:
                if producer[b_index] >= 0:
                    first = self.operations[producer[b_index]].name
                    raise GraphError(
                        f"buffer {self.buffers[b_index].name!r} is written by two operations: "
                        f"{first!r} and {op.name!r}"
                    )
                producer[b_index] = i
        for b_index, p in enumerate(producer):
            if p < 0:
                raise GraphError(
                    f"buffer {self.buffers[b_index].name!r} is written by no operation"
                )
        for b_index in self.outputs:
            if not 0 <= b_index < n_buffers:
                raise GraphError(f"unknown output buffer {b_index}")
        spaces = (op.workspace for op in self.operations)
        if self.resident + sum(b.size for b in self.buffers) + sum(spaces) > MOST_BYTES:
            raise GraphError(f"the graph's sizes add up to more than {MOST_BYTES} bytes")
        if self.seconds == float("inf"):
            raise GraphError("the operations' times add up to infinity")
        return tuple(producer)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each buffer, the operations that read it, in base order."""
        found: list[list[int]] = [[] for _ in self.buffers]
        for i, op in enumerate(self.operations):
            for b in dict.fromkeys(op.reads):
                found[b].append(i)
        return tuple(tuple(r) for r in found)

    @cached_property
    def seconds(self) -> float:
        """Time of the plain step: every operation once."""
        return sum(op.seconds for op in self.operations)

    @cached_property
    def first_backward(self) -> int:
        """Index of the first operation that is not forward (the number of operations if none)."""
        for i, op in enumerate(self.operations):
            if not op.forward:
                return i
        return len(self.operations)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over structure, kinds, sizes and dtypes; names and costs do not count.

        Two traces of the same function have the same fingerprint although their operation
        names may differ; so have two measurements of the same graph.
        """
        digest = hashlib.sha256(f"{FORMAT}/{VERSION}".encode())
        rows: list[Any] = [
            [op.kind, op.reads, op.writes, op.inplace, op.forward, op.repeatable, op.after]
            for op in self.operations
        ]
        limits = [[i, op.repeat_before] for i, op in enumerate(self.operations) if op.repeat_before]
        if limits:
            rows.append(limits)
        rows.append([(b.size, b.dtype) for b in self.buffers])
        rows.append(self.outputs)
        digest.update(json.dumps(rows, separators=(",", ":")).encode())
        return digest.hexdigest()

    def with_costs(
        self, seconds: Sequence[float], workspace: Sequence[int] | None = None
    ) -> TrainingGraph:
        """The same graph with other times (seconds) and, if given, workspaces (bytes)."""
        if len(seconds) != len(self.operations):
            raise GraphError(f"{len(seconds)} times given for {len(self.operations)} operations")
        spaces = [op.workspace for op in self.operations] if workspace is None else workspace
        return replace(
            self,
            operations=tuple(
                replace(op, seconds=float(s), workspace=int(w))
                for op, s, w in zip(self.operations, seconds, spaces, strict=True)
            ),
        )

    @cached_property
    def only_forward_repeats(self) -> TrainingGraph:
        """The same graph in which forward operations alone may be executed again.

        This very graph if no other operation is repeatable. Its schedules are schedules of this
        graph; what is proven of all of its schedules says nothing about the others of this one.
        """
        if all(op.forward or not op.repeatable for op in self.operations):
            return self
        return replace(
            self,
            operations=tuple(
                op if op.forward else replace(op, repeatable=False) for op in self.operations
            ),
        )

    @cached_property
    def without_repeat_limits(self) -> TrainingGraph:
        """The same graph in which repeatable operations may be repeated at any time.

        This very graph if there are no limits. It has more schedules: what is proven of all of
        them holds for those of this graph.
        """
        if not any(op.repeat_before for op in self.operations):
            return self
        return replace(
            self, operations=tuple(replace(op, repeat_before=()) for op in self.operations)
        )

    def in_order(self, order: Sequence[int]) -> TrainingGraph:
        """This graph with another base order; `order[k]` is the operation at place k.

        Buffers keep their numbers. O(operations + edges).

        Raises:
            GraphError: if `order` is no permutation, or an operation comes before one it needs.
        """
        n = len(self.operations)
        if sorted(order) != list(range(n)):
            raise GraphError(f"the order is no permutation of the graph's {n} operations")
        place = [0] * n
        for k, o in enumerate(order):
            place[o] = k
        operations = [
            replace(
                op,
                after=tuple(sorted(place[a] for a in op.after)),
                repeat_before=tuple(sorted(place[a] for a in op.repeat_before)),
            )
            for op in map(self.operations.__getitem__, order)
        ]
        return replace(self, operations=tuple(operations))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able mapping that `from_json` reads back to an equal graph."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "resident": self.resident,
            "outputs": list(self.outputs),
            "buffers": [[b.name, b.size, b.dtype] for b in self.buffers],
            "operations": [
                {
                    "name": op.name,
                    "kind": op.kind,
                    "seconds": op.seconds,
                    "reads": list(op.reads),
                    "writes": list(op.writes),
                    "workspace": op.workspace,
                    "inplace": list(op.inplace),
                    "forward": op.forward,
                    "repeatable": op.repeatable,
                    "after": list(op.after),
                    **({"repeat_before": list(op.repeat_before)} if op.repeat_before else {}),
                }
                for op in self.operations
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainingGraph:
        """Read what `to_json` wrote.

        Raises:
            GraphError: if the format or version is another, or a field is missing or wrong.
        """
        _JSON.header(data, FORMAT, VERSION)
        operations = []
        for i, row in enumerate(_JSON.items(data, "operations", OBJECT, "the graph")):
            where = f"operation number {i}"
            operations.append(
                Operation(
                    name=_JSON.field(row, "name", TEXT, where),
                    kind=_JSON.field(row, "kind", TEXT, where),
                    seconds=float(_JSON.field(row, "seconds", NUMBER, where)),
                    reads=_JSON.items(row, "reads", WHOLE, where),
                    writes=_JSON.items(row, "writes", WHOLE, where),
                    workspace=_JSON.field(row, "workspace", WHOLE, where, 0),
                    inplace=_JSON.items(row, "inplace", WHOLE, where, ()),
                    forward=_JSON.field(row, "forward", FLAG, where, True),
                    repeatable=_JSON.field(row, "repeatable", FLAG, where, True),
                    after=_JSON.items(row, "after", WHOLE, where, ()),
                    repeat_before=_JSON.items(row, "repeat_before", WHOLE, where, ()),
                )
            )
        return cls(
            operations=tuple(operations),
            buffers=tuple(
                Buffer(*row) for row in _JSON.items(data, "buffers", _BUFFER, "the graph")
            ),
            outputs=_JSON.items(data, "outputs", WHOLE, "the graph", ()),
            resident=_JSON.field(data, "resident", WHOLE, "the graph", 0),
            name=_JSON.field(data, "name", TEXT, "the graph", ""),
        )

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        write_text(path, json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> TrainingGraph:
        """Read a graph written by `save`. Raises GraphError naming the file."""
        return cls.from_json(_JSON.load(path))


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file or nothing: into a temporary neighbour, then renamed over `path`.

    Where `path` is a link, what it points to is replaced. What is no file, a device or a pipe, is
    written to.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
