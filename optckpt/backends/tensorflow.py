"""Rewrite: the live TensorFlow graph follows a schedule.

Re-executions become clones under one name scope, readers are redirected to the copy that is
current in the schedule, and a chain of control edges keeps the executor to the order. The edit
is planned and checked first (`Edit`) and applied afterwards; nothing outside the graph changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python.framework import ops

from optckpt.backends.calls import wait_for_calls
from optckpt.backends.grappler import hide_permutations, protect
from optckpt.backends.identity import identity, input_name
from optckpt.backends.partners import (
    has_controls,
    is_rounded_between,
    may_be_merged,
    separate_partners,
)
from optckpt.backends.sums import keep_orders
from optckpt.backends.xla_guards import bar_xla
from optckpt.errors import RewriteError
from optckpt.frontends import tf_ops
from optckpt.frontends.tensorflow import HISTORY, Capture, Past, no_garbage_collection
from optckpt.frontends.tf_capture import SIBLING
from optckpt.frontends.tf_traced import changes, next_mark
from optckpt.schedule import Schedule
from optckpt.simulate import simulate

log = logging.getLogger("optckpt.backends.tensorflow")

REFUSE_GRADIENT = "OptckptRefuseGradient"


@ops.RegisterGradient(REFUSE_GRADIENT)  # type: ignore[untyped-decorator]
def _refuse_gradient(op: tf.Operation, *_: tf.Tensor) -> None:
    raise RewriteError(
        f"operation {op.name!r} re-executes the result of a tf.custom_gradient function; it has no "
        "second derivative: take second derivatives before, or without, the memory budget"
    )


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """What was changed in the graph."""

    clones: tuple[tf.Operation, ...]
    """The re-executions, in schedule order."""
    view_clones: int
    """Reshapes and the like, cloned to lead from a copy to its readers."""
    redirected: int
    """Inputs of existing operations that now read a copy."""
    sum_copies: int
    """Inputs of sums that were copied so that the sum adds in the same order as without."""
    control_edges: int
    seconds: float
    """Wall time of the rewrite."""


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@no_garbage_collection()
def rewrite(capture: Capture, schedule: Schedule, *, scope: str = "optckpt") -> RewriteReport:
    """Edit `capture.tf_graph` in place so that it executes as `schedule` says.

    O(executions + edges). Gradient tensors stay the same objects. A schedule without
    re-executions adds control edges only; they make the peak the same in every run.

    Raises:
        ScheduleError: if the schedule cannot be executed (see `simulate`).
        RewriteError: if the graph is finalized, or would get a cycle; it is unchanged then.
    """
    start = time.perf_counter()
    check_can_rewrite(capture, schedule)
    edit = _plan(capture, schedule, scope)
    check_acyclic(capture, edit)
    clones, edges = apply_edit(capture.tf_graph, edit, scope)
    executed = [(op, clone.original) for op, clone in zip(clones, edit.clones, strict=True)]
    controls = ((_made(a, clones), _waits(b, edit, clones)) for a, b in edit.controls)
    wait_for_calls(capture, controls, dict(executed))
    _empty(capture, executed)
    copies = keep_orders(capture, executed, scope)
    chain = [_made(n, clones) for group in edit.chain for n in group]
    remember(capture, chain)
    separate_partners(([_made(n, clones) for n in unit] for unit in edit.units), scope)
    hide_permutations(capture.tf_graph, chain)
    protect([*chain, *copies, *(_waits(n, edit, clones) for n in edit.gated)])
    bar_xla(capture.tf_graph, scope)
    is_view = [c.is_view for c in edit.clones]
    report = RewriteReport(
        clones=tuple(c for c, v in zip(clones, is_view, strict=True) if not v),
        view_clones=sum(is_view),
        redirected=len(edit.moves),
        sum_copies=len(copies),
        control_edges=edges,
        seconds=time.perf_counter() - start,
    )
    log.debug(
        "%d clones, %d view clones, %d inputs redirected, %d inputs of sums copied, "
        "%d control edges in %.3f s",
        len(report.clones),
        report.view_clones,
        report.redirected,
        report.sum_copies,
        report.control_edges,
        report.seconds,
    )
    return report


def check_can_rewrite(capture: Capture, schedule: Schedule) -> None:
    """Raise ScheduleError or RewriteError if the graph cannot be made to follow the schedule."""
    simulate(capture.graph, schedule)
    if capture.tf_graph.finalized:
        raise RewriteError(
            "the graph is finalized: call gradients before it is, or before a Session finalizes it"
        )


def remember(capture: Capture, chain: Iterable[tf.Operation]) -> None:
    """Note in the graph that it executes `chain` in this order, for captures after this one."""
    history = getattr(capture.tf_graph, HISTORY, None)
    if history is None:
        setattr(capture.tf_graph, HISTORY, history := [])
    history.append(Past(tuple(chain), capture.outputs, capture.device, capture.whole))


Node: TypeAlias = tf.Operation | int
"""An operation of the graph, or the index of a planned clone."""
Source: TypeAlias = tf.Tensor | tuple[int, int]
"""A tensor of the graph, or (planned clone, output)."""


@dataclass(slots=True)
class Clone:
    """A planned copy of an operation."""

    original: tf.Operation
    inputs: list[Source]
    name: str
    is_view: bool
    refuse_gradient: bool = False


@dataclass(slots=True)
class Edit:
    """A planned edit."""

    clones: list[Clone] = field(default_factory=list)
    moves: list[tuple[tf.Operation, int, Source]] = field(default_factory=list)
    """(operation, input index, new source)"""
    controls: list[tuple[Node, Node]] = field(default_factory=list)
    """(before, after)"""
    chain: list[tuple[Node, ...]] = field(default_factory=list)
    """The chained executions, each the nodes of a unit, in order."""
    units: list[tuple[Node, ...]] = field(default_factory=list)
    """Executions of more than one operation, which TensorFlow may merge into one."""
    gated: set[Node] = field(default_factory=set)
    """Executions that wait by way of an Identity of their first input, not by control edges."""
    early: set[Node] = field(default_factory=set)
    """Clones that read variables which older operations change, and that come before these."""


def _node(source: Source) -> Node:
    return source[0] if isinstance(source, tuple) else source.op


def _plan(capture: Capture, schedule: Schedule, scope: str) -> Edit:
    edit = Edit()
    planner = Planner(capture, edit, scope)
    for u, count in schedule.steps():
        planner.execute(u, count)
    return edit


class Planner:
    """Walks a schedule and keeps which copy of each buffer is the current one."""

    def __init__(self, capture: Capture, edit: Edit, scope: str) -> None:
        self.capture = capture
        self.edit = edit
        self.scope = scope
        self.copies: dict[int, tuple[int, int]] = {}
        """Buffer -> (clone, output) that holds the current copy; absent: the original."""
        self.view_clones: dict[tuple[tf.Operation, Source], int] = {}
        self.last: Node | None = capture.follows
        """The end of the chain so far."""
        self.unwaited: list[Node] = []
        """Calls for whose end nothing in the chain waits yet, only for one of their results."""

    def execute(self, u: int, count: int) -> None:
        unit = self.capture.units[u]
        nodes = self._repeat(u, count) if count else self._original(u)
        if len(unit) > 1:
            self.edit.units.append(nodes)
        if self.capture.chained[u]:
            self._chain(unit, nodes)

    def _original(self, u: int) -> tuple[Node, ...]:
        unit = self.capture.units[u]
        if self.capture.movable[u] and self.copies:
            for op in unit:
                for i, t in enumerate(op.inputs):
                    source = self._current(t)
                    if source is not t:
                        self.edit.moves.append((op, i, source))
        return unit

    def _repeat(self, u: int, count: int) -> tuple[Node, ...]:
        own: dict[int, tuple[int, int]] = {}
        nodes: list[Node] = []
        for op in self.capture.units[u]:
            inputs: list[Source] = [
                own[id(t)] if id(t) in own else self._current(t) for t in op.inputs
            ]
            suffix = "_again" if count == 1 else f"_again{count}"
            clone = self._clone(op, inputs, suffix, is_view=False)
            own.update((id(t), (clone, o)) for o, t in enumerate(op.outputs))
            nodes.append(clone)
        changing = self.capture.written_later[u] if self.capture.written_later else ()
        if changing:
            self.edit.early.update(nodes)
            self.edit.controls += ((node, after) for node in nodes for after in changing)
        for b in self.capture.graph.operations[u].writes:
            self.copies[b] = own[id(self.capture.tensors[b])]
        return tuple(nodes)

    def _clone(self, op: tf.Operation, inputs: list[Source], suffix: str, *, is_view: bool) -> int:
        name = f"{self.scope}/{op.name.removeprefix(self.scope + '/')}{suffix}"
        self.edit.clones.append(Clone(op, inputs, name, is_view))
        return len(self.edit.clones) - 1

    def _current(self, tensor: tf.Tensor) -> Source:
        """Where the value of `tensor` is to be read at this point of the schedule."""
        found = self.capture.views.get(id(tensor))
        if found is None:
            return tensor
        b, chain = found
        source: Source | None = self.copies.get(b)
        if source is None:
            return tensor
        for op, i, o in chain:
            if i == SIBLING:
                if isinstance(source, tuple):
                    source = (source[0], o)
                continue
            if op.type == "IdentityN":
                # A clone would hold the other inputs, too.
                if overrides_gradient(op) and isinstance(source, tuple):
                    self.edit.clones[source[0]].refuse_gradient = True
                continue
            key = (op, source)
            clone = self.view_clones.get(key)
            if clone is None:
                inputs: list[Source] = list(op.inputs)
                inputs[i] = source
                clone = self._clone(op, inputs, "_of_copy", is_view=True)
                self.view_clones[key] = clone
            source = (clone, o)
        return source

    def _chain(self, unit: tuple[tf.Operation, ...], nodes: tuple[Node, ...]) -> None:
        last = self.last
        rounded = is_rounded_between(unit)
        if last is None:
            pass
        elif may_be_merged(unit, rounded) and self._reads_from(unit, last):
            # The rest of a loop's work holds memory as well, until the executor turns to it.
            if tf_ops.is_call(self._operation(last)):
                self.unwaited.append(last)
        else:
            self.edit.controls += ((call, nodes[0]) for call in self.unwaited)
            self.unwaited.clear()
            self.edit.controls.append((last, nodes[0]))
            # What oneDNN merges in the plain graph has to stay mergeable, or bits differ:
            # equal control inputs. On Conv2D + BiasAdd they would abort the process: these get
            # none, if the result depends on the merging.
            # Relu is merged by another pass, and never below a control edge.
            if rounded and not has_controls(unit):
                self.edit.gated.add(nodes[0])
            else:
                for op, node in zip(unit[1:], nodes[1:], strict=True):
                    if op.type not in ("BiasAdd", "Relu"):
                        self.edit.controls.append((last, node))
        self.edit.chain.append(nodes)
        self.last = nodes[-1]

    def _operation(self, node: Node) -> tf.Operation:
        return self.edit.clones[node].original if isinstance(node, int) else node

    def _reads_from(self, unit: tuple[tf.Operation, ...], last: Node) -> bool:
        """Whether the first member of `unit` reads the data of `last` anyway."""
        for t in unit[0].inputs:
            found = self.capture.views.get(id(t))
            if found is not None:
                b = found[0]
                source = self.copies.get(b, self.capture.tensors[b])
                if _node(source) == last:
                    return True
        return False


def overrides_gradient(op: tf.Operation) -> bool:
    """Whether the operation is differentiated otherwise than others of its type."""
    try:
        op.get_attr("_gradient_op_type")
    except ValueError:
        return False
    return True


def check_acyclic(capture: Capture, edit: Edit) -> None:
    """Raise RewriteError if the graph after `edit`, its units contracted, has a cycle."""
    members = capture.members
    index: dict[Node, int] = {op: i for i, op in enumerate(members)}
    n = len(members)
    index.update((c, n + c) for c in range(len(edit.clones)))
    group = list(range(n + len(edit.clones)))
    for unit in edit.units:
        for node in unit[1:]:
            group[index[node]] = index[unit[0]]
    moved: dict[tf.Operation, dict[int, Source]] = {}
    for op, i, source in edit.moves:
        moved.setdefault(op, {})[i] = source
    back_edges = {op for op in members if op.type in ("NextIteration", "RefNextIteration")}
    next_of: list[list[int]] = [[] for _ in group]
    waiting = [0] * len(group)

    def edge(before: Node, after: Node) -> None:
        # What is not a member was there before all members.
        if before not in index:
            return
        a, b = group[index[before]], group[index[after]]
        if a != b:
            next_of[a].append(b)
            waiting[b] += 1

    for op, g in zip(members, group, strict=False):
        earlier: list[Node]
        if op in moved or back_edges:
            changed = moved.get(op, {})
            earlier = [t.op for i, t in enumerate(op.inputs) if i not in changed]
            earlier = [p for p in earlier if p not in back_edges]
            earlier += map(_node, changed.values())
        else:
            earlier = [t.op for t in op.inputs]
        earlier += op.control_inputs
        for p in earlier:
            # As `edge`, which would take longer.
            place = index.get(p)
            if place is not None and group[place] != g:
                next_of[group[place]].append(g)
                waiting[g] += 1
    for c, clone in enumerate(edit.clones):
        for source in clone.inputs:
            edge(_node(source), c)
    for before, after in edit.controls:
        edge(before, after)
    ready = [g for g, w in enumerate(waiting) if not w]
    while ready:
        g = ready.pop()
        for b in next_of[g]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    stuck = [g for g, w in enumerate(waiting) if w and group[g] == g]
    if stuck:
        names = [members[g].name if g < n else edit.clones[g - n].name for g in stuck[:3]]
        raise RewriteError(
            f"following the schedule would put a cycle through {', '.join(map(repr, names))} into "
            "the graph; it was left as it was. This is a fault of optckpt or of the schedule's "
            "order: please report it with the plan"
        )


def _made(node: Node, clones: Sequence[tf.Operation]) -> tf.Operation:
    """The operation that a node of an edit stands for."""
    return clones[node] if isinstance(node, int) else node


def _waits(node: Node, edit: Edit, clones: Sequence[tf.Operation]) -> tf.Operation:
    """The operation that has the control edges of a node of an edit that was applied."""
    made = _made(node, clones)
    return made.inputs[0].op if node in edit.gated else made


def apply_edit(graph: tf.Graph, edit: Edit, scope: str) -> tuple[list[tf.Operation], int]:
    """Make the clones, redirect inputs, add control edges. Returns the clones, edges added."""
    clones: list[tf.Operation] = []
    known = changes(graph)
    before: dict[Node, list[Node]] = {}
    for a, b in edit.controls:
        before.setdefault(b, []).append(a)

    def tensor(source: Source) -> tf.Tensor:
        return clones[source[0]].outputs[source[1]] if isinstance(source, tuple) else source

    def real(nodes: Iterable[Node]) -> list[tf.Operation]:
        return [_made(n, clones) for n in nodes]

    edges = 0
    for c, clone in enumerate(edit.clones):
        control = [] if c in edit.gated else real(before.get(c, ()))
        edges += len(control)
        made = _make_clone(graph, clone, [tensor(s) for s in clone.inputs], control)
        clones.append(made)
        known.added[made] = known.added.get(clone.original, clone.original)
        if clone.original in known.orders:
            known.orders[made] = known.orders[clone.original]
        if c in edit.early:
            # It is younger than what changes the variable that it reads: tf.function would let it
            # wait for that.
            graph.experimental_acd_manager.run_independently(made)
    for op, i, source in edit.moves:
        known.redirect(op, i, tensor(source))
    for node, sources in before.items():
        if node in edit.gated:
            op = _made(node, clones)
            waits = list(dict.fromkeys(real(sources)))
            gate = identity(op.inputs[0], op, input_name(op, scope), waits)
            known.redirect(op, 0, gate)
            edges += len(waits)
        elif not isinstance(node, int):
            present = node.control_inputs
            new = [p for p in real(sources) if p not in present]
            if new:
                node._add_control_inputs(new)
                known.controls.update((p, node) for p in new)
                edges += len(new)
    return clones, edges


def _empty(capture: Capture, clones: Iterable[tuple[tf.Operation, tf.Operation]]) -> None:
    """Give inputs that a kernel ignores an empty tensor, so that they hold no memory.

    `clones`: (clone, original) pairs.
    """
    if not capture.ignored:
        return
    again: dict[tf.Operation, list[tf.Operation]] = {}
    for clone, original in clones:
        again.setdefault(original, []).append(clone)
    made: dict[tuple[tf.DType, str], tf.Tensor] = {}
    for op, i in capture.ignored:
        key = (op.inputs[i].dtype, op.device)
        if key not in made:
            with capture.tf_graph.as_default(), tf.control_dependencies(None), tf.device(op.device):
                made[key] = tf.constant([], op.inputs[i].dtype, name="optckpt/empty")
        for reader in (op, *again.get(op, ())):
            changes(capture.tf_graph).redirect(reader, i, made[key])


def _make_clone(
    graph: tf.Graph,
    clone: Clone,
    inputs: Sequence[tf.Tensor],
    control: Sequence[tf.Operation],
) -> tf.Operation:
    original = clone.original
    definition = original.node_def
    definition.name = graph.unique_name(clone.name)
    del definition.input[:]
    # Unique, or the optimizer would merge equal operations.
    definition.attr[tf_ops.MARK].s = next_mark()
    if clone.refuse_gradient:
        definition.attr["_gradient_op_type"].s = REFUSE_GRADIENT.encode()
    made = ops.Operation.from_node_def(
        definition,
        graph,
        inputs=list(inputs),
        output_types=None,
        control_inputs=list(control),
        op_def=original.op_def,
    )
    context = original._get_control_flow_context()
    if context is not made._get_control_flow_context():
        made._set_control_flow_context(context)
    for new, old in zip(made.outputs, original.outputs, strict=True):
        if tf_ops.element_count(new) is None:
            new.set_shape(old.shape)
    return made
