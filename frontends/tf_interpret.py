"""Goes through operations in the order of execution and keeps account of memory.

Views and in-place reuse are as outside of functions (`tf_ops`). Of branches the one that leaves
most in memory counts, unless it is known which is taken. Loops are gone through iteration by
iteration; a loop whose end is not known in advance is gone through once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
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
from optckpt.frontends.tf_heap import NOTHING, Block, Heap, Value, list_of
from optckpt.frontends.tf_lists import SPECIAL, added, item, like, new
from optckpt.frontends.tf_numbers import constant_number, evaluate

log = logging.getLogger("optckpt.frontends.tensorflow")

Workspace = Callable[[tf.Operation], int]
"""Bytes that a single operation needs beside its inputs and outputs."""

_MOST_ITERATIONS = 32
"""Iterations that are gone through one by one; the rest repeats the last."""
_SEARCH = 1 << 24
_SAID = "_optckpt_unknown_loops"
"""Attribute of a graph: names of its loops whose unknown end has been warned of."""


class Run:
    """Goes through operations on a heap."""

    def __init__(self, functions: Functions, heap: Heap, workspace: Workspace | None) -> None:
        self._functions = functions
        self._heap = heap
        self._workspace = workspace

    def body(self, body: Body, arguments: Sequence[Value], nesting: int) -> list[Value]:
        """Results of a function; its arguments and its results are held once for it."""
        heap = self._heap
        env: dict[int, Value] = {}
        for i, (t, v) in enumerate(zip(body.inputs, arguments, strict=True)):
            if i in body.reads:
                env[id(t)] = v
            else:
                heap.release(v)
        for step in body.steps:
            op = step.op
            inputs = [env[id(t)] if i in step.reads else NOTHING for i, t in enumerate(op.inputs)]
            if tf_ops.is_call(op):
                for v in inputs:
                    heap.hold(v)
                for t in step.dying:
                    heap.release(env[id(t)])
                outputs = self.call(op, inputs, [step.live], nesting - 1)
            else:
                outputs = self.single(op, inputs, {id(t) for t in step.dying})
                for v in outputs:
                    heap.hold(v)
                if self._workspace is not None and op.inputs:
                    heap.use(self._workspace(op))
                for t in step.dying:
                    heap.release(env[id(t)])
            for o, (t, v) in enumerate(zip(op.outputs, outputs, strict=True)):
                if o in step.live:
                    env[id(t)] = v
                else:
                    heap.release(v)
        results = []
        first = set()
        for t in body.outputs:
            v = NOTHING if t is None else env.get(id(t), NOTHING)
            # The graph holds a tensor once however often it is returned.
            if id(t) in first:
                heap.hold(v)
            first.add(id(t))
            results.append(v)
        return results

    def call(
        self, op: tf.Operation, inputs: list[Value], lives: Sequence[Live], nesting: int
    ) -> list[Value]:
        """Outputs of an operation with bodies, as `body`.

        `lives`: the outputs that are needed, one set for all branches or one for each. The others
        hold nothing.
        """
        if not nesting or not self._functions.known(op):
            outputs = self.single(op, inputs, set())
            for v in outputs:
                self._heap.hold(v)
            for v in inputs:
                self._heap.release(v)
            return outputs
        if op.type in BRANCHES:
            self._heap.release(inputs[0])
            count = len(function_names(op))
            each = lives if len(lives) == count else [lives[0]] * count
            bodies = [self._functions.of(op, live)[k] for k, live in enumerate(each)]
            return self._branch(op, bodies, inputs, nesting)
        live = lives[0]
        if op.type in LOOPS:
            cond, body = self._functions.of(op, self._functions.carried(op, live))
            values = self._loop(op, cond, body, inputs, nesting)
            for o, v in enumerate(values):
                if o not in live:
                    self._heap.release(v)
            return [v if o in live else NOTHING for o, v in enumerate(values)]
        return self.body(self._functions.of(op, live)[0], inputs, nesting)

    def _branch(
        self, op: tf.Operation, bodies: Sequence[Body], inputs: list[Value], nesting: int
    ) -> list[Value]:
        """The branch that is known to be taken, or else the one that leaves most in memory."""
        index = item(inputs[0])
        if index is not None:
            if op.type in ("If", "StatelessIf"):
                index = 0 if index else 1
            bodies = [bodies[index if 0 <= index < len(bodies) else -1]]
        best: tuple[tuple[int, int], list[Value], Heap] | None = None
        for body in bodies:
            heap = self._heap.fork()
            results = Run(self._functions, heap, self._workspace).body(body, inputs[1:], nesting)
            if best is None or (heap.live, heap.peak) > best[0]:
                best = (heap.live, heap.peak), results, heap
        assert best is not None
        peak = max(best[2].peak, self._heap.peak)
        self._heap.become(best[2])
        self._heap.peak = peak
        return best[1]

    def _loop(
        self, op: tf.Operation, cond: Body, body: Body, values: list[Value], nesting: int
    ) -> list[Value]:
        heap = self._heap
        before: list[Value] = values
        transient = 0
        count = 0
        while count < _MOST_ITERATIONS:
            again = self._condition(cond, values, nesting)
            if again is False:
                return values
            if again is None and not self._bounded(cond, values, body, nesting):
                if any(v.items is not None and not v.items for v in values):
                    _warn(op)
                return self.body(body, values, nesting)
            before, start = values, heap.peak
            heap.peak = heap.live
            values = self.body(body, values, nesting)
            transient = heap.peak - heap.live
            heap.peak = max(heap.peak, start)
            count += 1
        more = self._more(cond, before, values, nesting)
        values = self._extend(before, values, more)
        heap.use(transient)
        return values

    def _condition(self, cond: Body, values: Sequence[Value], nesting: int) -> bool | None:
        for v in values:
            self._heap.hold(v)
        (result,) = self.body(cond, values, nesting)
        self._heap.release(result)
        found = item(result)
        return None if found is None else bool(found)

    def _numbers_only(self, cond: Body, values: Sequence[Value]) -> bool | None:
        quiet = Run(self._functions, Heap(), None)
        numbers = [Value(items=v.items, number=v.number) for v in values]
        return quiet._condition(cond, numbers, 1)

    def _bounded(self, cond: Body, values: Sequence[Value], body: Body, nesting: int) -> bool:
        """Whether the numbers end the loop at some time, whatever the data are."""
        quiet = Run(self._functions, Heap(), None)
        numbers = [Value(items=v.items, number=v.number) for v in values]
        after = quiet.body(body, numbers, nesting)
        return self._more(cond, numbers, after, nesting) is not None

    def _more(
        self, cond: Body, before: Sequence[Value], values: Sequence[Value], nesting: int
    ) -> int | None:
        """How many more iterations there are if the numbers go on as they did; None: for ever."""

        def ends(k: int) -> bool:
            return self._numbers_only(cond, _ahead(before, values, k)) is False

        high = 1
        while not ends(high):
            high *= 2
            if high > _SEARCH:
                return None
        low = 0
        while low < high:
            middle = (low + high) // 2
            if ends(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _extend(
        self, before: Sequence[Value], values: Sequence[Value], more: int | None
    ) -> list[Value]:
        """The values after `more` iterations that do to lists what the last one did."""
        if not more:
            return list(values)
        known = {b for v in before for b in v.blocks}
        copies: list[dict[Block, Block]] = [{} for _ in range(more)]
        ended = _ahead(before, values, more)
        result = []
        for old, now, end in zip(before, values, ended, strict=True):
            if now.items is None or old.items is None:
                result.append(end)
                continue
            grown = len(now.items) - len(old.items)
            filled = [
                i
                for i, item in enumerate(now.items)
                if item is not None and (i >= len(old.items) or old.items[i] is None)
            ]
            items = list(now.items)
            if grown < 0:
                items = items[: max(0, len(items) + grown * more)]
            elif filled:
                free = iter([i for i, item in enumerate(items) if item is None])
                for copy in copies:
                    for i in filled:
                        item = _copied(now.items[i], known, copy)
                        place = next(free, None)
                        if place is not None:
                            items[place] = item
                        elif grown:
                            items.append(item)
            extended = list_of(items)
            self._heap.hold(extended)
            self._heap.release(now)
            result.append(extended)
        return result

    # Single operations

    def single(self, op: tf.Operation, inputs: Sequence[Value], dying: set[int]) -> list[Value]:
        """Results of an operation without bodies; not held yet."""
        kind = op.type
        if kind == "Const":
            return [Value(number=constant_number(op))]
        if kind in tf_ops.RESIDENT:
            return [NOTHING for _ in op.outputs]
        special = SPECIAL.get(kind)
        if special is not None:
            return special(op, inputs)
        pairs = {o: i for i, o in tf_ops.views(op)}
        if pairs:
            return [inputs[pairs[o]] if o in pairs else new(t) for o, t in enumerate(op.outputs)]
        if any(t.dtype == tf.variant for t in op.outputs):
            return self._variants(op, inputs)
        number = evaluate(op, inputs) if len(op.outputs) == 1 else None
        if number is not None:
            return [Value(number=number)]
        results = [new(t) for t in op.outputs]
        if results and results[0].blocks:
            for i in tf_ops.inplace_inputs(op):
                taken = self._heap.owned(inputs[i])
                if (
                    taken is not None
                    and id(op.inputs[i]) in dying
                    and taken.size == results[0].blocks[0].size
                    and op.inputs[i].dtype == op.outputs[0].dtype
                    and sum(taken in v.blocks for v in inputs) == 1
                ):
                    results[0] = Value((taken,))
                    break
        return results

    def _variants(self, op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
        lists = [v for v in inputs if v.items is not None]
        if op.type == "ZerosLike" and lists:
            return [list_of(None if i is None else like(i) for i in lists[0].items or ())]
        if op.type in ("AddN", "AddV2", "Add") and lists:
            total = lists[0]
            for other in lists[1:]:
                total = added(total, other)
            return [total]
        # Whatever else is done with lists, they stay in memory.
        return [list_of([*inputs]) if t.dtype == tf.variant else new(t) for t in op.outputs]


def _warn(loop: tf.Operation) -> None:
    """Say once of each loop that its end is unknown."""
    said = getattr(loop.graph, _SAID, None)
    if said is None:
        setattr(loop.graph, _SAID, said := set())
    if loop.name in said:
        return
    said.add(loop.name)
    log.warning(
        "what loop %r keeps for its gradient is missing from the prediction of memory, as the "
        "number of iterations is not known: give the loop maximum_iterations",
        loop.name,
    )


def _copied(item: Value | None, known: set[Block], copy: dict[Block, Block]) -> Value | None:
    """An element like `item`: blocks that were there before are the same, others are new."""
    if item is None:
        return None
    if item.items is not None:
        return list_of(_copied(i, known, copy) for i in item.items)
    return Value(tuple(b if b in known else copy.setdefault(b, Block(b.size)) for b in item.blocks))


def _ahead(before: Sequence[Value], values: Sequence[Value], more: int) -> list[Value]:
    """`values` with the numbers that they have after `more` further steps like the last one."""
    result = []
    for old, now in zip(before, values, strict=True):
        if now.number is None or now.number.dtype == bool:
            result.append(now)
        elif old.number is None or old.number.shape != now.number.shape:
            result.append(Value(now.blocks, now.items))
        else:
            step = now.number.astype(np.int64) - old.number
            result.append(Value(now.blocks, now.items, now.number + step * more))
    return result
