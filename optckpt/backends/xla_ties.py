"""Rewrite for XLA: re-executions that the compiler cannot merge, and cannot do early.

XLA drops control edges, merges equal computations and orders the rest by itself. What it must
respect is data. So the operands of each run of re-executions become `where(true, x, 0)`, with a
truth that it cannot know before the backward pass has come to that point: it is computed from one
element of each tensor that the executions before it have left. `where` keeps every bit of every
element, also of infinities, NaNs and negative zeros, which `x + zero` (as `tf.recompute_grad` has
it) would not. One tied operand per re-execution is enough, and none if it reads another one of
the same run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from optckpt.backends.tensorflow import (
    Clone,
    Edit,
    Planner,
    RewriteReport,
    apply_edit,
    check_acyclic,
    check_can_rewrite,
    remember,
)
from optckpt.backends.xla_guards import require_xla
from optckpt.frontends import tf_ops
from optckpt.frontends.tensorflow import Capture, no_garbage_collection
from optckpt.frontends.tf_traced import changes
from optckpt.schedule import Schedule

log = logging.getLogger("optckpt.backends.xla_ties")

_COPIES_OPERANDS = tf_ops.words("""
    MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Einsum Conv2D Conv3D
    DepthwiseConv2dNative Conv2DBackpropInput Conv2DBackpropFilter Conv3DBackpropInputV2
    Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter
    """)
"""XLA computes these in library calls, for which a tied operand has to be written to memory. It
fuses the others with the tie."""

_INDEX_OPERANDS = {"Gather": "indices", "GatherV2": "indices", "GatherNd": "indices"}
"""Operations whose small operand is tied rather than their table."""

_WHOLE_NUMBERS = tf_ops.words("""
    Cast Equal NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot Select
    SelectV2 Add AddV2 Sub Mul Neg Abs Maximum Minimum ZerosLike Transpose
    """)
"""Operations whose first operand may be tied even if it is not of floating-point numbers. Elsewhere
such operands are often shapes and axes, which XLA wants to know when it compiles."""

_SAME_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


@dataclass(slots=True)
class TiedEdit:
    """A planned edit of a graph, with what makes it survive XLA."""

    edit: Edit
    ties: list[tuple[int, int, int]] = field(default_factory=list)
    """(clone, input index, run of re-executions)"""
    evidence: list[list[tf.Tensor]] = field(default_factory=list)
    """Per run, tensors that exist once all executions planned before it are done."""

    def moved(
        self,
        operation: Callable[[tf.Operation], tf.Operation],
        tensor: Callable[[tf.Tensor], tf.Tensor],
    ) -> TiedEdit:
        """The same edit of a copy of the graph, in which things are found by these functions."""

        def source(s: tf.Tensor | tuple[int, int]) -> tf.Tensor | tuple[int, int]:
            return s if isinstance(s, tuple) else tensor(s)

        old = self.edit
        edit = Edit(
            clones=[
                Clone(
                    operation(c.original),
                    [source(s) for s in c.inputs],
                    c.name,
                    c.is_view,
                    c.refuse_gradient,
                )
                for c in old.clones
            ],
            moves=[(operation(op), i, source(s)) for op, i, s in old.moves],
        )
        return TiedEdit(edit, list(self.ties), [[tensor(t) for t in ts] for ts in self.evidence])


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@no_garbage_collection()
def rewrite_for_xla(
    capture: Capture, schedule: Schedule, *, scope: str = "optckpt"
) -> RewriteReport:
    """As `optckpt.backends.tensorflow.rewrite`, for a function that XLA is going to compile.

    XLA decides on the order of what the data leaves open, so that the peak is not the simulated
    one; `optckpt.backends.xla_figures` tells what it makes of a schedule.
    """
    start = time.perf_counter()
    check_can_rewrite(capture, schedule)
    tied = plan_ties(capture, schedule, scope)
    clones, ties = apply_ties(capture.tf_graph, tied, scope)
    chain = [clones[n] if isinstance(n, int) else n for group in tied.edit.chain for n in group]
    remember(capture, chain)
    require_xla(capture.tf_graph, scope)
    is_view = [c.is_view for c in tied.edit.clones]
    log.debug("%d clones in %d runs, %d ties", len(clones), len(tied.evidence), ties)
    return RewriteReport(
        clones=tuple(c for c, v in zip(clones, is_view, strict=True) if not v),
        view_clones=sum(is_view),
        redirected=len(tied.edit.moves),
        sum_copies=0,
        control_edges=0,
        seconds=time.perf_counter() - start,
    )


def plan_ties(capture: Capture, schedule: Schedule, scope: str = "optckpt") -> TiedEdit:
    """What to change in `capture.tf_graph`; nothing is changed yet. O(executions + edges).

    Raises:
        RewriteError: if the graph would get a cycle.
    """
    edit = Edit()
    planner = _TyingPlanner(capture, edit, scope)
    for u, count in schedule.steps():
        planner.execute(u, count)
    # Ties follow the schedule as the chain of control edges does: no cycle without one there.
    check_acyclic(capture, edit)
    edit.controls.clear()
    edit.gated.clear()
    return planner.tied


def apply_ties(
    graph: tf.Graph, tied: TiedEdit, scope: str = "optckpt"
) -> tuple[list[tf.Operation], int]:
    """Change `graph`. Returns the clones and how many ties were made."""
    clones, _ = apply_edit(graph, tied.edit, scope)
    known = changes(graph)
    truths: list[tf.Tensor | None] = []
    made: dict[tuple[int, int], tf.Tensor] = {}
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(f"{scope}/tie"):
        for c, i, run in tied.ties:
            tensor = clones[c].inputs[i]
            key = (run, id(tensor))
            if key not in made:
                while len(truths) <= run:
                    truths.append(_true_after(tied.evidence[len(truths)], truths[-1:]))
                with tf.device(clones[c].device):
                    made[key] = _tie(tensor, truths[run])
            known.redirect(clones[c], i, made[key])
    return clones, len(made)


def _true_after(
    evidence: Iterable[tf.Tensor], earlier: Sequence[tf.Tensor | None]
) -> tf.Tensor | None:
    """True, once all of `evidence` is computed, and `earlier` is; the compiler cannot see that."""
    truth = earlier[0] if earlier else None
    for tensor in evidence:
        with tf.device(tensor.op.device):
            one = _is_something(tf.reshape(tensor, [-1])[0])
            truth = one if truth is None else tf.logical_and(truth, one)
    return truth


def _is_something(element: tf.Tensor) -> tf.Tensor:
    """True, whatever the scalar is: its bits, the lowest one set, are not all 0."""
    if element.dtype.is_complex:
        element = tf.math.real(element)
    dtype = element.dtype
    same = _SAME_BITS.get(dtype.size)
    if dtype.is_floating and same is not None:
        element = tf.bitcast(element, same)
    elif not dtype.is_integer or dtype.is_quantized:
        element = tf.cast(element, tf.int32)
    one, none = tf.ones([], element.dtype), tf.zeros([], element.dtype)
    return tf.not_equal(tf.bitwise.bitwise_or(element, one), none)


def _tie(tensor: tf.Tensor, truth: tf.Tensor) -> tf.Tensor:
    tied = tf.where(truth, tensor, tf.zeros([], tensor.dtype))
    tied.set_shape(tensor.shape)
    return tied


class _TyingPlanner(Planner):
    """Notes, on its walk, what each run of re-executions has to be tied to."""

    def __init__(self, capture: Capture, edit: Edit, scope: str) -> None:
        super().__init__(capture, edit, scope)
        self.tied = TiedEdit(edit)
        self._before: list[int] = []
        """Units executed for the first time since the last run."""
        self._last: list[tf.Tensor] = []
        self._repeating = False
        self._run_of: dict[int, int] = {}
        """Clone -> the run that it cannot be done before."""

    def execute(self, u: int, count: int) -> None:
        if count and not self._repeating:
            # Nothing of it may have been planned: the order is then as loose as the data.
            self._last = self._leavings() or self._last
            self.tied.evidence.append(self._last)
            self._before = []
        elif not count and self.capture.chained[u]:
            self._before.append(u)
        self._repeating = bool(count)
        super().execute(u, count)

    def _clone(
        self,
        op: tf.Operation,
        inputs: list[tf.Tensor | tuple[int, int]],
        suffix: str,
        *,
        is_view: bool,
    ) -> int:
        clone = super()._clone(op, inputs, suffix, is_view=is_view)
        runs = [self._run_of[s[0]] for s in inputs if isinstance(s, tuple) and s[0] in self._run_of]
        run = len(self.tied.evidence) - 1
        if is_view:
            if runs:
                self._run_of[clone] = max(runs)
        elif run in runs:
            self._run_of[clone] = run
        elif self.tied.evidence[run]:
            i = operand_to_tie(op, self.capture.chain_from)
            if i is not None:
                self.tied.ties.append((clone, i, run))
                self._run_of[clone] = run
        return clone

    def _leavings(self) -> list[tf.Tensor]:
        """What the units since the last run have written and not read among themselves.

        Of the backward pass alone, where there is any: nothing that comes later makes the forward
        pass wait, so that it will be done by then.
        """
        capture = self.capture
        operations = capture.graph.operations
        units = [u for u in self._before if not operations[u].forward]
        if not any(map(self._results, units)):
            units = [u for u in self._before if self._results(u)][-1:]
        read = {b for u in units for b in operations[u].reads}
        return [capture.tensors[b] for u in units for b in self._results(u) if b not in read]

    def _results(self, u: int) -> list[int]:
        """The buffers that a unit writes and that have an element to look at."""
        return [
            b
            for b in self.capture.graph.operations[u].writes
            if _has_elements(self.capture.tensors[b])
        ]


def operand_to_tie(op: tf.Operation, large: int) -> int | None:
    """Index of the input of `op` to be tied; None if there is none that can be.

    The smallest where the tie costs a copy, otherwise one of at least `large` bytes where there is
    one: it is what `op` works on, and not a factor or an exponent, which the compiler may treat in
    a special way. Constants come last for the same reason.
    """
    index = _INDEX_OPERANDS.get(op.type)
    if index is not None or op.type.startswith("Stateless"):
        return _named(op, (index,) if index else ("key", "seed"))
    usable = [
        i
        for i, t in enumerate(op.inputs)
        if _has_elements(t) and (t.dtype.is_floating or t.dtype.is_complex)
    ]
    if op.type.startswith("FusedBatchNorm") and "Grad" not in op.type:
        usable = usable[:1]
    if not usable:
        if op.type in _WHOLE_NUMBERS and len(op.inputs) and _has_elements(op.inputs[0]):
            return 0
        return None
    size = {i: (tf_ops.element_count(op.inputs[i]) or 0) * op.inputs[i].dtype.size for i in usable}
    usable.sort(key=lambda i: (op.inputs[i].op.type == "Const", size[i]))
    if op.type not in _COPIES_OPERANDS:
        return next((i for i in usable if size[i] >= large), usable[0])
    return usable[0]


def _named(op: tf.Operation, names: Sequence[str]) -> int | None:
    arguments = [a.name for a in op.op_def.input_arg]
    if len(arguments) != len(op.inputs):
        return None
    return next((i for i, name in enumerate(arguments) if name in names), None)


def _has_elements(tensor: tf.Tensor) -> bool:
    return not tf_ops.is_opaque(tensor.dtype) and bool(tf_ops.element_count(tensor))
