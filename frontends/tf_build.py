"""Operations in order become units and buffers, and these a `Capture`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from optckpt.frontends import tf_onednn, tf_ops
from optckpt.frontends.tf_capture import SIBLING, Capture, ViewChain
from optckpt.frontends.tf_devices import Devices
from optckpt.frontends.tf_finish import finished
from optckpt.frontends.tf_inner import Holders
from optckpt.frontends.tf_nodes import Node
from optckpt.frontends.tf_purity import Purity, Variables, may_hold_list
from optckpt.frontends.tf_resident import Residents
from optckpt.frontends.tf_shapes import Sizes
from optckpt.frontends.tf_units import Built, TensorBuffer, Unit
from optckpt.frontends.tf_versions import Versions

# An operation that waits for more units than this becomes a junction: a unit of its own, so that
# what comes after it waits for one unit instead of for all of them.
_JUNCTION = 32

_NOTHING: frozenset[int] = frozenset()


class Build:
    """Turns operations in order into a Capture."""

    def __init__(
        self,
        order: Sequence[tuple[Node, ...]],
        forward: set[Node],
        outside: set[Node],
        sizes: Sizes,
        context: Any,
        after: Collection[Node],
        devices: Devices,
        device: str,
        *,
        alone: bool,
    ) -> None:
        """`context`: the control flow context that the step is in; others are not rewritten.
        `after`: the operations that come after the gradients. `device`: the one to plan for; if
        `alone`, all operations run there.
        """
        self._order = order
        self._forward = forward
        self._outside = outside
        self._sizes = sizes
        self._context = context
        self._after = after
        self._devices = devices
        self._device = device
        self._alone = alone
        self._residents = Residents(sizes, None if alone else self._is_here)
        self._versions = Versions(order)
        self._small: list[int] = []
        self._views: dict[int, tuple[int, ViewChain]] = {}
        self._holders = Holders(sizes.bodies, self._views)
        self._purity = Purity()
        self._variables = Variables()
        self._copied: dict[int, tuple[int, ...]] = {}
        """id(tensor) -> buffers that its own buffer is charged with, too."""
        self._ignored: list[tuple[tf.Operation, int]] = []
        self._plain_reads: list[tuple[int, int]] = []
        self._buffers: list[TensorBuffer] = []
        self._units: list[Unit] = []
        self._pinned: set[int] = set()
        self._unit_of: dict[tf.Operation, int] = {}
        self._overwrites: dict[tf.Operation, set[int]] = {}
        """Operation -> units that overwrite a variable which it reads."""
        # For each node the units that a successor has to wait for.
        self._waits: dict[Node, frozenset[int]] = {}
        for group in order:
            self._add(group)

    def _add(self, group: tuple[Node, ...]) -> None:
        before = self._before(group)
        node = group[0]
        if not self._alone:
            for member in group:
                self._residents.note_reads(member)
        if len(group) == 1:
            if node.kind in tf_ops.RESIDENT:
                self._residents.add(node)
                self._versions.add_read(node)
                self._pass_on(group, before)
                return
            if self._add_view(node) or self._residents.add_folded(node):
                self._pass_on(group, before)
                return
        reads = self._reads(group)
        self._charge_kept(node)
        writes, internal = self._writes(group)
        old = self._old_versions(group)
        writes += [family[0] for family in old]
        if reads or writes or self._touches_large(group):
            self._add_unit(group, reads, writes, internal, before)
            for family in old:
                self._views.update((id(t), self._views[id(family[0])]) for t in family)
        else:
            self._pass_on(group, before)

    def _old_versions(self, group: tuple[Node, ...]) -> list[list[tf.Tensor]]:
        """For each variable that `group` assigns, the tensors that hold on to its old value."""
        found = []
        for family in self._versions.overwritten(group, self._sizes.large):
            if any(self._versions.is_read_after(t, group) for t in family):
                found.append(family)
            # Executed again later they would hold the old value, beyond what is counted.
            for reader in {c for t in family for c in t.consumers()}:
                self._overwrites.setdefault(reader, set()).add(len(self._units))
        return found

    def _before(self, group: tuple[Node, ...]) -> frozenset[int]:
        """The units that `group` has to wait for."""
        # Absent are the group's own, and the back edge of a TensorFlow 1 loop.
        found = {
            self._waits.get(p, _NOTHING)
            for node in group
            for p in (*node.makers, *node.control_inputs, *node.effects)
        }
        found.discard(_NOTHING)
        return found.pop() if len(found) == 1 else _NOTHING.union(*found)

    def _pass_on(self, group: tuple[Node, ...], before: frozenset[int]) -> None:
        if len(before) > _JUNCTION:
            self._add_unit(group, (), [], 0, before)
        else:
            self._waits.update(dict.fromkeys(group, before))

    def _add_view(self, node: Node) -> bool:
        if not tf_ops.may_view(node.kind):
            return False
        pairs = tf_ops.views(node.op)
        if not pairs or node.op._get_control_flow_context() is not self._context:
            return False
        if not self._alone:
            # From another device it is a copy.
            here = self._devices.of(node.op)
            if any(self._devices.of(node.inputs[i].op) != here for i, _ in pairs):
                return False
        for i, o in pairs:
            self._share(node.inputs[i], node.outputs[o], ((node.op, i, o),))
        return True

    def _share(self, source: tf.Tensor, out: tf.Tensor, step: ViewChain) -> None:
        """Note that `out` is in the memory of `source`, from which `step` leads to it."""
        self._holders.add_view(source, out)
        found = self._views.get(id(source))
        if found is None:
            self._residents.add_view(source, out)
            self._versions.add_view(source, out)
        else:
            b, chain = found
            self._views[id(out)] = (b, (*chain, *step))

    def _reads(self, group: tuple[Node, ...]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for node in group:
            if node.kind in tf_ops.METADATA:
                continue
            for i, t in enumerate(node.inputs):
                if not self._holders.is_read(node, i):
                    continue
                found.update(dict.fromkeys(self._holders.of(t)))
                view = self._views.get(id(t))
                if view is None:
                    continue
                if tf_ops.is_ignored(node.op, i) and self._is_ours(node):
                    self._ignored.append((node.op, i))
                    self._plain_reads.append((len(self._units), view[0]))
                else:
                    found[view[0]] = None
        return tuple(found)

    def _charge_kept(self, node: Node) -> None:
        """Note what the outputs of a call keep of its inputs that is better counted twice.

        It is of no use to make again what is still in memory. But if its producer makes other
        things besides (a loop from whose result this one starts), these could not be made again
        either.
        """
        for t, buffers in self._holders.kept_inputs(node).items():
            shared = []
            for b in buffers:
                p = self._buffers[b].producer
                if self._units[p].repeatable and self._units[p].writes != (b,):
                    shared.append(b)
            if shared:
                self._copied[t] = tuple(shared)

    def _is_ours(self, node: Node) -> bool:
        """Whether the rewrite may redirect the inputs of `node`."""
        return (
            node not in self._outside
            and node.op._get_control_flow_context() is self._context
            and self._is_here(node.op)
        )

    def _is_here(self, op: tf.Operation) -> bool:
        """Whether the operation runs on the device that is planned for."""
        return self._alone or self._devices.of(op) == self._device

    def _touches_large(self, group: tuple[Node, ...]) -> bool:
        return any(
            self._sizes.large(t)
            for node in group
            if node.kind not in tf_ops.METADATA
            for t in node.inputs
        )

    def _writes(self, group: tuple[Node, ...]) -> tuple[list[tf.Tensor], int]:
        """The large tensors that the group hands on, and the bytes used inside only."""
        writes = []
        internal = 0
        for node, after in zip(group, (*group[1:], None), strict=True):
            without = self._holders.without_memory(node)
            for t in node.outputs:
                if id(t) in without and id(t) not in self._copied:
                    continue
                size = self._size(t)
                if after is not None and any(i is t for i in after.inputs):
                    # BiasAdd and Relu work in place, a convolution does not.
                    if after.kind not in ("BiasAdd", "Relu"):
                        internal += size
                elif size >= self._sizes.chain_from:
                    writes.append(t)
                elif self._is_here(node.op):
                    self._small.append(size)
        first = group[0].op
        if len(writes) > 1 and (tf_ops.is_call(first) or tf_ops.inplace_inputs(first)):
            # The output that may take over an input's memory comes first.
            writes.sort(key=self._size, reverse=True)
        return writes, internal

    def _size(self, tensor: tf.Tensor) -> int:
        """Bytes of a buffer of this tensor."""
        copied = self._copied.get(id(tensor), ())
        return self._sizes.exact(tensor) + sum(self._buffers[b].size for b in copied)

    def _add_unit(
        self,
        group: tuple[Node, ...],
        reads: tuple[int, ...],
        writes: list[tf.Tensor],
        internal: int,
        before: frozenset[int],
    ) -> None:
        u = len(self._units)
        away = not self._is_here(group[0].op)
        if away:
            # What it reads is sent as soon as it is there, and not kept for it.
            reads = ()
        outside = group[0] in self._outside
        movable = all(self._is_ours(node) for node in group)
        makers = {self._buffers[b].producer for b in reads}
        if not movable and reads:
            # The inputs are not redirected: what they are must not be made again before.
            latest = max(before)
            self._pinned.update(p for p in makers if p != latest or not outside)
        inplace = () if away else self._inplace(group, writes)
        first = len(self._buffers)
        for t in writes:
            self._views[id(t)] = (len(self._buffers), ())
            # One buffer for both: they are made together, and the gradient reads both.
            size = self._size(t) + tf_onednn.hidden_bytes(t.op)
            copied = self._copied.get(id(t), ())
            pieces = self._sizes.pieces(t) + sum(self._buffers[b].pieces for b in copied)
            self._buffers.append(TensorBuffer(t, size, pieces, u))
        for node in group:
            for source, t in self._holders.passed(node):
                self._share(source, t, ())
            kept = self._holders.add(node, self._copied)
            self._pinned.update({self._buffers[b].producer for b in kept} - {u})
            self._join_siblings(node, u)
        forward = not outside and all(node in self._forward for node in group)
        self._units.append(
            Unit(
                group=group,
                reads=reads,
                writes=tuple(range(first, len(self._buffers))),
                inplace=inplace,
                after=tuple(sorted(before - makers)),
                forward=forward,
                repeatable=movable and all(self._may_be_repeated(node) for node in group),
                chained=movable and all(map(self._can_wait, group)),
                movable=movable,
                internal=internal,
                away=away,
            )
        )
        alone = frozenset((u,))
        for node in group:
            self._waits[node] = alone
            self._unit_of[node.op] = u

    def _join_siblings(self, node: Node, u: int) -> None:
        """Let outputs that keep nothing but what is in other outputs go with these."""
        for o, t in enumerate(node.outputs):
            kept = self._holders.of(t)
            own = [b for b in kept if self._buffers[b].producer == u]
            if own and id(t) not in self._views:
                self._views[id(t)] = (own[0], ((node.op, SIBLING, o),))

    def _can_wait(self, node: Node) -> bool:
        # What comes after the gradients initialises nothing.
        return tf_ops.can_wait(node.op) or (node in self._after and tf_ops.is_update(node.op))

    def _may_be_repeated(self, node: Node) -> bool:
        if tf_ops.is_call(node.op) and node not in self._forward and may_hold_list(node.op):
            # A backward loop frees what it takes out of lists; kept, it would save nothing.
            return False
        # A reference variable may have been changed in place by the time.
        return self._purity.of(node.op) and not any(map(self._residents.is_reference, node.inputs))

    def _inplace(self, group: tuple[Node, ...], writes: list[tf.Tensor]) -> tuple[int, ...]:
        if len(group) > 1 or not writes:
            return ()
        node = group[0]
        out = writes[0]
        found = []
        for i in tf_ops.inplace_inputs(node.op):
            t = node.inputs[i]
            if id(t) not in self._views or t.dtype != out.dtype:
                continue
            b = self._views[id(t)][0]
            holders = sum(self._views.get(id(o), (-1,))[0] == b for o in node.inputs)
            size = self._sizes.exact(out)
            if holders == 1 and size == self._sizes.exact(t) == self._buffers[b].size:
                found.append(b)
        return tuple(dict.fromkeys(found))

    def finish(
        self,
        tf_graph: tf.Graph,
        outputs: tuple[tf.Tensor, ...],
        count_from: int | None,
        name: str,
    ) -> Capture:
        """The capture; arguments as those of `optckpt.frontends.tensorflow.capture`."""
        built = Built(
            order=self._order,
            units=self._units,
            buffers=self._buffers,
            views=self._views,
            holders=self._holders,
            residents=self._residents,
            variables=self._variables,
            sizes=self._sizes,
            small=self._small,
            pinned=self._pinned,
            unit_of=self._unit_of,
            overwrites=self._overwrites,
            ignored=self._ignored,
            plain_reads=self._plain_reads,
            device=self._device,
            alone=self._alone,
        )
        return finished(built, tf_graph, outputs, count_from, name)
