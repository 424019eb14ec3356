"""A graph traced with unknown sizes, copied with sizes filled in.

A graph that was traced for any batch size says of hardly any tensor how large it is. Its copy is
given the shapes of its inputs and TensorFlow's own shape inference does the rest; what is captured
and measured on the copy is then carried over to the graph itself (`Shadow.on_live`), operation by
operation. The graph is not changed, and what it computes does not depend on the sizes filled in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util, cpp_shape_inference_pb2, ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import handle_data_util

from optckpt.errors import CaptureError
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_capture import Capture
from optckpt.frontends.tf_chance import is_view_by_chance
from optckpt.frontends.tf_functions import BRANCHES, LOOPS, function_graph, function_names
from optckpt.frontends.tf_traced import Changes, changes

log = logging.getLogger("optckpt.frontends.tensorflow")

Shapes = Mapping[int, tf.TensorShape]
"""id(tensor) -> its shape."""

_SHAPES = "_output_shapes"
"""Attribute whose shapes are merged with what TensorFlow infers, when a graph is imported."""
_ROUNDS = 4
_PUTS = {"TensorListSetItem": 2, "TensorListPushBack": 1, "TensorListFromTensor": 0}
"""Operations that make lists -> which of their inputs becomes an element, or several."""
_HANDLES = (tf.resource, tf.variant)


@dataclass(frozen=True, eq=False)
class Shadow:
    """A copy of a graph in which sizes are known."""

    graph: tf.Graph
    copies: Mapping[tf.Operation, tf.Operation]
    """Operation of the graph -> its copy."""

    def carried(self, value: Any) -> Any:
        """The copies of an operation or tensor, or of all those in a list, tuple, dict, dataclass.

        Operations that were not copied are left out.
        """
        return _Carrier(self.copies)(value)

    def on_live(self, found: Capture, live: tf.Graph) -> Capture:
        """What was captured of the copy, as a capture of the graph itself.

        Its `sized` is `found`: sizes and costs are to be taken from there.
        """
        back = _Carrier({copy: op for op, copy in self.copies.items()})
        same = ("graph", "tf_graph", "inside", "views", "sized")
        changed = {
            f.name: back(getattr(found, f.name)) for f in fields(found) if f.name not in same
        }
        views = {}
        for op, copy in self.copies.items():
            for t, mine in zip(copy.outputs, op.outputs, strict=True):
                if id(t) in found.views:
                    b, chain = found.views[id(t)]
                    views[id(mine)] = (b, back(chain))
        return replace(found, **changed, tf_graph=live, views=views, sized=found)


class _Carrier:
    """Puts other operations in the place of operations, and their tensors in that of tensors."""

    def __init__(self, other: Mapping[tf.Operation, tf.Operation]) -> None:
        self._other = other

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tf.Operation):
            return self._other[value]
        if isinstance(value, tf.Tensor):
            return self._other[value.op].outputs[value.value_index]
        if isinstance(value, list | tuple):
            kept = [v for v in value if not isinstance(v, tf.Operation) or v in self._other]
            return type(value)(map(self, kept))
        if isinstance(value, dict):
            return {self(k): self(v) for k, v in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self(getattr(value, f.name)) for f in fields(value)})
        return value


def shadow(live: tf.Graph, shapes: Shapes, among: Collection[tf.Operation] | None = None) -> Shadow:
    """A copy of `live` in which inputs have `shapes`; its other shapes follow.

    Costs about one `tf.graph_util.import_graph_def`.

    Args:
        shapes: of placeholders and of what iterators return; unknown dimensions stay so.
        among: the operations to copy, with all that they depend on; by default all.

    Raises:
        CaptureError: if these shapes do not go together (names the operation), or the graph has
            operations that cannot be copied.
    """
    name = getattr(live, "name", "")
    copy = _Copy(live, shapes, {}, among)
    try:
        copy.run()
        hints = copy.hints()
        if hints:
            # Shapes that were set by hand; what follows from them is to be inferred, too.
            copy = _Copy(live, {**hints, **shapes}, {}, among)
            copy.run()
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(
            f"function {name!r} was traced with unknown sizes, and it cannot be planned at the "
            f"sizes {_listed(live, shapes)}, because they do not go together: {reason}; declare "
            "sizes that do (section sizes of the configuration, or optckpt.sizes.at)"
        ) from error
    copy.finish()
    return Shadow(copy.graph, copy.copies)


def _listed(live: tf.Graph, shapes: Shapes) -> str:
    named = [
        f"{t.op.name} {shapes[id(t)]}"
        for op in live.get_operations()
        for t in op.outputs
        if id(t) in shapes
    ]
    return ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")


@dataclass(frozen=True, eq=False)
class _Function:
    """A function of the copied graph, as `tf.Graph._get_function` returns them."""

    name: str
    graph: Any
    live: tf.Graph

    @property
    def cached_definition(self) -> Any:
        """The definition; it does not depend on sizes."""
        return tf_ops.function_def(self.live, self.name)


class _Lookup:
    """Finds the functions of a copied graph: copied, or else those of the graph itself."""

    live: tf.Graph
    sized: dict[str, _Function]

    def _get_function(self, name: str | bytes) -> Any:
        text = name.decode() if isinstance(name, bytes) else name
        level = self.live
        found = self.sized.get(text)
        while found is None and level is not None:
            found = level._get_function(text)
            level = getattr(level, "outer_graph", None)
        return found


class _SizedFuncGraph(_Lookup, FuncGraph):  # type: ignore[misc]
    pass


class _SizedGraph(_Lookup, tf.Graph):  # type: ignore[misc]
    pass


class _Copy:
    """Copies a graph, between operations that call functions piece by piece."""

    def __init__(
        self,
        live: tf.Graph,
        shapes: Shapes,
        handles: Mapping[int, Any],
        among: Collection[tf.Operation] | None = None,
    ) -> None:
        """`handles`: what is known of what handles and lists refer to, by id(tensor)."""
        self._live = live
        self._shapes = shapes
        self._handles = handles
        self._traced = changes(live)
        self._only = None if among is None else self._ancestors(among)
        self.graph: Any
        if isinstance(live, FuncGraph):
            self.graph = _SizedFuncGraph(live.name)
        else:
            self.graph = _SizedGraph()
        self.graph.live = live
        self.graph.sized = {}
        self._by_name: dict[str, tf.Operation] = {}
        self._scopes: set[str] = set()
        self._functions: dict[str, list[tuple[Any, _Function]]] = {}
        self.copies: dict[tf.Operation, tf.Operation] = {}

    def _ancestors(self, among: Iterable[tf.Operation]) -> set[tf.Operation]:
        found = set(among)
        stack = list(found)
        while stack:
            op = stack.pop()
            for p in (*(t.op for t in op.inputs), *op.control_inputs):
                if p not in found:
                    found.add(p)
                    stack.append(p)
        return found

    def run(self) -> None:
        """Make the copies. Raises ValueError or tf.errors.OpError if shapes do not fit."""
        operations = self._live.get_operations()
        piece: list[node_def_pb2.NodeDef] = []
        loops = any(op.type in ("NextIteration", "RefNextIteration") for op in operations)
        nodes = dict(zip(operations, self._live.as_graph_def().node, strict=True))
        for op in _makers_first(operations):
            if self._only is not None and op not in self._only:
                continue
            node = nodes[op]
            self._as_traced(op, node)
            if node.op == "Placeholder" and op.outputs[0].dtype in _HANDLES:
                self._placeholder(op, node)
            elif tf_ops.is_call(op) and not loops and self._has_unknown(op):
                self._import(piece)
                piece = []
                self._call(op, node)
            elif node.name in self._scopes or node.op in _PUTS:
                # An import refuses names that are scopes already.
                self._import(piece)
                piece = []
                self._give_shapes(op, node)
                made = self._make(node)
                if node.op in _PUTS:
                    _note_element(made)
            else:
                self._give_shapes(op, node)
                piece.append(node)
        self._import(piece)
        made = self._by_name
        self.copies = {op: made[op.name] for op in operations if op.name in made}

    def _as_traced(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        """Undo rewrites, after which operations may read what was made after them."""
        known = self._traced
        if not (known.inputs or known.controls):
            return
        for i in range(len(op.inputs)):
            t = known.inputs.get((op, i))
            if t is not None:
                node.input[i] = t.name
        later = {f"^{p.name}" for p in op.control_inputs if (p, op) in known.controls}
        if later:
            rest = [name for name in node.input if name not in later]
            node.ClearField("input")
            node.input.extend(rest)

    def _give_shapes(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        if any(id(t) in self._shapes for t in op.outputs):
            given = [self._shapes.get(id(t), tf.TensorShape(None)) for t in op.outputs]
            _write(node, _SHAPES, given)
            if node.op == "Placeholder":
                node.attr["shape"].shape.CopyFrom(given[0].as_proto())
            elif "output_shapes" in node.attr and op.type.startswith("Iterator"):
                _write(node, "output_shapes", given)

    def _placeholder(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        name = node.name
        node.name = f"optckpt_handle_{len(self._by_name)}"
        made = self._by_name[name] = self._make(node)
        (t,) = op.outputs
        data = self._handles.get(id(t))
        if data is None:
            data = handle_data_util.get_handle_data(t)
        handle_data_util.set_handle_data(made.outputs[0], data)

    def _make(self, node: node_def_pb2.NodeDef) -> tf.Operation:
        """Make one operation, whose inputs are there already."""
        inputs = []
        before = []
        for text in node.input:
            if text.startswith("^"):
                before.append(self._by_name[text[1:]])
            else:
                name, _, index = text.partition(":")
                inputs.append(self._by_name[name].outputs[int(index or 0)])
        made = ops.Operation.from_node_def(node, self.graph, inputs, control_inputs=before)
        self._add(made)
        return made

    def _add(self, made: tf.Operation) -> None:
        name = made.name
        self._by_name[name] = made
        end = name.rfind("/")
        while end > 0 and name[:end] not in self._scopes:
            self._scopes.add(name[:end])
            end = name.rfind("/", 0, end)

    def _import(self, nodes: Sequence[node_def_pb2.NodeDef]) -> None:
        """Copy operations whose other inputs are there already.

        As `tf.graph_util.import_graph_def`, which would look up the device of each operation anew.
        """
        if not nodes:
            return
        definition = graph_pb2.GraphDef(node=nodes)
        definition.versions.CopyFrom(self._live.graph_def_versions)
        scoped = c_api_util.ScopedTFImportGraphDefOptions()
        options = scoped.options
        pywrap_tf_session.TF_ImportGraphDefOptionsSetPrefix(options, "")
        pywrap_tf_session.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
        if self._by_name:
            self._map_inputs(nodes, options)
        serialized = pywrap_tf_session.TF_NewBufferFromString(definition.SerializeToString())
        try:
            with self.graph._c_graph.get() as c_graph:
                results = pywrap_tf_session.TF_GraphImportGraphDefWithResults(
                    c_graph, serialized, options
                )
            c_api_util.ScopedTFImportGraphDefResults(results)
        finally:
            pywrap_tf_session.TF_DeleteBuffer(serialized)
        for op in self.graph._add_new_tf_operations(compute_devices=False):
            self._add(op)

    def _map_inputs(self, nodes: Sequence[node_def_pb2.NodeDef], options: Any) -> None:
        known = self._by_name
        mapped = set()
        for node in nodes:
            for text in node.input:
                name, _, index = text.removeprefix("^").partition(":")
                maker = known.get(name)
                if maker is None or text in mapped:
                    continue
                mapped.add(text)
                if text.startswith("^"):
                    pywrap_tf_session.TF_ImportGraphDefOptionsRemapControlDependency(
                        options, name, maker._c_op
                    )
                else:
                    pywrap_tf_session.TF_ImportGraphDefOptionsAddInputMapping(
                        options,
                        name,
                        int(index or 0),
                        maker.outputs[int(index or 0)]._as_tf_output(),
                    )

    # --- Operations that call functions ---------------------------------------------------------

    def _has_unknown(self, op: tf.Operation) -> bool:
        return any(
            t.dtype == tf.variant or tf_ops.element_count(t) is None
            for t in (*op.inputs, *op.outputs)
        )

    def _call(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        """Copy a call, branch or loop, with its functions at the sizes of its inputs."""
        texts = [text for text in node.input if not text.startswith("^")]
        inputs = []
        for text in texts:
            name, _, index = text.partition(":")
            inputs.append(self._by_name[name].outputs[int(index or 0)])
        names = function_names(op)
        graphs = [function_graph(op, name) for name in names]
        results: list[Sequence[tf.Tensor]] | None = None
        if all(g is not None and hasattr(g, "inputs") for g in graphs):
            skipped = int(op.type in BRANCHES)
            if all(len(g.inputs) == len(inputs) - skipped for g in graphs):
                if op.type in LOOPS:
                    results = self._loop(names, graphs, inputs, node)
                else:
                    arguments = [(t.shape, _handle(t)) for t in inputs[skipped:]]
                    results = [
                        self._body(name, graph, arguments, node).outputs
                        for name, graph in zip(names, graphs, strict=True)
                    ]
        shapes = [self._shapes.get(id(t), t.shape) for t in op.outputs]
        each: list[list[tf.Tensor]] = [[] for _ in shapes]
        if results is not None and all(len(outs) == len(shapes) for outs in results):
            each = [list(outs) for outs in zip(*results, strict=True)]
            shapes = [
                _merged(shape, _common([t.shape for t in outs]))
                for shape, outs in zip(shapes, each, strict=True)
            ]
        if "output_shapes" in node.attr:
            _write(node, "output_shapes", shapes)
        made = self._make(node)
        for t, shape, outs in zip(made.outputs, shapes, each, strict=True):
            if t.dtype in _HANDLES:
                handle_data_util.set_handle_data(t, next(filter(None, map(_handle, outs)), None))
            else:
                t.set_shape(shape)

    def _loop(
        self,
        names: Sequence[str],
        graphs: Sequence[Any],
        inputs: Sequence[tf.Tensor],
        node: node_def_pb2.NodeDef,
    ) -> list[Sequence[tf.Tensor]]:
        """The variables of a loop, at sizes that are the same in all iterations."""
        arguments = [(t.shape, _handle(t)) for t in inputs]
        for _ in range(_ROUNDS):
            body = self._copied(graphs[1], arguments)
            after = [
                (_invariant(shape, t.shape), _handle(t) if _says_more(t, data) else data)
                for (shape, data), t in zip(arguments, body.outputs, strict=True)
            ]
            if [(s.as_list() if s.rank is not None else None, d) for s, d in after] == [
                (s.as_list() if s.rank is not None else None, d) for s, d in arguments
            ]:
                break
            arguments = after
        self._body(names[0], graphs[0], arguments, node)
        return [self._body(names[1], graphs[1], arguments, node).inputs]

    def _body(
        self,
        name: str,
        graph: Any,
        arguments: Sequence[tuple[tf.TensorShape, Any]],
        node: node_def_pb2.NodeDef,
    ) -> Any:
        """The copy of a function at the sizes of its arguments, which `node` then calls."""
        key = [(str(shape), data) for shape, data in arguments]
        known = self._functions.setdefault(name, [])
        found = next((f for k, f in known if k == key), None)
        if found is None:
            mine = f"{name}_sized_{len(known)}" if known else name
            found = _Function(name, self._copied(graph, arguments), self._live)
            self.graph.sized[mine] = found
            known.append((key, found))
        mine = next(n for n, f in self.graph.sized.items() if f is found)
        if mine != name:
            for attr in node.attr.values():
                for function in (attr.func, *attr.list.func):
                    if function.name == name:
                        function.name = mine
        return found.graph

    def _copied(self, graph: Any, arguments: Sequence[tuple[tf.TensorShape, Any]]) -> Any:
        shapes, handles = {}, {}
        for t, (shape, data) in zip(graph.inputs, arguments, strict=True):
            if t.dtype in _HANDLES:
                handles[id(t)] = data
            else:
                shapes[id(t)] = _merged(t.shape, shape)
        copy = _Copy(graph, shapes, handles)
        copy.run()
        copy.finish()
        made = copy.graph
        made.inputs = [copy.copies[t.op].outputs[t.value_index] for t in graph.inputs]
        made.outputs = [copy.copies[t.op].outputs[t.value_index] for t in graph.outputs]
        made.control_outputs = [
            copy.copies[op] for op in getattr(graph, "control_outputs", ()) if op in copy.copies
        ]
        return made

    # --- What inference does not know -----------------------------------------------------------

    def hints(self) -> dict[int, tf.TensorShape]:
        """Shapes of which the graph knows more than its copy."""
        found = {}
        for op, copy in self.copies.items():
            for t, mine in zip(op.outputs, copy.outputs, strict=True):
                if tf_ops.element_count(mine) is not None:
                    continue
                merged = _merged(mine.shape, t.shape)
                if merged.rank != mine.shape.rank or (
                    merged.rank and merged.as_list() != mine.shape.as_list()
                ):
                    found[id(t)] = merged
        return found

    def finish(self) -> None:
        """Carry over what is not in a graph's definition."""
        copies = self.copies
        for op, copy in copies.items():
            context = op._get_control_flow_context()
            if context is not None:
                copy._set_control_flow_context(context)
        self._carry_changes()
        by_chance = [copy for op, copy in copies.items() if is_view_by_chance(op, copy)]
        setattr(self.graph, tf_ops.NO_VIEWS, frozenset(by_chance))

    def _carry_changes(self) -> None:
        known = self._traced
        copies = self.copies
        if not (known.inputs or known.controls or known.added):
            return

        def there(*found: tf.Operation | None) -> bool:
            return all(op is None or op in copies for op in found)

        for op, i in known.inputs:
            if op in copies:
                now = op.inputs[i]
                copies[op]._update_input(i, copies[now.op].outputs[now.value_index])
        for before, op in known.controls:
            if op in copies and before in op.control_inputs:
                copies[op]._add_control_input(copies[before])
        mine: Changes = changes(self.graph)
        for (op, i), t in known.inputs.items():
            if there(op, t.op):
                mine.inputs[copies[op], i] = copies[t.op].outputs[t.value_index]
        for op, origin in known.added.items():
            if there(op, origin):
                mine.added[copies[op]] = None if origin is None else copies[origin]
        mine.controls.update((copies[a], copies[b]) for a, b in known.controls if there(a, b))
        mine.orders.update((copies[op], order) for op, order in known.orders.items() if there(op))
        mine.copies.update((copies[a], copies[b]) for a, b in known.copies.items() if there(a, b))


def _makers_first(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Operations as they were made, but lists before the loops that were given them later."""
    done: set[tf.Operation] = set()
    for op in operations:
        stack = [op]
        while stack:
            last = stack[-1]
            missing = []
            if last not in done and (last is not op or tf_ops.is_call(op)):
                missing = [t.op for t in last.inputs if t.op not in done]
            if missing:
                stack += missing
                continue
            stack.pop()
            if last not in done:
                done.add(last)
                yield last


def _write(node: node_def_pb2.NodeDef, name: str, shapes: Iterable[tf.TensorShape]) -> None:
    node.attr[name].Clear()
    node.attr[name].list.shape.extend([shape.as_proto() for shape in shapes])


def _handle(tensor: tf.Tensor) -> Any:
    """What a handle or a list refers to (a protocol buffer), or None."""
    if tensor.dtype not in _HANDLES:
        return None
    data = handle_data_util.get_handle_data(tensor)
    return data if data is not None and data.is_set else None


def _says_more(tensor: tf.Tensor, data: Any) -> bool:
    """Whether it is known better what `tensor` refers to than by `data`."""
    new = _handle(tensor)
    return new is not None and (data is None or _unknowns(new) < _unknowns(data))


def _note_element(op: tf.Operation) -> None:
    """Let a list that was given an element know its shape, which TensorFlow does not infer."""
    item = op.inputs[_PUTS[op.type]]
    shape = item.shape[1:] if op.type == "TensorListFromTensor" else item.shape
    (made,) = op.outputs
    data = _handle(made)
    if shape.rank is None or (data is not None and not _unknowns(data)):
        return
    new = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData()
    if data is not None and len(data.shape_and_type) == 1:
        new.CopyFrom(data)
    else:
        new.is_set = True
        new.shape_and_type.add(dtype=item.dtype.as_datatype_enum)
    before = tf.TensorShape(new.shape_and_type[0].shape) if data is not None else shape
    new.shape_and_type[0].shape.CopyFrom(_merged(before, shape).as_proto())
    handle_data_util.set_handle_data(made, new)


def _unknowns(data: Any) -> int:
    """Number of unknown dimensions of what a handle refers to."""
    return sum(
        1000 if s.shape.unknown_rank else sum(d.size < 0 for d in s.shape.dim)
        for s in data.shape_and_type
    )


def _merged(a: tf.TensorShape, b: tf.TensorShape) -> tf.TensorShape:
    """What two shapes of one tensor say together; where they contradict each other, `b`."""
    return a.merge_with(b) if a.is_compatible_with(b) else b


def _common(shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """The dimensions that all shapes have in common."""
    first, *rest = shapes
    for shape in rest:
        if first.rank is None or shape.rank != first.rank:
            return tf.TensorShape(None)
        pairs = zip(first.as_list(), shape.as_list(), strict=True)
        first = tf.TensorShape([x if x == y else None for x, y in pairs])
    return first


def _invariant(before: tf.TensorShape, after: tf.TensorShape) -> tf.TensorShape:
    """The shape of a loop's variable that is `before` before an iteration and `after` after it.

    What cannot be inferred of the shape after it is taken to stay as it is.
    """
    return before if before.is_compatible_with(after) else _common((before, after))
