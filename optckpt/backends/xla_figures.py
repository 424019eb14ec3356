"""What XLA makes of a schedule: the memory of the compiled step, known before it runs.

XLA orders and fuses by itself, so that neither the simulated peak nor a model of the executor says
what a compiled step needs. The compiler does: each schedule is tried on a copy of the graph, which
is compiled and never run, and its buffer assignment read. A step takes its temporaries as a single
block, and one block per result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context

from optckpt.allocator import Allocator
from optckpt.backends.xla_ties import TiedEdit, apply_ties, plan_ties
from optckpt.errors import CaptureError
from optckpt.frontends.tensorflow import Capture
from optckpt.graph import Buffer, Operation, TrainingGraph
from optckpt.schedule import Schedule

log = logging.getLogger("optckpt.backends.xla_figures")

_MATRIX_PRODUCTS = ("dot", "convolution", "custom-call")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler says of a step. Sizes are bytes."""

    temporary: int
    """One block, in use as long as the step runs."""
    results: tuple[int, ...]
    """Blocks that the step returns or leaves in variables; not those it takes over from them."""
    arguments: int
    """What it finds in memory: inputs and variables."""
    products: int
    """Matrix products and convolutions executed, library calls among them."""


class XlaFigures:
    """What compiled steps need; stands where planning expects a model of the allocator."""

    is_slow: ClassVar[bool] = True

    def __init__(self, capture: Capture, allocator: Allocator | None) -> None:
        """`allocator`: what serves the blocks of the compiled step, if it has to be modelled.

        Raises:
            CaptureError: if the step cannot be compiled before it is called.
        """
        self._capture = capture
        self._allocator = allocator
        self._trial = _Trial(capture)
        self._known: dict[tuple[int, ...], Compiled] = {}

    def peak(self, graph: TrainingGraph, schedule: Schedule) -> int:
        """Peak bytes that the device's allocator will report, the resident bytes of `graph`
        included. The first time for a schedule takes as long as it takes to compile the step."""
        compiled = self.compiled(schedule)
        blocks = tuple(Buffer(f"result {i}", size) for i, size in enumerate(compiled.results))
        if self._allocator is None:
            return graph.resident + compiled.temporary + sum(compiled.results)
        everything = tuple(range(len(blocks)))
        step = Operation("step", "XlaLaunch", 0.0, (), everything, compiled.temporary)
        whole = TrainingGraph((step,), blocks, everything, graph.resident)
        return self._allocator.peak(whole, Schedule.base(whole))

    def compiled(self, schedule: Schedule) -> Compiled:
        """What the compiler says of the step along `schedule`. Raises CaptureError."""
        found = self._known.get(schedule.executions)
        if found is None:
            start = time.perf_counter()
            found = self._trial.compile(plan_ties(self._capture, schedule))
            self._known[schedule.executions] = found
            log.info(
                "compiled a schedule of %d executions in %.1f s: %d bytes of temporaries, %d of "
                "results",
                len(schedule),
                time.perf_counter() - start,
                found.temporary,
                sum(found.results),
            )
        return found


def read_compiled(serialized: bytes) -> Compiled:
    """Read an HloProto with buffer assignment (stage "optimized_hlo_proto_serialized" of
    `tf.function(...).experimental_get_compiler_ir`)."""
    proto = hlo_pb2.HloProto.FromString(serialized)
    temporary, arguments, results = 0, 0, []
    for block in proto.buffer_assignment.buffer_allocations:
        if block.is_entry_computation_parameter:
            arguments += block.size
        elif block.maybe_live_out:
            results.append(block.size)
        elif not block.is_thread_local and not block.is_constant:
            temporary += block.size
    return Compiled(
        temporary,
        tuple(results),
        arguments,
        sum(
            instruction.opcode in _MATRIX_PRODUCTS
            for computation in proto.hlo_module.computations
            for instruction in computation.instructions
        ),
    )


class _Trial:
    """A copy of the graph that is being traced, with arguments in the place of its inputs."""

    def __init__(self, capture: Capture) -> None:
        graph = capture.tf_graph
        self._outputs = capture.outputs
        self._device = _full_name(capture.device)
        self._specs: list[tf.TensorSpec] = []
        self._given: dict[str, tf.Tensor | int] = {}
        """Placeholder -> an eager tensor that it stands for, or the index of an argument."""
        stands_for = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._definition = graph_pb2.GraphDef()
        definition = graph.as_graph_def()
        inputs = {
            op.name: op
            for op in graph.get_operations()
            if op.type in ("Placeholder", "PlaceholderV2")
        }
        for name, op in inputs.items():
            outer = _outermost(stands_for.get(id(op.outputs[0])))
            if outer is not None:
                self._given[name] = outer
            elif op.outputs[0].dtype != tf.resource:
                self._given[name] = self._argument(op.outputs[0], name)
        reads = {
            op.name: op
            for op in graph.get_operations()
            if op.type == "ReadVariableOp" and op.inputs[0].op.name not in self._given
        }
        for name, op in reads.items():
            self._given[name] = self._argument(op.outputs[0], op.inputs[0].op.name)
        self._definition.CopyFrom(definition)
        del self._definition.node[:]
        for node in definition.node:
            if node.name in self._given:
                continue
            if node.name in inputs:
                self._refuse_handle(graph, node.name)
                continue
            added = self._definition.node.add()
            added.CopyFrom(node)
            # Nodes that arguments stand for now can no longer be next to others.
            added.attr.pop("_class", None)
            _drop_controls(added, self._given)
        read = {i.split(":")[0] for node in self._definition.node for i in node.input}
        self._read = read & set(self._given)

    def compile(self, tied: TiedEdit) -> Compiled:
        """Compile the graph as it is with this edit."""

        def step(*arguments: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            given = {
                f"{name}:0": arguments[it] if isinstance(it, int) else graph.capture(it)
                for name, it in self._given.items()
            }
            read = {f"{name}:0": given[f"{name}:0"] for name in self._read}
            tf.graph_util.import_graph_def(self._definition, input_map=read, name="")

            def tensor(t: tf.Tensor) -> tf.Tensor:
                found = given.get(t.name)
                return graph.get_tensor_by_name(t.name) if found is None else found

            def operation(op: tf.Operation) -> tf.Operation:
                found = given.get(f"{op.name}:0")
                return graph.get_operation_by_name(op.name) if found is None else found.op

            apply_ties(graph, tied.moved(operation, tensor))
            return [tensor(t) for t in self._outputs]

        with tf.init_scope():
            function = tf.function(
                step, input_signature=self._specs, autograph=False, jit_compile=True
            )
            concrete = function.get_concrete_function()
            try:
                serialized = context.context().get_compiler_ir(
                    device_name=self._device,
                    platform_name=None,
                    function_name=concrete.name,
                    flat_args=list(self._specs),
                    captured_inputs=concrete.captured_inputs,
                    stage="optimized_hlo_proto_serialized",
                )
            except tf.errors.OpError as e:
                reason = str(e.message).split("\n")[0]
                raise CaptureError(
                    f"XLA cannot compile the step that is to be planned ({reason}): set "
                    "jit_compile=False on the tf.function that contains optckpt's call"
                ) from e
        return read_compiled(serialized)

    def _argument(self, tensor: tf.Tensor, name: str) -> int:
        if not tensor.shape.is_fully_defined():
            raise CaptureError(
                f"under jit_compile=True a plan needs the sizes of all inputs when the function is "
                f"traced, and {name!r} has shape {tensor.shape}: give it a full shape in the "
                "input_signature, or set jit_compile=False"
            )
        self._specs.append(
            tf.TensorSpec(tensor.shape, tensor.dtype, name=f"optckpt_argument_{len(self._specs)}")
        )
        return len(self._specs) - 1

    def _refuse_handle(self, graph: tf.Graph, name: str) -> None:
        for op in graph.get_operation_by_name(name).outputs[0].consumers():
            if op.name not in self._given:
                raise CaptureError(
                    f"under jit_compile=True a plan needs the variables when the function is "
                    f"traced, and operation {op.name!r} reads argument {name!r}, a variable that "
                    "is not known yet: let the function use the variable instead of passing it, "
                    "or set jit_compile=False"
                )


def _outermost(tensor: Any) -> tf.Tensor | None:
    """The eager tensor that a captured tensor is, through all functions that are being traced."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        captures = getattr(tensor.graph, "captures", ())
        tensor = next((outer for outer, inner in captures if inner is tensor), None)
    return tensor


def _drop_controls(node: Any, gone: Iterable[str]) -> None:
    kept = [i for i in node.input if not (i.startswith("^") and i[1:] in gone)]
    if len(kept) < len(node.input):
        del node.input[:]
        node.input.extend(kept)


def _full_name(device: str) -> str:
    handle = context.context()
    handle.ensure_initialized()
    short = device.lower()
    for name in handle.devices():
        if name.lower().endswith(short):
            return str(name)
    raise CaptureError(f"TensorFlow has no device {device!r} to compile the step for")
