"""Programs: one operation, or a few that belong together, apart from their graph.

Two programs with the same signature cost the same on the same device. A 100-layer network has
a few dozen signatures.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import tensor_util

from optckpt.costs.constants import Folder, static_shape, variable_shape
from optckpt.costs.inputs import Argument, UnmeasurableError, argument

SIGNATURE_VERSION = 1

# Values of a large attribute would make a signature unreadable, and a `Const` is not measured.
_MAX_ATTR_TENSOR = 1 << 12


@dataclass(frozen=True)
class Link:
    """An input that is output number `output` of call number `call` of the same program."""

    call: int
    output: int


@dataclass(frozen=True)
class Call:
    """One operation with all it needs to run outside its graph."""

    type: str
    attrs: Mapping[str, Any]
    """`AttrValue` protocol buffers by name."""
    inputs: tuple[Argument | Link, ...]
    outputs: tuple[tuple[str, tuple[int, ...] | None], ...]
    """dtype and shape of each output (None: not known before it runs)."""


@dataclass(frozen=True)
class Program:
    """Calls in order, and which of their outputs leave the program."""

    calls: tuple[Call, ...]
    results: tuple[tuple[int, int], ...]
    chain: int | None = None
    """If set: the one call takes over the memory of this input for its first output."""

    @cached_property
    def name(self) -> str:
        """Operation types joined by `+`."""
        return "+".join(c.type for c in self.calls)

    def signature(self, environment: Mapping[str, Any]) -> str:
        """JSON text that identifies the cost of this program in an `environment`."""
        calls = [
            {
                "op": c.type,
                "attrs": {k: plain(v) for k, v in sorted(c.attrs.items())},
                "inputs": [
                    ["link", a.call, a.output] if isinstance(a, Link) else a.signature()
                    for a in c.inputs
                ],
            }
            for c in self.calls
        ]
        data: dict[str, Any] = {"version": SIGNATURE_VERSION, "calls": calls}
        if len(self.calls) > 1:
            data["results"] = [list(r) for r in self.results]
        if self.chain is not None:
            data["in_place"] = self.chain
        data["environment"] = dict(environment)
        return json.dumps(data, sort_keys=True, separators=(",", ":"))


def make_program(ops: Sequence[Any], folder: Folder) -> Program:
    """The program of one or more `tf.Operation`s, in the order given.

    Raises:
        UnmeasurableError: if one of them is stateful, calls a function, or has an input that
            cannot be made up.
    """
    position = {op: i for i, op in enumerate(ops)}
    calls = []
    for op in ops:
        if op.type == "ResourceGather":
            calls.append(_gather(op, folder))
            continue
        attrs = _attributes(op)
        if op.op_def.is_stateful:
            raise UnmeasurableError("it is stateful")
        for t in op.outputs:
            if t.dtype.base_dtype.name in ("resource", "variant"):
                raise UnmeasurableError(f"it makes a {t.dtype.base_dtype.name}")
            if t.dtype._is_ref_dtype:
                raise UnmeasurableError("it works on a reference variable")
        inputs: list[Argument | Link] = []
        for i, t in enumerate(op.inputs):
            inner = position.get(t.op)
            if inner is not None and inner < position[op]:
                inputs.append(Link(inner, t.value_index))
            else:
                inputs.append(argument(op, i, folder))
        outputs = tuple((t.dtype.base_dtype.name, static_shape(t)) for t in op.outputs)
        calls.append(Call(op.type, attrs, tuple(inputs), outputs))
    results = [(position[t.op], t.value_index) for t in leaving(ops)]
    return Program(tuple(calls), tuple(results))


def leaving(ops: Sequence[Any]) -> list[Any]:
    """Outputs of `ops` that somebody else reads, or nobody."""
    members = set(ops)
    found = []
    for op in ops:
        for t in op.outputs:
            readers = t.consumers()
            if not readers or any(r not in members for r in readers):
                found.append(t)
    return found


def _attributes(op: Any) -> dict[str, Any]:
    attrs = {}
    for name, value in op.node_def.attr.items():
        # Names with an underscore are hints to passes over whole graphs.
        if name.startswith("_"):
            continue
        if value.HasField("func") or value.list.func:
            raise UnmeasurableError("it calls a function")
        attrs[name] = value
    return attrs


def _gather(op: Any, folder: Folder) -> Call:
    """A gather from a variable costs what a gather from a tensor of its shape costs."""
    table = variable_shape(op.inputs[0])
    if table is None:
        raise UnmeasurableError("the shape of the variable is not known")
    indices = op.inputs[1]
    shape = folder.shape(indices)
    if shape is None:
        raise UnmeasurableError("the shape of input 1 is not known")
    dtype = op.get_attr("dtype")
    index_dtype = indices.dtype.base_dtype
    batch_dims = op.get_attr("batch_dims")
    node = tf.compat.v1.NodeDef()
    node.attr["Tparams"].type = dtype.as_datatype_enum
    node.attr["Tindices"].type = index_dtype.as_datatype_enum
    node.attr["Taxis"].type = tf.int32.as_datatype_enum
    node.attr["batch_dims"].i = batch_dims
    axis = tf.make_ndarray(tensor_util.make_tensor_proto(batch_dims, tf.int32))
    return Call(
        "GatherV2",
        dict(node.attr.items()),
        (
            Argument(dtype.name, table, "normal"),
            Argument(index_dtype.name, shape, "index", max(1, table[batch_dims])),
            Argument("int32", (), "value", 0, axis, str(batch_dims)),
        ),
        ((dtype.name, static_shape(op.outputs[0])),),
    )


def plain(attr: Any) -> Any:
    """An `AttrValue` as JSON-able data."""
    field = attr.WhichOneof("value")
    if field == "list":
        lists = attr.list
        for part in ("s", "i", "f", "b", "type", "shape"):
            values = getattr(lists, part)
            if values:
                return [_plain_value(part, v) for v in values]
        return []
    if field is None:
        return None
    return _plain_value(field, getattr(attr, field))


def _plain_value(field: str, value: Any) -> Any:
    if field == "s":
        return value.decode("utf-8", "replace")
    if field == "type":
        return tf.as_dtype(value).name
    if field == "shape":
        return str(tf.TensorShape(value))
    if field == "tensor":
        if value.ByteSize() > _MAX_ATTR_TENSOR:
            raise UnmeasurableError("it has a large tensor as an attribute")
        return tf.make_ndarray(value).tolist()
    return value


def eager_attributes(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """`AttrValue`s as the flat (name, value, ...) tuple that eager execution takes."""
    flat: list[Any] = []
    for name, attr in attrs.items():
        field = attr.WhichOneof("value")
        if field is None:
            continue
        if field == "list":
            values: Any = []
            for part in ("s", "i", "f", "b", "type", "shape", "tensor"):
                found: Iterable[Any] = getattr(attr.list, part)
                values = [_eager_value(part, v) for v in found]
                if values:
                    break
        else:
            values = _eager_value(field, getattr(attr, field))
        flat += [name, values]
    return tuple(flat)


def _eager_value(field: str, value: Any) -> Any:
    return tf.TensorShape(value) if field == "shape" else value


def short_device(device: str) -> str:
    """`/device:TYPE:INDEX` of a device string; job, replica and task are dropped."""
    spec = tf.DeviceSpec.from_string(device)
    return f"/device:{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def environment(device: str) -> dict[str, Any]:
    """What beside the program decides its cost: hardware, TensorFlow, threads."""
    spec = tf.DeviceSpec.from_string(device)
    kind = spec.device_type or "CPU"
    return {
        "device": kind,
        "hardware": _hardware(kind, spec.device_index or 0),
        "tensorflow": tf.__version__,
        "threads": tf.config.threading.get_intra_op_parallelism_threads() or _cores(),
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache
def _hardware(kind: str, index: int) -> str:
    if kind == "CPU":
        return _processor()
    for found in tf.config.list_physical_devices(kind)[index : index + 1]:
        details = tf.config.experimental.get_device_details(found)
        return " ".join(str(v) for _, v in sorted(details.items())) or kind
    return kind


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
