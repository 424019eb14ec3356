"""Running programs alone: eagerly, on their device, timed, with the allocator watched."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import ops

from optckpt.budget import format_bytes
from optckpt.costs.cache import Cost
from optckpt.costs.constants import static_shape
from optckpt.costs.inputs import Argument, UnmeasurableError, synthesise, tensor_size
from optckpt.costs.signature import Call, Link, Program, eager_attributes
from optckpt.device import bytes_in_use, memory_limit

CHAIN = 5
"""Length of the chain in which all calls but the first work in place."""
_SMALL = 200e-6
_SMALL_ALLOWANCE = 3e-3
_ALLOWANCE = 20e-3
_BUSY_ALLOWANCE = 150e-3
_NEAR = 1.05
_SMALL_BYTES = 1 << 16
_UNCHECKED_BYTES = 1 << 28
_UNCHECKED_INPUTS = 1 << 18
_PIECE = 1 << 16
_CONTAINER_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@contextlib.contextmanager
def eager_scope() -> Iterator[None]:
    """Eager execution, wherever the caller is: tracing a function, or in a v1 graph.

    Leaves no operation in any graph, draws no random number of TensorFlow's, records on no tape.
    """
    with ops.init_scope(), context.eager_mode(), tf.device(None):
        from tensorflow.python.eager import record

        with record.stop_recording():
            yield


def run_operation(op: Any, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a stateless `tf.Operation` on concrete inputs on the CPU and return its outputs."""
    attrs = {k: v for k, v in op.node_def.attr.items() if not k.startswith("_")}
    with tf.device("/device:CPU:0"):
        inputs = [
            tf.constant(v, t.dtype.base_dtype) for v, t in zip(values, op.inputs, strict=True)
        ]
        outputs = execute.execute(
            op.type.encode(), len(op.outputs), inputs, eager_attributes(attrs), context.context()
        )
    return [t.numpy() for t in outputs]


class Runner:
    """Measures programs on one device. To be used within `eager_scope`."""

    def __init__(self, device: str, repeats: int = 3) -> None:
        self.device = device
        self.repeats = repeats
        self._memory = device.removeprefix("/device:")
        self._overheads: dict[bool, float] = {}
        self._synchronise = "CPU" not in device or context.context().is_async()

    def measure(self, program: Program) -> Cost:
        """Seconds and workspace of one execution of `program`.

        Raises:
            UnmeasurableError: if the outputs have other shapes than in the graph.
            Exception: whatever TensorFlow raises.
        """
        _check_memory(program, self.device)
        with tf.device(self.device):
            arguments = [
                _tensor(a) for c in program.calls for a in c.inputs if isinstance(a, Argument)
            ]
            if len(program.calls) == 1 and program.chain is None:
                run, function = _eager(program.calls[0], arguments), False
            else:
                run, function = _function(program, arguments), True
            self._check(program, run())
            seconds, workspace = self._time(run)
        overhead = self._overhead(function)
        return Cost(max(0.0, seconds - overhead), workspace)

    def shapes(self, program: Program) -> list[tuple[int, ...]]:
        """Shapes of the outputs of a program of one call, found by running it once."""
        (call,) = program.calls
        with tf.device(self.device):
            arguments = [_tensor(a) for a in call.inputs if isinstance(a, Argument)]
            return [tuple(t.shape.as_list()) for t in _eager(call, arguments)()]

    def _check(self, program: Program, outputs: Sequence[Any]) -> None:
        if program.chain is not None:
            return
        for (call, index), found in zip(program.results, outputs, strict=True):
            expected = program.calls[call].outputs[index][1]
            if expected is None or static_shape(found) == expected:
                continue
            # Placeholders for what a device does not need are [] in one place and [0] in another.
            if max(math.prod(expected), math.prod(found.shape.as_list())) > 1:
                raise UnmeasurableError(
                    f"alone it gives the shape {found.shape}, in the graph {expected}"
                )

    def _time(self, run: Callable[[], Any]) -> tuple[float, int]:
        best = second = math.inf
        workspace: int | None = None
        spent, count = 0.0, 0
        while (
            count < self.repeats
            or spent < (_SMALL_ALLOWANCE if best < _SMALL else _ALLOWANCE)
            # On a busy machine the fastest of a few is chance until another comes near it.
            or (best > _SMALL and second > _NEAR * best and spent < _BUSY_ALLOWANCE)
        ):
            self._reset_memory()
            start = time.perf_counter()
            outputs = run()
            if self._synchronise:
                tf.test.experimental.sync_devices()
            elapsed = time.perf_counter() - start
            extra = self._extra_memory()
            del outputs
            workspace = extra if workspace is None else min(workspace, extra)
            best, second = sorted((best, second, elapsed))[:2]
            spent += elapsed
            count += 1
        return best, workspace or 0

    def _reset_memory(self) -> None:
        with contextlib.suppress(ValueError, tf.errors.OpError):
            tf.config.experimental.reset_memory_stats(self._memory)

    def _extra_memory(self) -> int:
        """Peak bytes since the reset beyond what is in memory now (inputs and outputs)."""
        try:
            info = tf.config.experimental.get_memory_info(self._memory)
        except (ValueError, tf.errors.OpError):
            return 0
        return max(0, int(info["peak"]) - int(info["current"]))

    def _overhead(self, function: bool) -> float:
        """What Python and the dispatcher take for an operation that does nothing."""
        if function not in self._overheads:
            identity = tf.compat.v1.NodeDef()
            identity.attr["T"].type = tf.float32.as_datatype_enum
            call = Call(
                "Identity",
                dict(identity.attr.items()),
                (Argument("float32", (), "normal"),),
                (("float32", ()),),
            )
            with tf.device(self.device):
                arguments = [tf.constant(1.0)]
                if function:
                    run = _function(Program((call,), ((0, 0),)), arguments)
                else:
                    run = _eager(call, arguments)
                run()
                self._overheads[function] = self._time(run)[0]
        return self._overheads[function]


def _check_memory(program: Program, device: str) -> None:
    """Raise MemoryError rather than let the system or TensorFlow's allocator end the process."""
    inputs = sum(a.size for c in program.calls for a in c.inputs if isinstance(a, Argument))
    outputs = sum(tensor_size(*output) for call in program.calls for output in call.outputs)
    # An input is made in the host's memory and then handed to TensorFlow.
    need = 2 * inputs + outputs
    if need > _UNCHECKED_BYTES and need > available_memory():
        raise MemoryError(f"{format_bytes(need)} are needed to run it alone")
    if inputs > _UNCHECKED_INPUTS and _is_limited(device):
        room = memory_limit(device) - bytes_in_use(device)
        if inputs + outputs > room:
            raise MemoryError(
                f"{format_bytes(inputs + outputs)} on the device are needed to run it alone, and "
                f"{format_bytes(room)} are left"
            )
        # Asked for more than the device has in one piece, this raises an error; putting a value
        # there would end the process.
        pieces = [
            tf.raw_ops.Empty(shape=[-(-a.size // _PIECE), _PIECE], dtype=tf.uint8)
            for c in program.calls
            for a in c.inputs
            if isinstance(a, Argument)
        ]
        del pieces


def _is_limited(device: str) -> bool:
    """Whether TensorFlow takes values from an allocator that ends the process when it is full."""
    return "CPU" in device.upper() and bool(os.environ.get("TF_MKL_ALLOC_MAX_BYTES"))


def available_memory() -> float:
    """Bytes that the host can still give, as far as it tells; else infinity."""
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for limit, used in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(found)


def _tensor(arg: Argument) -> Any:
    value = synthesise(arg)
    if arg.kind == "value" and value.nbytes <= _SMALL_BYTES:
        # Axes and shapes are read by the host.
        with tf.device("/device:CPU:0"):
            return tf.constant(value, arg.dtype)
    return tf.constant(value, arg.dtype)


def _eager(call: Call, inputs: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    name, attrs, count = call.type.encode(), eager_attributes(call.attrs), len(call.outputs)
    ctx = context.context()
    return lambda: execute.execute(name, count, inputs, attrs, ctx)


def _function(program: Program, arguments: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """The program as a function, so that passes over graphs and in-place reuse do their work."""

    def body(*given: Any) -> list[Any]:
        graph = ops.get_default_graph()
        supply = iter(given)
        made: list[Any] = []
        for call in program.calls:
            inputs = [
                made[a.call].outputs[a.output] if isinstance(a, Link) else next(supply)
                for a in call.inputs
            ]
            rounds = CHAIN if program.chain is not None else 1
            for _ in range(rounds):
                op = graph._create_op_internal(
                    call.type,
                    inputs,
                    [tf.as_dtype(dtype) for dtype, _ in call.outputs],
                    attrs=dict(call.attrs),
                )
                if program.chain is not None:
                    inputs = list(inputs)
                    inputs[program.chain] = op.outputs[0]
            made.append(op)
        return [made[call].outputs[output] for call, output in program.results]

    concrete = tf.function(body, autograph=False).get_concrete_function(
        *(tf.TensorSpec(t.shape, t.dtype) for t in arguments)
    )
    options = _call_options(program)

    def run() -> Sequence[Any]:
        ctx = context.context()
        before = ctx.function_call_options
        ctx.function_call_options = options
        try:
            outputs: Sequence[Any] = concrete(*arguments)
            return outputs
        finally:
            ctx.function_call_options = before

    return run


def _call_options(program: Program) -> Any:
    """Options of a call without graph optimiser, which would merge or drop what is measured.

    But a batch normalisation with its Relu is measured as the one kernel that the optimiser makes
    of the two in the user's graph, and it alone does so: the pass that merges is left on.
    """
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.min_graph_nodes = -1
    if [call.type for call in program.calls] == ["FusedBatchNormV3", "Relu"]:
        for name in _OTHER_PASSES:
            setattr(rewrites, name, rewriter_config_pb2.RewriterConfig.OFF)
        rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        rewrites.remapping = rewriter_config_pb2.RewriterConfig.ON
    else:
        rewrites.disable_meta_optimizer = True
    return context.FunctionCallOptions(config_proto=config)


_OTHER_PASSES = (
    "arithmetic_optimization",
    "common_subgraph_elimination",
    "constant_folding",
    "debug_stripper",
    "dependency_optimization",
    "function_optimization",
    "implementation_selector",
    "layout_optimizer",
    "loop_optimization",
    "pin_to_host_optimization",
    "scoped_allocator_optimization",
    "shape_optimization",
)
