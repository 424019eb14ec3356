"""Copies of graphs in which sizes are filled in, with the functions that they call.

Operations are imported in pieces. Between the pieces come those of which TensorFlow does not infer
the shapes: calls, branches and loops, whose functions are copied at the sizes of their arguments,
and what puts something into lists and optionals (`optckpt.frontends.tf_elements`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util, ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import handle_data_util

from optckpt.frontends import tf_ops
from optckpt.frontends.tf_chance import is_view_by_chance
from optckpt.frontends.tf_data_sizes import BOUNDED, Values, bounds, of, seen
from optckpt.frontends.tf_devices import Devices
from optckpt.frontends.tf_elements import (
    HANDLES,
    SPECIAL,
    Argument,
    Elements,
    common,
    merged,
    says_more,
    write_shapes,
)
from optckpt.frontends.tf_functions import BRANCHES, LOOPS, function_graph, function_names
from optckpt.frontends.tf_sized import SizedFuncGraph, SizedFunction, SizedGraph
from optckpt.frontends.tf_traced import carry_changes, changes

Shapes = Mapping[int, tf.TensorShape]
"""id(tensor) -> its shape."""

_SHAPES = "_output_shapes"
"""Attribute whose shapes are merged with what TensorFlow infers, when a graph is imported."""
_ROUNDS = 4
_MORE_ROUNDS = 16


def copied(
    live: tf.Graph,
    shapes: Shapes,
    among: Collection[tf.Operation] | None = None,
    arguments: Mapping[int, Argument] | None = None,
    values: Values | None = None,
    bounded: bool = True,
) -> Copy:
    """A copy of `live` in which inputs have `shapes`.

    Args:
        among: the operations to copy, with all that they depend on; by default all.
        arguments: if this is the body of a function: what is known of its arguments, by id(tensor).
        values: of inputs, for sizes that depend on these (see `optckpt.frontends.tf_data_sizes`).
        bounded: whether other sizes that depend on the data are taken to be the largest possible.

    Raises:
        ValueError, tf.errors.OpError: if the shapes do not fit, or an operation cannot be copied.
    """
    known: dict[int, tf.TensorShape] = {}
    for _ in range(_MORE_ROUNDS if values else _ROUNDS):
        copy = Copy(live, {**known, **shapes}, among, arguments, values, bounded)
        copy.run()
        hints = copy.hints() or seen(copy.copies, copy.fed)
        if not hints:
            break
        # What follows from them is to be inferred, too.
        known.update(hints)
    copy.finish()
    return copy


class Copy:
    """A copy in the making; see `copied`."""

    def __init__(
        self,
        live: tf.Graph,
        shapes: Shapes,
        among: Collection[tf.Operation] | None,
        arguments: Mapping[int, Argument] | None,
        values: Values | None,
        bounded: bool,
    ) -> None:
        self._live = live
        self._values = values or {}
        self._bounded = BOUNDED if bounded else frozenset()
        self.fed: dict[tf.Operation, tf.Tensor] = {}
        """Copy of a placeholder -> what is known to be given for it."""
        self._shapes = shapes
        self._arguments = arguments or {}
        self._traced = changes(live)
        self._rewritten = {op for op, _ in self._traced.inputs}
        self._rewritten.update(after for _, after in self._traced.controls)
        self._only = None if among is None else _ancestors(among)
        self.graph: Any
        if isinstance(live, FuncGraph):
            self.graph = SizedFuncGraph(live.name)
        else:
            self.graph = SizedGraph()
        self.graph.live = live
        self.graph.sized = {}
        # In a body, which nobody rewrites, what is known may take the place of what is computed.
        self._elements = Elements(self.graph, replace=arguments is not None)
        self._by_name: dict[str, tf.Operation] = {}
        self._scopes: set[str] = set()
        self._seen: set[str] = set()
        self._late: list[tuple[str, str]] = []
        self._functions: dict[str, list[tuple[Any, SizedFunction]]] = {}
        self.copies: dict[tf.Operation, tf.Operation] = {}
        """Operation -> its copy."""

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
            self._postpone(node)
            if node.op == "Placeholder" and op.outputs[0].dtype in HANDLES:
                self._placeholder(op, node)
                continue
            self._give_shapes(op, node)
            called = tf_ops.is_call(op) and not loops and self._has_unknown(op)
            # An import refuses names that are scopes already.
            bounded = node.op in self._bounded and self._has_unknown(op)
            alone = called or bounded or node.op in SPECIAL or node.name in self._scopes
            if not alone:
                piece.append(node)
                continue
            self._import(piece)
            piece = []
            if called:
                self._call(op, node)
            elif bounded:
                made = self._make(node)
                for t, shape in zip(made.outputs, self._by_data(made), strict=True):
                    t.set_shape(shape)
            else:
                self._elements.prepare(node, self._inputs(node))
                self._elements.note(self._make(node))
        self._import(piece)
        made = self._by_name
        for after, before in self._late:
            made[after]._add_control_input(made[before])
        self.copies = {op: made[op.name] for op in operations if op.name in made}

    def _postpone(self, node: node_def_pb2.NodeDef) -> None:
        """Leave out control edges from operations that come later; they are added at the end."""
        self._seen.add(node.name)
        late = [t for t in node.input if t.startswith("^") and t[1:] not in self._seen]
        for text in late:
            node.input.remove(text)
            self._late.append((node.name, text[1:]))

    def _as_traced(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        """Undo rewrites, after which operations may read what was made after them."""
        if op not in self._rewritten:
            return
        known = self._traced
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
            write_shapes(node, _SHAPES, given)
            if node.op == "Placeholder":
                node.attr["shape"].shape.CopyFrom(given[0].as_proto())
            elif "output_shapes" in node.attr and not tf_ops.is_call(op):
                write_shapes(node, "output_shapes", given)

    def _placeholder(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        """Copy the handle of a variable or a list, with what is known of these."""
        name = node.name
        node.name = f"optckpt_handle_{len(self._by_name)}"
        made = self._by_name[name] = self._make(node)
        (t,) = op.outputs
        argument = self._arguments.get(id(t))
        data = None if argument is None else argument.handle
        if data is None:
            data = handle_data_util.get_handle_data(t)
        handle_data_util.set_handle_data(made.outputs[0], data)
        if argument is not None:
            self._elements.give(made.outputs[0], argument)

    def _source(self, text: str) -> tf.Tensor:
        """The tensor of the copy that is to be read where a definition names an input."""
        name, _, index = text.partition(":")
        return self._elements.instead(self._by_name[name].outputs[int(index or 0)])

    def _inputs(self, node: node_def_pb2.NodeDef) -> list[tf.Tensor]:
        return [self._source(text) for text in node.input if not text.startswith("^")]

    def _make(self, node: node_def_pb2.NodeDef) -> tf.Operation:
        """Make one operation, whose inputs are there already."""
        inputs = self._inputs(node)
        before = [self._by_name[text[1:]] for text in node.input if text.startswith("^")]
        # It only means something where graphs are imported.
        if _SHAPES in node.attr:
            shapes = [tf.TensorShape(s) for s in node.attr[_SHAPES].list.shape]
            del node.attr[_SHAPES]
        else:
            shapes = []
        made = ops.Operation.from_node_def(node, self.graph, inputs, control_inputs=before)
        for t, shape in zip(made.outputs, shapes, strict=False):
            t.set_shape(shape)
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
            if self._values and op.type == "Placeholder":
                value = self._values.get(id(self._live_input(op)))
                if value is not None:
                    self.fed[op] = value
            argument = self._arguments and op.type == "Placeholder" and self._argument(op)
            if argument:
                self._elements.give(op.outputs[0], argument)

    def _argument(self, copy: tf.Operation) -> Argument | None:
        return self._arguments.get(id(self._live_input(copy)))

    def _by_data(self, made: tf.Operation) -> list[tf.TensorShape]:
        exact = of(made, self.fed)
        known = exact and all(shape.is_fully_defined() for shape in exact)
        return exact if known else bounds(made)

    def _live_input(self, copy: tf.Operation) -> tf.Tensor:
        return self._live.get_operation_by_name(copy.name).outputs[0]

    def _map_inputs(self, nodes: Sequence[node_def_pb2.NodeDef], options: Any) -> None:
        mapped = set()
        for node in nodes:
            for text in node.input:
                if text in mapped:
                    continue
                name, _, index = text.removeprefix("^").partition(":")
                maker = self._by_name.get(name)
                if maker is None:
                    continue
                mapped.add(text)
                if text.startswith("^"):
                    pywrap_tf_session.TF_ImportGraphDefOptionsRemapControlDependency(
                        options, name, maker._c_op
                    )
                else:
                    pywrap_tf_session.TF_ImportGraphDefOptionsAddInputMapping(
                        options, name, int(index or 0), self._source(text)._as_tf_output()
                    )

    # --- Operations that call functions ---------------------------------------------------------

    def _has_unknown(self, op: tf.Operation) -> bool:
        return any(
            t.dtype == tf.variant or tf_ops.element_count(t) is None
            for t in (*op.inputs, *op.outputs)
        )

    def _call(self, op: tf.Operation, node: node_def_pb2.NodeDef) -> None:
        """Copy a call, branch or loop, with its functions at the sizes of its inputs."""
        names = function_names(op)
        graphs = [function_graph(op, name) for name in names]
        skipped = int(op.type in BRANCHES)
        results: list[Sequence[tf.Tensor]] = []
        elements: list[Elements] = []
        if all(
            g is not None and len(getattr(g, "inputs", ())) == len(op.inputs) - skipped
            for g in graphs
        ):
            arguments = [self._elements.argument(t) for t in self._inputs(node)[skipped:]]
            if op.type in LOOPS:
                arguments = self._invariant(graphs[1], arguments)
                self._body(names[0], graphs[0], arguments, node)
                made = self._body(names[1], graphs[1], arguments, node)
                results, elements = [made.inputs], [made.elements]
            else:
                for name, graph in zip(names, graphs, strict=True):
                    made = self._body(name, graph, arguments, node)
                    results.append(made.outputs)
                    elements.append(made.elements)
        shapes = [self._shapes.get(id(t), t.shape) for t in op.outputs]
        each: list[tuple[tf.Tensor, ...]] = [() for _ in shapes]
        if results and all(len(outs) == len(shapes) for outs in results):
            each = list(zip(*results, strict=True))
            shapes = [
                merged(shape, common([t.shape for t in outs]))
                for shape, outs in zip(shapes, each, strict=True)
            ]
        if "output_shapes" in node.attr:
            write_shapes(node, "output_shapes", shapes)
        copy = self._make(node)
        for t, shape, outs in zip(copy.outputs, shapes, each, strict=True):
            if t.dtype not in HANDLES:
                t.set_shape(shape)
                continue
            known = [e.argument(o) for e, o in zip(elements, outs, strict=False)]
            # A branch that is not taken leaves nothing.
            best = next((k for k in known if k.handle is not None), None)
            if best is not None:
                handle_data_util.set_handle_data(t, best.handle)
                self._elements.give(t, best)

    def _invariant(self, body: Any, arguments: Sequence[Argument]) -> list[Argument]:
        """What is the same of a loop's variables in all iterations.

        What cannot be inferred of a shape after an iteration is taken to stay as it is.
        """
        found = [
            given if _is_passed_on(body, i) or a.dtype == tf.variant else given.without_value
            for i, (given, a) in enumerate(zip(arguments, body.inputs, strict=True))
        ]
        for _ in range(_ROUNDS):
            made = self._copied(body, found)
            after = []
            for before, t in zip(found, made.outputs, strict=True):
                now = made.elements.argument(t)
                shape = before.shape
                if not shape.is_compatible_with(now.shape):
                    shape = common((shape, now.shape))
                better = now.handle if says_more(now.handle, before.handle) else before.handle
                value = now.value if before.is_empty else before.common_value(now)
                after.append(Argument(shape, better, value, False))
            if [a.key for a in after] == [a.key for a in found]:
                break
            found = after
        return found

    def _body(
        self, name: str, graph: Any, arguments: Sequence[Argument], node: node_def_pb2.NodeDef
    ) -> Any:
        """The copy of a function at the sizes of its arguments, which `node` then calls."""
        key = [a.key for a in arguments]
        known = self._functions.setdefault(name, [])
        found = next((f for k, f in known if k == key), None)
        if found is None:
            mine = f"{name}_sized_{len(known)}" if known else name
            found = SizedFunction(name, self._copied(graph, arguments), self._live)
            self.graph.sized[mine] = found
            known.append((key, found))
        mine = next(n for n, f in self.graph.sized.items() if f is found)
        if mine != name:
            for attr in node.attr.values():
                for function in (attr.func, *attr.list.func):
                    if function.name == name:
                        function.name = mine
        return found.graph

    def _copied(self, graph: Any, arguments: Sequence[Argument]) -> Any:
        known = {id(t): a for t, a in zip(graph.inputs, arguments, strict=True)}
        shapes = {
            id(t): merged(t.shape, known[id(t)].shape)
            for t in graph.inputs
            if t.dtype not in HANDLES
        }
        copy = copied(graph, shapes, arguments=known, bounded=bool(self._bounded))
        made = copy.graph
        made.inputs = [copy.copies[t.op].outputs[t.value_index] for t in graph.inputs]
        made.outputs = [copy.copies[t.op].outputs[t.value_index] for t in graph.outputs]
        made.control_outputs = [
            copy.copies[op] for op in getattr(graph, "control_outputs", ()) if op in copy.copies
        ]
        made.elements = copy._elements
        return made

    # --- What inference does not know -----------------------------------------------------------

    def hints(self) -> dict[int, tf.TensorShape]:
        """Shapes that were set by hand: of which the graph knows more than its copy.

        Those of TensorFlow 1 loops are set to that of the input.
        """
        found = {}
        for op, copy in self.copies.items():
            for t, mine in zip(op.outputs, copy.outputs, strict=True):
                if tf_ops.element_count(mine) is not None:
                    continue
                both = merged(mine.shape, t.shape)
                if tf_ops.is_control_flow_v1(op) and str(t.shape) == str(op.inputs[0].shape):
                    both = merged(both, copy.inputs[0].shape)
                if both.rank != mine.shape.rank or (
                    both.rank and both.as_list() != mine.shape.as_list()
                ):
                    found[id(t)] = both
        return found

    def finish(self) -> None:
        """Carry over what is not in a graph's definition."""
        copies = self.copies
        devices = Devices(self._live)
        default = f"/device:{tf_ops.default_device_type('')}:0"
        for op, copy in copies.items():
            context = op._get_control_flow_context()
            if context is not None:
                copy._set_control_flow_context(context)
            if not op.device:
                # A copy does not know where the variables are that the graph has captured.
                device = devices.of(op)
                if device != default:
                    copy._set_device(device)
        carry_changes(self._live, self.graph, copies)
        by_chance = [copy for op, copy in copies.items() if is_view_by_chance(op, copy)]
        setattr(self.graph, tf_ops.NO_VIEWS, frozenset(by_chance))


def _ancestors(among: Iterable[tf.Operation]) -> set[tf.Operation]:
    found = set(among)
    stack = list(found)
    while stack:
        op = stack.pop()
        for p in (*(t.op for t in op.inputs), *op.control_inputs):
            if p not in found:
                found.add(p)
                stack.append(p)
    return found


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


def _is_passed_on(body: Any, i: int) -> bool:
    """Whether a loop hands its variable number `i` on as it is."""
    t = body.outputs[i]
    while t.op.type == "Identity":
        t = t.op.inputs[0]
    return t is body.inputs[i]
