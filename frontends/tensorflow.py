"""Capture: a TensorFlow graph with its gradients becomes a `TrainingGraph`, with the map back.

Works on any graph-mode graph: the FuncGraph of a `tf.function` (also while it is traced, and
the body of a while loop) and a `tf.compat.v1.Graph`. Nothing in the graph is changed.

Which TensorFlow operation becomes what:

- A *view* (Reshape, Identity, ...) shares its input's buffer and is no operation of its own.
- What variables, constants and arguments hold is resident.
- Operations that touch no tensor of at least `chain_from` bytes are left to themselves; order
  that runs through them is kept as `Operation.after`.
- Pairs that TensorFlow's oneDNN pass may merge become one operation (a *unit*).
- Operations beside the path from the inputs to the gradients (metrics, say) that read a large
  buffer are counted where they run: as soon as they can.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from optckpt.errors import CaptureError
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_devices import Devices
from optckpt.frontends.tf_order import ancestors, execution_order, outside_consumers
from optckpt.frontends.tf_shapes import Sizes
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

log = logging.getLogger("optckpt.frontends.tensorflow")

CPU_COUNT_FROM = 256 * 1024
"""TensorFlow's CPU allocator (oneDNN build) hands smaller blocks to malloc, uncounted."""
GPU_ROUNDING = 256

# An operation that waits for more units than this becomes a junction: a unit of its own, so that
# what comes after it waits for one unit instead of for all of them.
_JUNCTION = 32

ViewChain = tuple[tuple[tf.Operation, int, int], ...]


@dataclass(frozen=True, eq=False)
class Capture:
    """A captured step: the framework-free graph, and what each of its parts is in TensorFlow."""

    graph: TrainingGraph
    """Times are 0 until `optckpt.costs` has measured them."""
    tf_graph: tf.Graph
    """The live graph that was captured."""
    members: tuple[tf.Operation, ...]
    """Every TensorFlow operation that takes part, in a topological order."""
    units: tuple[tuple[tf.Operation, ...], ...]
    """The TensorFlow operations of each `graph.operations[i]`, in execution order."""
    tensors: tuple[tf.Tensor, ...]
    """The tensor that owns each `graph.buffers[b]`; others may be views of it."""
    device: str
    """Device the step runs on: "/device:CPU:0", "/device:GPU:1", ..."""
    chained: tuple[bool, ...]
    """Whether the rewritten graph fixes the place of each unit by control edges."""
    movable: tuple[bool, ...]
    """Whether the inputs of each unit may be redirected to re-executed copies."""
    internal: tuple[int, ...]
    """Bytes of the tensors that are made and used up inside each unit and need memory of their
    own; already part of `graph.operations[i].workspace`."""
    views: dict[int, tuple[int, ViewChain]]
    """id(tensor) -> (buffer, chain of (view operation, input index, output index) that leads
    from the buffer's own tensor to this one), for every tensor in a buffer's memory."""
    outputs: tuple[tf.Tensor, ...]
    """The tensors that must be in memory at the end: losses, gradients, what is kept."""
    ignored: tuple[tuple[tf.Operation, int], ...]
    """(operation, input index) of inputs that a kernel ignores; the rewrite empties them."""
    plain_reads: tuple[tuple[int, int], ...]
    """(operation of the graph, buffer) that these inputs read where nothing is rewritten."""
    resident_blocks: tuple[int, ...]
    """Bytes of each variable, input and constant that the step finds in memory."""
    count_from: int
    """Blocks smaller than this many bytes are not counted by the device's allocator."""
    chain_from: int
    """Operations on tensors smaller than this many bytes are left to themselves."""

    def plain(self, graph: TrainingGraph) -> TrainingGraph:
        """`graph` (this one, or with costs) as TensorFlow runs it where nothing is rewritten."""
        more: dict[int, list[int]] = {}
        for u, b in self.plain_reads:
            more.setdefault(u, []).append(b)
        operations = list(graph.operations)
        for u, buffers in more.items():
            op = operations[u]
            operations[u] = replace(op, reads=(*op.reads, *buffers))
        return replace(graph, operations=tuple(operations))

    def buffers_of(self, tensors: Iterable[tf.Tensor]) -> tuple[int, ...]:
        """The buffers that hold `tensors`; tensors that are always kept have none."""
        return tuple(dict.fromkeys(self.views[id(t)][0] for t in tensors if id(t) in self.views))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def capture(
    tf_graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    keep: Sequence[tf.Tensor] = (),
    count_from: int | None = None,
    chain_from: int | None = None,
    live: Iterable[tf.Operation] | None = None,
    name: str = "",
) -> Capture:
    """Capture the step that computes `gradients` of `ys` in `tf_graph`.

    Args:
        ys: the losses; what they depend on is the forward pass and may be executed again.
        gradients: the gradient tensors (no None; of IndexedSlices the parts).
        keep: other tensors that must still be in memory when the step ends.
        count_from: allocator blocks below this many bytes count as nothing. Default: what the
            device does (256 KiB on CPU, nothing is left out on GPU), or 0 where less than half
            of the plain peak would be counted otherwise.
        chain_from: tensors below this many bytes are always kept, and operations on nothing but
            such tensors are not planned. Default: 64 KiB, or a 64th of the largest tensor.
        live: the operations that will run at all, if that is known. By default those made
            before the gradients are taken to run, and later ones that no gradient needs are not.
        name: of the TrainingGraph.

    Raises:
        CaptureError: if the graph is compiled by XLA, a tensor is of another graph, or the size
            of a large tensor is unknown (says which argument or operation makes it so).
    """
    _check(tf_graph, ys, gradients, keep)
    devices = Devices()
    # Replicas of a distribution strategy share a graph, but no memory.
    history = [past for past in getattr(tf_graph, HISTORY, ()) if devices.same(ys[0].op, past[2])]
    earlier = [op for past in history for op in past[0]]
    kept = [t for past in history for t in past[1]]
    forward = ancestors([t.op for t in ys])
    needed = ancestors([t.op for t in (*gradients, *keep)] + earlier, set(forward))
    outputs = tuple({id(t): t for t in (*ys, *gradients, *keep, *kept)}.values())
    sizes = Sizes(needed, chain_from)
    outside = outside_consumers(needed, forward, sizes, None if live is None else set(live))
    order = execution_order(needed | outside, forward, outside, sizes)
    built = _Build(tf_graph, order, forward, outside, sizes, gradients[0].op if gradients else None)
    return built.finish(outputs, count_from, name)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def capture_concrete(
    function: tf.types.experimental.ConcreteFunction,
    ys: Sequence[tf.Tensor] | None = None,
    *,
    count_from: int | None = None,
    chain_from: int | None = None,
    name: str = "",
) -> Capture:
    """Capture a traced function that returns losses and gradients, for export and comparison.

    `ys` are tensors of `function.graph`; by default the scalar floating-point outputs. The other
    outputs are taken for gradients. A traced function can no longer be rewritten.

    Raises:
        CaptureError: as `capture`, and if `ys` is not given and no output is a scalar.
    """
    outs = list(function.outputs)
    if ys is None:
        ys = [t for t in outs if t.shape.rank == 0 and t.dtype.is_floating]
        if not ys:
            raise CaptureError(
                f"function {_text(function.name)!r} returns no scalar that could be the loss; "
                "return the loss beside the gradients, or pass ys"
            )
    losses = {id(t) for t in ys}
    live = ancestors([t.op for t in outs] + list(function.graph.control_outputs))
    found: Capture = capture(
        function.graph,
        _through_identities(ys),
        [t for t in outs if id(t) not in losses],
        count_from=count_from,
        chain_from=chain_from,
        live=live,
        name=name or _text(function.name),
    )
    return found


HISTORY = "_optckpt_history"
"""Attribute of a rewritten tf.Graph: a list of (chained operations, output tensors, device), one
entry per rewrite. A second capture for the same device plans on top of the first."""


def _check(
    tf_graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    keep: Sequence[tf.Tensor],
) -> None:
    if not isinstance(tf_graph, tf.Graph):
        raise CaptureError(
            f"a TensorFlow graph is needed, got {type(tf_graph).__name__}: call gradients inside a "
            "tf.function or a tf.Graph, not eagerly"
        )
    if not ys:
        raise CaptureError("nothing to differentiate: ys is empty")
    for t in (*ys, *gradients, *keep):
        graph = getattr(t, "graph", None)
        if graph is not tf_graph:
            raise CaptureError(
                f"tensor {getattr(t, 'name', t)!r} does not belong to the graph that is captured; "
                "losses, variables and the call must be in one tf.function (or one tf.Graph)"
            )
    if control_flow_util.GraphOrParentsInXlaContext(tf_graph):
        raise CaptureError(
            "this graph is compiled by XLA (jit_compile=True), which merges re-executed operations "
            "with the originals, so that no memory would be saved; set jit_compile=False"
        )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _through_identities(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors behind the Identity operations that a tf.function puts before its outputs."""
    found = []
    for t in tensors:
        while t.op.type == "Identity":
            t = t.op.inputs[0]
        found.append(t)
    return found


class _Build:
    """Turns operations in order into a Capture."""

    def __init__(
        self,
        tf_graph: tf.Graph,
        order: Sequence[tuple[tf.Operation, ...]],
        forward: set[tf.Operation],
        outside: set[tf.Operation],
        sizes: Sizes,
        anchor: tf.Operation | None,
    ) -> None:
        self.tf_graph = tf_graph
        self.members = tuple(op for group in order for op in group)
        self.forward = forward
        self.outside = outside
        self.sizes = sizes
        self.context = anchor._get_control_flow_context() if anchor is not None else None
        self.devices = Devices()
        self.views: dict[int, tuple[int, ViewChain]] = {}
        self.resident: set[int] = set()
        self.resident_sizes: dict[object, int] = {}
        self.small_sizes: list[int] = []
        self.references: set[int] = set()
        self.constants: set[int] = set()
        self.folds: set[tf.Operation] = set()
        self.folded: list[tf.Tensor] = []
        self.ignored: list[tuple[tf.Operation, int]] = []
        self.plain_reads: list[tuple[int, int]] = []
        self.tensors: list[tf.Tensor] = []
        self.buffer_sizes: list[int] = []
        self.producer: list[int] = []
        self.units: list[tuple[tf.Operation, ...]] = []
        self.operations: list[Operation] = []
        self.chained: list[bool] = []
        self.movable: list[bool] = []
        self.internal: list[int] = []
        self.pinned: set[int] = set()
        # For each TensorFlow operation the units that a successor has to wait for.
        self.waits: dict[tf.Operation, frozenset[int]] = {}
        for group in order:
            self._add(group)

    def _add(self, group: tuple[tf.Operation, ...]) -> None:
        deps: set[int] = set()
        inside = set(group)
        for op in group:
            for t in op.inputs:
                if t.op not in inside:
                    # Absent only for the back edge of a TensorFlow 1 loop.
                    deps |= self.waits.get(t.op, _NOTHING)
            for p in op.control_inputs:
                if p not in inside:
                    deps |= self.waits[p]
        op = group[0]
        if len(group) == 1:
            kind = op.type
            if kind in tf_ops.RESIDENT:
                self._add_resident(op)
                self._pass_on(op, deps)
                return
            if self._add_view(op) or self._add_constant(op):
                self._pass_on(op, deps)
                return
        reads = self._reads(group)
        writes, inner = self._writes(group)
        if not reads and not writes and not self._touches_large(group):
            self._pass_on(op, deps)
            return
        self._add_unit(group, reads, writes, inner, deps)

    def _pass_on(self, op: tf.Operation, deps: set[int]) -> None:
        if len(deps) > _JUNCTION:
            self._add_unit((op,), (), [], 0, deps)
        else:
            self.waits[op] = frozenset(deps)

    def _add_resident(self, op: tf.Operation) -> None:
        for t in op.outputs:
            self.resident.add(id(t))
            if t.dtype._is_ref_dtype:
                self.references.add(id(t))
            if op.type == "Const":
                self.constants.add(id(t))
            handle = op.inputs[0] if op.type == "ReadVariableOp" else t
            while handle.op.type == "Identity":
                handle = handle.op.inputs[0]
            self.resident_sizes[id(handle)] = max(
                self.resident_sizes.get(id(handle), 0),
                # Where an argument's unknown size matters, what is computed from it raises.
                _handle_bytes(t) if t.dtype == tf.resource else self.sizes.of(t) or 0,
            )

    def _add_view(self, op: tf.Operation) -> bool:
        pairs = tf_ops.views(op)
        if not pairs or op._get_control_flow_context() is not self.context:
            return False
        for i, o in pairs:
            source, out = op.inputs[i], op.outputs[o]
            if id(source) in self.views:
                b, chain = self.views[id(source)]
                self.views[id(out)] = (b, (*chain, (op, i, o)))
            elif id(source) in self.resident:
                self.resident.add(id(out))
                if id(source) in self.references:
                    self.references.add(id(out))
                if id(source) in self.constants:
                    self.constants.add(id(out))
        return True

    def _add_constant(self, op: tf.Operation) -> bool:
        """Count what the executor computes once, before the first step, and keeps."""
        if not tf_ops.is_foldable(op) or any(id(t) not in self.constants for t in op.inputs):
            return False
        if any(self.sizes.exact(t) > tf_ops.LARGEST_FOLDED for t in op.outputs):
            return False
        for t in op.outputs:
            self.constants.add(id(t))
            self.resident.add(id(t))
            if self.sizes.large(t):
                self.folded.append(t)
        self.folds.add(op)
        return True

    def _reads(self, group: tuple[tf.Operation, ...]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for op in group:
            if op.type in tf_ops.METADATA:
                continue
            ignored = tf_ops.ignored_input(op) if self._is_ours(op) else None
            for i, t in enumerate(op.inputs):
                if id(t) not in self.views:
                    continue
                if i == ignored:
                    self.ignored.append((op, i))
                    self.plain_reads.append((len(self.units), self.views[id(t)][0]))
                else:
                    found[self.views[id(t)][0]] = None
        return tuple(found)

    def _is_ours(self, op: tf.Operation) -> bool:
        """Whether the rewrite may redirect the inputs of `op`."""
        return op not in self.outside and op._get_control_flow_context() is self.context

    def _touches_large(self, group: tuple[tf.Operation, ...]) -> bool:
        return any(
            self.sizes.large(t) for op in group if op.type not in tf_ops.METADATA for t in op.inputs
        )

    def _writes(self, group: tuple[tf.Operation, ...]) -> tuple[list[tf.Tensor], int]:
        """The large tensors that the group hands on, and the bytes used inside only."""
        writes = []
        inner = 0
        for op, after in zip(group, (*group[1:], None), strict=True):
            for t in op.outputs:
                size = self.sizes.exact(t)
                if after is not None and any(i is t for i in after.inputs):
                    # BiasAdd and Relu work in place, a convolution does not.
                    if after.type not in ("BiasAdd", "Relu"):
                        inner += size
                elif size >= self.sizes.chain_from:
                    writes.append(t)
                else:
                    self.small_sizes.append(size)
        if len(writes) > 1 and tf_ops.inplace_inputs(group[0]):
            # The output that may take over an input's memory comes first.
            writes.sort(key=self.sizes.exact, reverse=True)
        return writes, inner

    def _add_unit(
        self,
        group: tuple[tf.Operation, ...],
        reads: tuple[int, ...],
        writes: list[tf.Tensor],
        inner: int,
        deps: set[int],
    ) -> None:
        u = len(self.units)
        outside = group[0] in self.outside
        movable = all(self._is_ours(op) for op in group)
        if not movable and reads:
            # The inputs are not redirected: what they are must not be made again before.
            latest = max(deps)
            self.pinned.update(
                p for p in (self.producer[b] for b in reads) if p != latest or not outside
            )
        first = len(self.tensors)
        for t in writes:
            self.views[id(t)] = (len(self.tensors), ())
            self.tensors.append(t)
            self.buffer_sizes.append(self.sizes.exact(t))
            self.producer.append(u)
        forward = not outside and all(op in self.forward for op in group)
        for op in group:
            for t in op.outputs:
                self.devices.add(op, self.sizes.exact(t))
        self.units.append(group)
        self.operations.append(
            Operation(
                name=group[0].name,
                kind="+".join(op.type for op in group),
                seconds=0.0,
                reads=reads,
                writes=tuple(range(first, len(self.tensors))),
                inplace=self._inplace(group, writes),
                forward=forward,
                repeatable=forward and movable and all(self._may_be_repeated(op) for op in group),
                after=tuple(sorted(deps - {self.producer[b] for b in reads})),
            )
        )
        self.internal.append(inner)
        self.movable.append(movable)
        self.chained.append(movable and all(tf_ops.can_wait(op) for op in group))
        for op in group:
            self.waits[op] = frozenset((u,))

    def _may_be_repeated(self, op: tf.Operation) -> bool:
        # A reference variable may have been changed in place by the time.
        return tf_ops.is_pure(op) and not any(id(t) in self.references for t in op.inputs)

    def _inplace(self, group: tuple[tf.Operation, ...], writes: list[tf.Tensor]) -> tuple[int, ...]:
        if len(group) > 1 or not writes:
            return ()
        op = group[0]
        out = writes[0]
        found = []
        for i in tf_ops.inplace_inputs(op):
            t = op.inputs[i]
            if id(t) not in self.views or t.dtype != out.dtype:
                continue
            b = self.views[id(t)][0]
            holders = sum(self.views.get(id(o), (-1,))[0] == b for o in op.inputs)
            size = self.sizes.exact(out)
            if holders == 1 and size == self.sizes.exact(t) == self.buffer_sizes[b]:
                found.append(b)
        return tuple(dict.fromkeys(found))

    def finish(self, outputs: tuple[tf.Tensor, ...], count_from: int | None, name: str) -> Capture:
        device = self.devices.main()
        on_gpu = "CPU" not in device
        held = tuple(dict.fromkeys(self.views[id(t)][0] for t in outputs if id(t) in self.views))
        # Whoever holds an output holds the tensor of the original execution.
        self.pinned.update(self.producer[b] for b in held)
        members = set(self.members)
        for t in self.folded:
            # Of a chain of constants only the last is kept.
            if any(c in members and c not in self.folds for c in t.consumers()):
                self.resident_sizes[id(t)] = self.sizes.exact(t)
        elsewhere = [not self.devices.same(ops[0], device) for ops in self.units]

        def graph(count_from: int) -> tuple[TrainingGraph, list[int]]:
            def counted(size: int, pieces: int = 1) -> int:
                block = size // max(1, pieces)
                if block < count_from:
                    return 0
                if on_gpu:
                    block = -(-block // GPU_ROUNDING) * GPU_ROUNDING
                return block * pieces

            spaces = [counted(n) for n in self.internal]
            return TrainingGraph(
                operations=tuple(
                    replace(
                        op,
                        workspace=space,
                        repeatable=op.repeatable and not away and u not in self.pinned,
                    )
                    for u, (op, space, away) in enumerate(
                        zip(self.operations, spaces, elsewhere, strict=True)
                    )
                ),
                buffers=tuple(
                    Buffer(
                        t.name,
                        0 if elsewhere[p] else counted(n, self.sizes.pieces(t)),
                        t.dtype.name,
                    )
                    for t, n, p in zip(self.tensors, self.buffer_sizes, self.producer, strict=True)
                ),
                outputs=held,
                resident=sum(counted(n) for n in self.resident_sizes.values())
                + sum(counted(n) for n in self.small_sizes),
                name=name,
            ), spaces

        if count_from is None:
            count_from = 0 if on_gpu else CPU_COUNT_FROM
            built, internal = graph(count_from)
            if count_from:
                full, all_internal = graph(0)
                base = Schedule.base(full)
                if 2 * simulate(built, base).peak < simulate(full, base).peak:
                    count_from, built, internal = 0, full, all_internal
        else:
            built, internal = graph(count_from)
        log.debug(
            "captured %d operations, %d buffers on %s",
            len(built.operations),
            len(built.buffers),
            device,
        )
        return Capture(
            graph=built,
            tf_graph=self.tf_graph,
            members=self.members,
            units=tuple(self.units),
            tensors=tuple(self.tensors),
            device=device,
            chained=tuple(c and not e for c, e in zip(self.chained, elsewhere, strict=True)),
            movable=tuple(self.movable),
            internal=tuple(internal),
            views=self.views,
            outputs=outputs,
            ignored=tuple(self.ignored),
            plain_reads=tuple(self.plain_reads),
            resident_blocks=tuple(self.resident_sizes.values()),
            count_from=count_from,
            chain_from=self.sizes.chain_from,
        )


_NOTHING: frozenset[int] = frozenset()


def _handle_bytes(handle: tf.Tensor) -> int:
    """Bytes of the variable behind a resource handle (0 if it is none or has no fixed shape)."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return 0
    entry = data.shape_and_type[0]
    count = tf.TensorShape(entry.shape).num_elements()
    return 0 if count is None else count * tf.as_dtype(entry.dtype).size
