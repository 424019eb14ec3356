"""What operations that call functions (calls, branches, loops) need, and leave in memory.

TensorFlow inlines such operations before it runs them: their bodies are executed operation by
operation in data order, a tensor is freed after its last reader, and what nobody needs is not
made. So the bodies are gone through here in that order, with the same views and in-place reuse as
the graph outside. Lists (TensorArrays, values kept for a loop's gradient) and optionals (values
kept for a branch's gradient) hold the blocks that were put into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_functions import (
    BRANCHES,
    LOOPS,
    Body,
    Functions,
    Live,
    function_names,
)
from optckpt.frontends.tf_heap import NOTHING, Block, Heap, Value
from optckpt.frontends.tf_interpret import Run, Workspace
from optckpt.frontends.tf_lists import bytes_of
from optckpt.frontends.tf_numbers import is_number

_NESTING = 8
_DEPTH = 200


@dataclass(frozen=True)
class Outputs:
    """What an operation with bodies hands on."""

    values: tuple[Value, ...]
    own: tuple[tuple[int, int], ...]
    """For each output (blocks, bytes in all) of the memory that is its own."""
    passed: tuple[int | None, ...]
    """The input that is handed on unchanged as this output, if one is."""
    repeated: tuple[int | None, ...]
    """The earlier output that is handed on once more as this output, if one is."""
    held_inputs: tuple[tuple[int, ...], ...]
    """The inputs whose memory each output keeps besides (elements of a list, say)."""
    held_outputs: tuple[tuple[int, ...], ...]
    """The earlier outputs whose memory each output keeps besides."""


class Bodies:
    """Looks into the operations of one graph; remembers what it has found."""

    def __init__(self, alive: Iterable[tf.Operation] = (), kept: Iterable[tf.Tensor] = ()) -> None:
        """`alive`: the operations that run; `kept`: tensors that are needed at the end."""
        self._functions = Functions()
        self._alive = set(alive)
        self._kept = {id(t) for t in kept}
        self._live: dict[tuple[tf.Operation, int | None], Live] = {}
        self._values: dict[int, Value] = {}
        self._outputs: dict[tf.Operation, Outputs | None] = {}

    def live(self, op: tf.Operation) -> Live:
        """Indices of the outputs of `op` that somebody needs."""
        if op.type in BRANCHES and self._functions.known(op):
            return frozenset().union(*self._live_by_branch(op))
        return self._live_if(op, None)

    def _live_by_branch(self, op: tf.Operation) -> list[Live]:
        """The outputs that are needed, for each branch that may be taken."""
        return [self._live_if(op, k) for k in range(len(function_names(op)))]

    def _live_if(self, op: tf.Operation, branch: int | None) -> Live:
        key = (op, branch)
        if key not in self._live:
            self._live[key] = frozenset(
                o
                for o, t in enumerate(op.outputs)
                if id(t) in self._kept or any(self._needs(c, t, branch) for c in t.consumers())
            )
        return self._live[key]

    def reads(self, op: tf.Operation) -> frozenset[int]:
        """Indices of the inputs that a call, branch or loop needs."""
        return self._functions.reads(op, self.live(op))

    def _needs(self, consumer: tf.Operation, tensor: tf.Tensor, branch: int | None) -> bool:
        if self._alive and consumer not in self._alive:
            return False
        if not self._functions.known(consumer):
            return True
        read: Collection[int] = self.reads(consumer)
        maker = tensor.op
        if (
            branch is not None
            and consumer.type in BRANCHES
            and consumer.inputs[0] is maker.inputs[0]
            and len(function_names(consumer)) == len(function_names(maker))
        ):
            # The gradient of a branch takes the same way; what the other way needs is let go.
            body = self._functions.of(consumer, self._live_if(consumer, branch))[branch]
            read = {0} | {i + 1 for i in body.reads}
        return any(consumer.inputs[i] is tensor for i in read)

    def held(self, tensor: tf.Tensor) -> tuple[int, int]:
        """(blocks, bytes in all) that a list or an optional keeps in memory."""
        blocks = self.value(tensor).blocks
        return len(blocks), sum(b.size for b in blocks)

    def own(self, tensor: tf.Tensor) -> tuple[int, int]:
        """(blocks, bytes in all) of these that are nobody else's."""
        found = self.outputs(tensor.op) if tf_ops.is_call(tensor.op) else None
        if found is not None:
            return found.own[int(tensor.value_index)]
        others = {b for t in tensor.op.inputs for b in self.value(t).blocks}
        blocks = [b for b in self.value(tensor).blocks if b not in others]
        return len(blocks), sum(b.size for b in blocks)

    def value(self, tensor: tf.Tensor, depth: int = _DEPTH) -> Value:
        """What a tensor of the graph holds in memory."""
        key = id(tensor)
        if key not in self._values:
            # Also guards against the back edges of TensorFlow 1 loops.
            self._values[key] = NOTHING
            self._values[key] = self._value(tensor, depth)
        return self._values[key]

    def _value(self, tensor: tf.Tensor, depth: int) -> Value:
        op = tensor.op
        if not depth or op.type in tf_ops.RESIDENT - {"Const"}:
            return NOTHING
        if tf_ops.is_call(op):
            found = self.outputs(op, depth - 1)
            if found is not None:
                return found.values[int(tensor.value_index)]
        elif tensor.dtype == tf.variant or is_number(tensor) or tf_ops.views(op):
            inputs = [self.value(t, depth - 1) for t in op.inputs]
            # Nothing may be taken over: what a tensor holds must not depend on who asks.
            heap = Heap()
            for v in inputs:
                heap.hold(v)
                heap.hold(v)
            return Run(self._functions, heap, None).single(op, inputs, set())[
                int(tensor.value_index)
            ]
        size = bytes_of(tensor)
        return Value((Block(size),)) if size else NOTHING

    def outputs(self, op: tf.Operation, depth: int = _DEPTH) -> Outputs | None:
        """What a call, branch or loop hands on; None if its bodies cannot be found."""
        if op not in self._outputs:
            self._outputs[op] = None
            self._outputs[op] = self._find_outputs(op, depth)
        return self._outputs[op]

    def _find_outputs(self, op: tf.Operation, depth: int) -> Outputs | None:
        if not self._functions.known(op):
            return None
        inputs = self._inputs(op, depth)
        values, _ = self._go_through(op, inputs, Heap(), (), None)
        passed = _passed(op, self._functions.of(op, self.live(op)))
        values = [v if p is None else inputs[p] for v, p in zip(values, passed, strict=True)]
        repeated = _repeated(op, self._functions.of(op, self.live(op)))
        owner: dict[Block, tuple[str, int]] = {}
        for i, v in enumerate(inputs):
            for b in v.blocks:
                owner.setdefault(b, ("input", i))
        own, held_inputs, held_outputs = [], [], []
        for o, v in enumerate(values):
            mine = [b for b in v.blocks if b not in owner]
            own.append((len(mine), sum(b.size for b in mine)))
            others = [owner[b] for b in v.blocks if b in owner]
            held_inputs.append(tuple(dict.fromkeys(i for side, i in others if side == "input")))
            held_outputs.append(tuple(dict.fromkeys(i for side, i in others if side == "output")))
            owner.update((b, ("output", o)) for b in mine)
        return Outputs(
            tuple(values), tuple(own), passed, repeated, tuple(held_inputs), tuple(held_outputs)
        )

    def workspace(
        self,
        op: tf.Operation,
        dying: Collection[int],
        counted: Callable[[int], int],
        workspace: Workspace | None = None,
    ) -> int:
        """Bytes that `op` needs at its peak beside its inputs and outputs.

        Negative, if inputs are freed inside before the outputs are made.

        Args:
            dying: indices of the inputs that nobody needs afterwards.
            counted: what the allocator counts of a block of so many bytes.
            workspace: of the operations inside; by default they need none.
        """
        found = self.outputs(op)
        if found is None:
            return 0
        inputs = self._inputs(op, _DEPTH)
        heap = Heap(counted)
        _, peak = self._go_through(op, inputs, heap, dying, workspace)
        return peak - heap.size(inputs) - sum(_counted_own(o, counted) for o in found.own)

    def _go_through(
        self,
        op: tf.Operation,
        inputs: Sequence[Value],
        heap: Heap,
        dying: Collection[int],
        workspace: Workspace | None,
    ) -> tuple[list[Value], int]:
        for i, v in enumerate(inputs):
            heap.hold(v)
            if i not in dying:
                heap.hold(v)
        run = Run(self._functions, heap, workspace)
        lives = self._live_by_branch(op) if op.type in BRANCHES else [self.live(op)]
        return run.call(op, list(inputs), lives, _NESTING), heap.peak

    def _inputs(self, op: tf.Operation, depth: int) -> list[Value]:
        needed = self.reads(op)
        return [self.value(t, depth) if i in needed else NOTHING for i, t in enumerate(op.inputs)]


def _passed(op: tf.Operation, bodies: Sequence[Body]) -> tuple[int | None, ...]:
    found: list[int | None] = []
    results = bodies[1:] if op.type in LOOPS else bodies
    for o in range(len(op.outputs)):
        sources = {b.passed(o) for b in results}
        source = sources.pop() if len(sources) == 1 else None
        if op.type in LOOPS and source != o:
            # What one iteration hands to the next as another variable.
            source = None
        if source is not None and op.type in BRANCHES:
            source += 1
        found.append(source)
    return tuple(found)


def _repeated(op: tf.Operation, bodies: Sequence[Body]) -> tuple[int | None, ...]:
    results = bodies[1:] if op.type in LOOPS else bodies
    first: dict[tuple[int, ...], int] = {}
    found: list[int | None] = []
    for o in range(len(op.outputs)):
        sources = [b.source(o) for b in results]
        key = tuple(map(id, sources))
        known = not any(t is None for t in sources)
        found.append(first.get(key) if known else None)
        if known:
            first.setdefault(key, o)
    return tuple(found)


def _counted_own(own: tuple[int, int], counted: Callable[[int], int]) -> int:
    count, size = own
    return counted(size // count) * count if count else 0
