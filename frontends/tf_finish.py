"""Units and buffers become a training graph and the `Capture` that refers to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_capture import Capture
from optckpt.frontends.tf_inner import Inside, look_inside
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_units import Built, Unit
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

log = logging.getLogger("optckpt.frontends.tensorflow")

CPU_COUNT_FROM = 256 * 1024
"""TensorFlow's CPU allocator (oneDNN build) hands smaller blocks to malloc, uncounted."""
GPU_ROUNDING = 256


def finished(
    built: Built,
    tf_graph: tf.Graph,
    outputs: tuple[tf.Tensor, ...],
    count_from: int | None,
    name: str,
) -> Capture:
    """The capture; arguments as those of `optckpt.frontends.tensorflow.capture`."""
    units = built.units
    buffers_out = (built.views[id(t)][0] for t in outputs if id(t) in built.views)
    held = tuple(dict.fromkeys(b for b in buffers_out if not units[built.buffers[b].producer].away))
    members = tuple(node.op for group in built.order for node in group)
    running = set(members)
    resident = tuple(built.residents.blocks(running))
    operations, written_later = _operations(built, held)
    graphs = _Graphs(built, operations, held, resident, name)
    counted = graphs.counted_from(count_from)
    log.debug(
        "captured %d operations, %d buffers on %s",
        len(counted.graph.operations),
        len(counted.graph.buffers),
        built.device,
    )
    return Capture(
        graph=counted.graph,
        tf_graph=tf_graph,
        members=members,
        units=tuple(tuple(node.op for node in unit.group) for unit in units),
        tensors=tuple(b.tensor for b in built.buffers),
        device=built.device,
        chained=tuple(unit.chained and not unit.away for unit in units),
        movable=tuple(unit.movable for unit in units),
        away=tuple(unit.away for unit in units),
        internal=counted.internal,
        inside=counted.inside,
        views=dict(built.views),
        outputs=outputs,
        ignored=tuple(built.ignored),
        plain_reads=tuple(built.plain_reads),
        resident_blocks=resident,
        arguments=tuple(
            (t, size) for t, size in built.residents.arguments() if size >= counted.count_from
        ),
        folded=tuple(n for n in built.residents.folded(running) if n >= counted.count_from),
        written_later=written_later,
        count_from=counted.count_from,
        chain_from=built.sizes.chain_from,
    )


# --- What may be executed again -----------------------------------------------------------------


def _operations(
    built: Built, held: Sequence[int]
) -> tuple[list[Operation], tuple[tuple[tf.Operation, ...], ...]]:
    """The operations of the training graph, without costs; and `Capture.written_later`."""
    # Whoever holds an output holds the tensor of the original execution.
    pinned = set(built.pinned) | {built.buffers[b].producer for b in held}
    overwritten: list[set[int]] = [set() for _ in built.units]
    for op, writers in built.overwrites.items():
        if op in built.unit_of:
            overwritten[built.unit_of[op]] |= writers - {built.unit_of[op]}
    written_later: list[tuple[tf.Operation, ...]] = []
    for u, unit in enumerate(built.units):
        changing = _written_later(built, unit)
        after = [_units_after(built, op) for op in changing or ()]
        if changing is None or any(units is None for units in after):
            pinned.add(u)
            changing = ()
        overwritten[u] |= {v for units in after for v in units or () if v != u}
        written_later.append(tuple(changing))
    operations = []
    for u, unit in enumerate(built.units):
        repeatable = unit.repeatable and not unit.away and u not in pinned
        operations.append(
            Operation(
                name=unit.group[0].op.name,
                kind="+".join(node.kind for node in unit.group),
                seconds=0.0,
                reads=unit.reads,
                writes=unit.writes,
                inplace=unit.inplace,
                forward=unit.forward,
                repeatable=repeatable,
                after=unit.after,
                repeat_before=tuple(sorted(overwritten[u])) if repeatable else (),
            )
        )
    return operations, tuple(written_later)


def _written_later(built: Built, unit: Unit) -> Sequence[tf.Operation] | None:
    """The operations that change what the unit's functions read of variables; None if these are
    not known, or no part of the step."""
    if unit.repeatable and tf_ops.is_call(unit.group[0].op):
        return built.variables.written_later(unit.group[0].op)
    return ()


def _units_after(built: Built, op: tf.Operation) -> set[int] | None:
    """The units that execute `op` or wait for it; None if it is not part of the step."""
    if op in built.unit_of:
        return {built.unit_of[op]}
    waiting: set[Node] = set()
    units: set[int] = set()
    for group in built.order:
        for node in group:
            if node.op is op:
                waiting.add(node)
            elif waiting and not waiting.isdisjoint(
                (*node.makers, *node.control_inputs, *node.effects)
            ):
                if node.op in built.unit_of:
                    units.add(built.unit_of[node.op])
                else:
                    waiting.add(node)
    return units if waiting else None


# --- Sizes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counted:
    """A training graph in which blocks of at least `count_from` bytes count."""

    graph: TrainingGraph
    internal: tuple[int, ...]
    inside: dict[int, Inside]
    count_from: int


class _Graphs:
    """Makes training graphs of a step that differ in which blocks count."""

    def __init__(
        self,
        built: Built,
        operations: Sequence[Operation],
        held: tuple[int, ...],
        resident: Sequence[int],
        name: str,
    ) -> None:
        self._built = built
        self._operations = operations
        self._held = held
        self._resident = resident
        self._name = name
        self._on_gpu = "CPU" not in built.device
        # What others have made is here until it has been read here.
        self._received = {b for unit in built.units if not unit.away for b in unit.reads}
        self._labels = [(b.tensor.name, b.tensor.dtype.name) for b in built.buffers]

    def counted_from(self, count_from: int | None) -> _Counted:
        """The graph in which blocks of at least so many bytes count.

        By default those that the device's allocator counts; all, if these are less than half.
        """
        if count_from is not None:
            return self._counted(count_from)
        if self._on_gpu:
            return self._counted(0)
        found = self._counted(CPU_COUNT_FROM)
        base = Schedule.base(found.graph)
        peak = simulate(found.graph, base).peak
        # What small blocks can add at most; mostly too little for a second graph.
        small = sum(b.size for b in self._built.buffers) - sum(b.size for b in found.graph.buffers)
        small += sum(self._resident) + sum(self._built.small) - found.graph.resident
        small += max((unit.internal for unit in self._built.units), default=0)
        if found.inside or small > peak:
            full = self._counted(0)
            if 2 * peak < simulate(full.graph, base).peak:
                return full
        return found

    def _counted(self, count_from: int) -> _Counted:
        def counted(size: int, pieces: int = 1) -> int:
            block = size // max(1, pieces)
            if block < count_from:
                return 0
            if self._on_gpu:
                block = -(-block // GPU_ROUNDING) * GPU_ROUNDING
            return block * pieces

        built = self._built
        spaces = tuple(0 if unit.away else counted(unit.internal) for unit in built.units)
        buffers = tuple(
            Buffer(label, counted(b.size, b.pieces) if self._is_here(i) else 0, dtype)
            for i, (b, (label, dtype)) in enumerate(zip(built.buffers, self._labels, strict=True))
        )
        filled, inside = look_inside(
            [
                (unit.group[0].op, replace(op, workspace=space) if space else op)
                for unit, op, space in zip(built.units, self._operations, spaces, strict=True)
            ],
            built.sizes.bodies,
            self._buffers_of,
            [b.size for b in buffers],
            self._held,
            counted,
        )
        if not built.alone:
            pairs = zip(filled, built.units, strict=True)
            filled = [replace(op, workspace=0) if unit.away else op for op, unit in pairs]
            inside = {u: found for u, found in inside.items() if not built.units[u].away}
        graph = TrainingGraph(
            operations=tuple(filled),
            buffers=buffers,
            outputs=self._held,
            resident=sum(map(counted, self._resident)) + sum(map(counted, built.small)),
            name=self._name,
        )
        return _Counted(graph, spaces, inside, count_from)

    def _is_here(self, b: int) -> bool:
        """Whether the buffer is in the memory of the device that is planned for."""
        return b in self._received or not self._built.units[self._built.buffers[b].producer].away

    def _buffers_of(self, tensor: tf.Tensor) -> list[int]:
        view = self._built.views.get(id(tensor))
        return [*([] if view is None else [view[0]]), *self._built.holders.of(tensor)]
