"""The measured model: each distinct operation is run on its device and timed.

One operation is in memory at a time, fed with synthetic inputs, so a model that does not fit
can be measured. What cannot be run alone (state, resources, loops) is put together from what
its body costs, or estimated by a roofline whose two rates are measured on the same device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from optckpt.costs.cache import Cost
from optckpt.costs.constants import Folder, Shapes, static_shape
from optckpt.costs.execute import CHAIN, Runner, eager_scope, run_operation
from optckpt.costs.flops import FREE, roofline
from optckpt.costs.functions import called
from optckpt.costs.inputs import Argument, UnmeasurableError, tensor_size
from optckpt.costs.progress import Display
from optckpt.costs.registry import Captured, CostOptions
from optckpt.costs.signature import (
    Call,
    Program,
    environment,
    leaving,
    make_program,
    short_device,
)
from optckpt.frontends.tf_onednn import needs_no_workspace
from optckpt.graph import TrainingGraph

logger = logging.getLogger("optckpt.costs")

# Below this an execution in place is as fast as one that is not, within what can be measured.
_WORTH_CHAINING = 200e-6
# In place, memory is read and written at one address instead of two: about two thirds of the
# traffic, or half where the output is cached. What is measured below that is noise.
_LEAST_IN_PLACE = 0.4
_DISPATCH = 1e-6
"""Seconds that the executor takes for an operation, however small."""
_NESTING = 8
_FREE = Cost(0.0, 0)


def measured(capture: Captured, options: CostOptions) -> Sequence[Cost]:
    """Measured seconds and workspace bytes of each operation of the graph.

    Seconds are the least of `options.repeats` or more executions after a warm-up, less the
    overhead of dispatching from Python. Workspace is the allocator's peak beyond inputs and
    outputs (0 where the device does not keep statistics; TensorFlow's CPU allocator ignores
    blocks under 256 KiB), and at least what the capture found. An operation whose input dies
    there in base order, and whose output takes over its memory, is charged what it takes in
    place.

    The device's memory statistics are reset on the way; nothing else is changed.
    """
    # AutoGraph would convert all that is called while a function is traced.
    run = tf.autograph.experimental.do_not_convert(_measured)
    costs: list[Cost] = run(capture, options)
    return costs


def _measured(capture: Captured, options: CostOptions) -> list[Cost]:
    start = time.perf_counter()
    units, operations = capture.units, capture.graph.operations
    in_place = _dying_inputs(capture.graph)
    with eager_scope(), Display(options.progress, len(units)) as display:
        meter = _Meter(capture.device, options)
        costs = []
        for i, unit in enumerate(units):
            display.update(i, operations[i].name)
            cost = meter.unit(unit, in_place[i])
            inner = capture.inside.get(i)
            if inner is not None:
                cost = Cost(cost.seconds, inner.workspace(meter.workspace))
            # A device without statistics measures nothing of what a unit holds inside.
            costs.append(Cost(cost.seconds, max(cost.workspace, operations[i].workspace)))
        display.update(len(units), "")
    logger.info(
        "costs of %d operations: %d signatures measured, %d from the cache, %d operations "
        "estimated, %.1f s",
        len(units),
        meter.measured,
        meter.cached,
        meter.estimated,
        time.perf_counter() - start,
    )
    return costs


def _dying_inputs(graph: TrainingGraph) -> list[bool]:
    """For each operation, whether its output takes over an input's memory in base order."""
    kept = set(graph.outputs)
    readers = graph.readers
    return [
        any(
            readers[b][-1] == i
            and b not in kept
            and op.writes
            and graph.buffers[b].size == graph.buffers[op.writes[0]].size
            for b in op.inplace
        )
        for i, op in enumerate(graph.operations)
    ]


class _Meter:
    """Costs of operations, each signature measured once."""

    def __init__(self, device: str, options: CostOptions) -> None:
        self.measured = 0
        self.cached = 0
        self.estimated = 0
        self._devices = {short_device(d.name) for d in tf.config.list_logical_devices()}
        self._default = self._existing(short_device(device), "/device:CPU:0")
        self._options = options
        self._folder = Folder(run_operation, self._probe)
        self._shapes: dict[str, list[tuple[int, ...]]] = {}
        self._runners: dict[str, Runner] = {}
        self._known: dict[str, Cost] = {}
        self._failed: set[str] = set()
        self._warned: set[str] = set()
        self._environments: dict[str, dict[str, Any]] = {}
        self._rates: dict[str, tuple[float, float]] = {}

    def unit(self, ops: Sequence[Any], in_place: bool) -> Cost:
        """Cost of the operations of one unit, executed in order."""
        working = [op for op in ops if op.type not in FREE]
        if not working:
            return _FREE
        if len(working) == 1:
            return self._operation(working[0], in_place)
        if len({self._device(op) for op in working}) == 1:
            # Views between the members stay, lest their inputs look as if they came from outside.
            members = [op for op in ops if op.inputs and not op.op_def.is_stateful]
            cost = self._program(members, "+".join(op.type for op in working))
            if cost is not None:
                return cost
        costs = [self._operation(op) for op in working]
        outside = {t.ref() for t in leaving(ops)}
        inner = sum(_bytes(t) for op in working for t in op.outputs if t.ref() not in outside)
        return Cost(sum(c.seconds for c in costs), inner + max(c.workspace for c in costs))

    def _operation(self, op: Any, in_place: bool = False, nesting: int = _NESTING) -> Cost:
        if op.type in FREE:
            return _FREE
        calls = called(op, self._folder) if nesting else None
        if calls is not None and calls.bodies:
            seconds = [self._sequence(body, nesting - 1) for body in calls.bodies]
            total = max(seconds) if calls.exclusive else sum(seconds)
            # Memory is not the sum of what is inside: the capture knows.
            return Cost(calls.times * total, 0)
        cost = self._program([op], op.type)
        if cost is None:
            return self._estimate(op)
        if cost.workspace and needs_no_workspace(op):
            cost = Cost(cost.seconds, 0)
        if in_place and cost.seconds > _WORTH_CHAINING:
            return self._in_place(op, cost)
        return cost

    def _sequence(self, ops: Sequence[Any], nesting: int = _NESTING) -> float:
        """Seconds of operations one after the other."""
        return sum(self._operation(op, nesting=nesting).seconds for op in ops)

    def workspace(self, op: Any) -> int:
        """Workspace of one operation inside a function, in bytes."""
        return 0 if op.type in FREE else self._operation(op, nesting=0).workspace

    def _program(self, ops: Sequence[Any], name: str) -> Cost | None:
        """Measured or cached cost; None if it cannot be measured."""
        try:
            program = make_program(ops, self._folder)
        except UnmeasurableError as reason:
            logger.debug("%s (%s) cannot be measured alone: %s", ops[0].name, name, reason)
            return None
        except Exception as error:
            self._warn(name, ops[0].name, error)
            return None
        return self._measure(program, self._device(ops[0]), ops[0].name)

    def _measure(self, program: Program, device: str, name: str) -> Cost | None:
        try:
            signature = program.signature(self._environment(device))
        except UnmeasurableError as reason:
            logger.debug("%s (%s) cannot be measured alone: %s", name, program.name, reason)
            return None
        if signature in self._known:
            return self._known[signature]
        if signature in self._failed:
            return None
        cache = self._options.cache
        cost = cache.get(signature) if cache is not None else None
        if cost is not None:
            self.cached += 1
        else:
            try:
                cost = self._runner(device).measure(program)
            except UnmeasurableError as reason:
                logger.debug("%s (%s) cannot be measured alone: %s", name, program.name, reason)
            except Exception as error:
                self._warn(program.name, name, error)
            if cost is None:
                self._failed.add(signature)
                return None
            cost = Cost(max(cost.seconds, _DISPATCH), cost.workspace)
            self.measured += 1
            if cache is not None:
                cache.put(signature, cost)
        self._known[signature] = cost
        return cost

    def _in_place(self, op: Any, plain: Cost) -> Cost:
        """Cost when the first output takes over the memory of an input."""
        result = op.outputs[0]
        shape = static_shape(result)
        index = next(
            (
                i
                for i, t in enumerate(op.inputs)
                if t.dtype.base_dtype == result.dtype.base_dtype and static_shape(t) == shape
            ),
            None,
        )
        if index is None or shape is None:
            return plain
        program = make_program([op], self._folder)
        chained = self._measure(
            Program(program.calls, ((0, 0),), chain=index), self._device(op), op.name
        )
        if chained is None:
            return plain
        each = (chained.seconds - plain.seconds) / (CHAIN - 1)
        return Cost(min(max(each, _LEAST_IN_PLACE * plain.seconds), plain.seconds), 0)

    def _probe(self, op: Any) -> Shapes | None:
        """Shapes of the outputs of `op`, seen by running it on synthetic inputs."""
        try:
            program = make_program([op], self._folder)
            device = self._device(op)
            signature = program.signature(self._environment(device))
            if signature not in self._shapes:
                self._shapes[signature] = self._runner(device).shapes(program)
            return self._shapes[signature]
        except Exception as error:
            logger.debug("%s (%s): unknown output shapes: %s", op.name, op.type, error)
            return None

    def _estimate(self, op: Any) -> Cost:
        self.estimated += 1
        flops_per_second, bytes_per_second = self._device_rates(self._device(op))
        seconds = roofline(op, flops_per_second, bytes_per_second, self._folder)
        logger.debug("%s (%s) estimated at %.3g s", op.name, op.type, seconds)
        return Cost(max(seconds, _DISPATCH), 0)

    def _device_rates(self, device: str) -> tuple[float, float]:
        """Measured flops per second and bytes per second of a device."""
        if device not in self._rates:
            self._rates[device] = (
                _rate(self._measure(_MATMUL, device, "a probe"), 2 * _PROBE**3, 1e11),
                _rate(self._measure(_ADD, device, "a probe"), 3 * 4 * _PROBE_ELEMENTS, 1e10),
            )
        return self._rates[device]

    def _device(self, op: Any) -> str:
        return (
            self._existing(short_device(op.device), self._default) if op.device else (self._default)
        )

    def _environment(self, device: str) -> dict[str, Any]:
        if device not in self._environments:
            self._environments[device] = environment(device)
        return self._environments[device]

    def _existing(self, device: str, otherwise: str) -> str:
        return device if device in self._devices else otherwise

    def _runner(self, device: str) -> Runner:
        if device not in self._runners:
            self._runners[device] = Runner(device, self._options.repeats)
        return self._runners[device]

    def _warn(self, kind: str, name: str, error: Exception) -> None:
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.log(
            level, "%s (%s) could not be measured, its cost is estimated: %s", name, kind, text
        )


def _bytes(tensor: Any) -> int:
    return tensor_size(tensor.dtype.base_dtype.name, static_shape(tensor))


def _rate(cost: Cost | None, amount: float, otherwise: float) -> float:
    return amount / cost.seconds if cost is not None and cost.seconds > 0 else otherwise


_PROBE = 768
_PROBE_ELEMENTS = 1 << 22


def _probe(kind: str, shape: tuple[int, ...]) -> Program:
    node = tf.compat.v1.NodeDef()
    node.attr["T"].type = tf.float32.as_datatype_enum
    operand = Argument("float32", shape, "normal")
    call = Call(kind, dict(node.attr.items()), (operand, operand), (("float32", shape),))
    return Program((call,), ((0, 0),))


_MATMUL = _probe("MatMul", (_PROBE, _PROBE))
_ADD = _probe("AddV2", (_PROBE_ELEMENTS,))
