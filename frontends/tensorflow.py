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

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import tensorflow as tf

from optckpt.errors import CaptureError, UnknownSizeError
from optckpt.frontends.tf_build import Build
from optckpt.frontends.tf_capture import Capture, Past
from optckpt.frontends.tf_copy import Shapes
from optckpt.frontends.tf_data_sizes import Values
from optckpt.frontends.tf_devices import Devices, shares
from optckpt.frontends.tf_finish import CPU_COUNT_FROM
from optckpt.frontends.tf_nodes import Node, Nodes, ancestors
from optckpt.frontends.tf_ops import METADATA, RESIDENT, views
from optckpt.frontends.tf_order import Ordering, outside_consumers
from optckpt.frontends.tf_shadow import shadow
from optckpt.frontends.tf_shapes import Sizes
from optckpt.frontends.tf_sums import with_orders
from optckpt.frontends.tf_versions import earlier_writers

__all__ = [
    "CPU_COUNT_FROM",
    "HISTORY",
    "Capture",
    "Past",
    "capture",
    "capture_concrete",
    "no_garbage_collection",
]

HISTORY = "_optckpt_history"
"""Attribute of a rewritten tf.Graph: a list of `Past`, one per rewrite. A second capture for the
same device plans on top of the first, or begins where that has ended if it was of a whole step."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running.

    It would walk all of TensorFlow's objects, for longer than a capture or a rewrite takes. They
    make (next to) no cyclic garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@no_garbage_collection()
def capture(
    tf_graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    *,
    keep: Sequence[tf.Tensor] = (),
    ends: Iterable[tf.Operation] | None = None,
    early_updates: bool = True,
    plain_updates_last: bool = False,
    count_from: int | None = None,
    chain_from: int | None = None,
    live: Iterable[tf.Operation] | None = None,
    name: str = "",
    device: str | None = None,
    shapes: Shapes | None = None,
    values: Values | None = None,
) -> Capture:
    """Capture the step that computes `gradients` of `ys` in `tf_graph`.

    Args:
        ys: the losses; what they depend on is the forward pass and may be executed again.
        gradients: the gradient tensors (no None; of IndexedSlices the parts).
        keep: other tensors that must still be in memory when the step ends.
        ends: operations that run for their effects (updates of variables, of metrics). If given,
            the whole step is captured, with them and all that they need; of the gradients only
            those that nothing in it reads are in memory when it ends.
        early_updates: whether what comes after the gradients is done as soon as it can be: a
            variable is updated when its gradient is there and nothing needs the old value any
            more. Otherwise as the program has it, after all gradients.
        plain_updates_last: whether, where nothing is rewritten, what comes after the gradients
            waits for the last of them; see `Capture.plain`.
        count_from: allocator blocks below this many bytes count as nothing. Default: what the
            device does (256 KiB on CPU, nothing is left out on GPU), or 0 where less than half
            of the plain peak would be counted otherwise.
        chain_from: tensors below this many bytes are always kept, and operations on nothing but
            such tensors are not planned. Default: 64 KiB, or a 64th of the largest tensor.
        live: the operations that will run at all, if that is known. By default those made
            before the gradients are taken to run, and later ones that no gradient needs are not.
        name: of the TrainingGraph.
        device: the device whose memory is planned ("/device:GPU:1"); what runs on others is part of
            the step, but not executed again. Default: the one with the most bytes.
        shapes: if the graph was traced with unknown sizes: those of its inputs (placeholders, what
            iterators return) to capture it at; see `optckpt.frontends.tf_shadow`.
        values: of placeholders, as far as they are known, where sizes depend on the data; see
            `optckpt.frontends.tf_data_sizes`.

    Raises:
        CaptureError: if a tensor is of another graph, or the size of a large tensor is unknown
            (says which argument or operation makes it so).
    """
    _check(tf_graph, ys, gradients, keep)
    ends = None if ends is None else tuple(ends)
    live = None if live is None else tuple(live)

    def taken(graph: tf.Graph, same: Callable[[Any], Any]) -> tuple[Capture, Nodes]:
        return _capture(
            graph,
            same(ys),
            same(gradients),
            same(keep),
            same(ends),
            early_updates,
            plain_updates_last,
            count_from,
            chain_from,
            same(live),
            name,
            device,
        )

    sized = shadow(tf_graph, shapes, values=values) if shapes else None
    if sized is None:
        try:
            found, nodes = taken(tf_graph, lambda given: given)
            return with_orders(found, ys, gradients, nodes)
        except UnknownSizeError:
            if shapes:
                raise
            with suppress(CaptureError):
                sized = shadow(tf_graph, {}, values=values)
            if sized is None:
                raise
    history = [sized.carried(past) for past in getattr(tf_graph, HISTORY, ())]
    setattr(sized.graph, HISTORY, history)
    found, _ = taken(sized.graph, sized.carried)
    return with_orders(sized.on_live(found, tf_graph), ys, gradients, copies=sized.copies)


def _capture(
    tf_graph: tf.Graph,
    ys: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    keep: Sequence[tf.Tensor],
    ends: Iterable[tf.Operation] | None,
    early_updates: bool,
    plain_updates_last: bool,
    count_from: int | None,
    chain_from: int | None,
    live: Iterable[tf.Operation] | None,
    name: str,
    device: str | None,
) -> tuple[Capture, Nodes]:
    """As `capture`, at the static sizes, but for the sums; and what was read of the graph."""
    devices = Devices(tf_graph)
    nodes = Nodes()
    pasts = [past for past in getattr(tf_graph, HISTORY, ()) if past.chain]
    if device is None and any(past.whole for past in pasts):
        seen = nodes.ancestors([t.op for t in (*ys, *gradients, *keep)])
        device = next(iter(shares(devices, seen)), devices.of(ys[0].op))
        nodes = Nodes()
    given = _done_before([p for p in pasts if p.whole and p.device == device])
    for op in given:
        nodes.give(op)
    forward = nodes.ancestors([t.op for t in ys])
    needed = nodes.ancestors([t.op for t in (*gradients, *keep)], forward)
    placed = shares(devices, needed)
    device = device or next(iter(placed), devices.of(ys[0].op))
    # Replicas of a distribution strategy share a graph, but no memory.
    history = [past for past in pasts if past.device == device]
    whole = [i for i, past in enumerate(history) if past.whole]
    follows = history[whole[-1]].chain[-1] if whole else None
    history = history[whole[-1] + 1 :] if whole else history
    earlier = [op for past in history for op in past.chain]
    kept = [t for past in history for t in past.outputs]
    needed = nodes.ancestors(earlier, needed)
    after: set[Node] = set()
    held = gradients
    if ends is not None:
        after = nodes.ancestors(ends, needed) - needed
        needed |= after
        held = [g for g in gradients if not any(nodes[c] in after for c in g.consumers())]
    if getattr(tf_graph, "building_function", False):
        new = needed
        while writers := earlier_writers(new, needed):
            new = nodes.ancestors(writers, needed) - needed
            forward = forward | new
            needed |= new
    outputs = tuple({id(t): t for t in (*ys, *held, *keep, *kept)}.values())
    sizes = Sizes(needed, chain_from, outputs)
    running = None if live is None else set(live)
    outside = outside_consumers(nodes, needed, forward, sizes, running, device)
    among = needed | outside
    ordering = Ordering(among, forward, outside, sizes, after)
    order = ordering.order(early_updates=early_updates)
    anchor = gradients[0].op._get_control_flow_context() if gradients else None
    alone = all(devices.of(n.op) == device for n in among if n.kind not in RESIDENT)
    built = Build(
        order, forward, outside, sizes, anchor, after, devices, device, alone=alone
    ).finish(tf_graph, outputs, count_from, name)
    built = replace(
        built,
        members=tuple(op for op in built.members if op not in given),
        whole=ends is not None,
        follows=follows,
        shares=placed,
    )
    if after and early_updates and plain_updates_last:
        late = ordering.order(early_updates=False)
        place = {node.op: i for i, group in enumerate(late) for node in group}
        units = range(len(built.units))
        built = replace(
            built, plain_order=tuple(sorted(units, key=lambda u: place[built.units[u][0]]))
        )
    return built, Nodes() if given else nodes


def _done_before(whole: Iterable[Past]) -> set[tf.Operation]:
    """What was computed in whole steps: for those that follow, it is there like an argument.

    They wait for the last operation of the step before; nothing of what that waits for can be
    given a place in their order.
    """
    done = Nodes().ancestors(op for past in whole for op in past.chain)
    return {
        node.op
        for node in done
        if node.kind not in RESIDENT and node.kind not in METADATA and not views(node.op)
    }


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
