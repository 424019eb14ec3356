"""The sizes at which a graph with unknown dimensions is planned.

A function traced for any batch size computes the right thing at every size, but a plan needs
sizes. For each dimension of an input that is unknown, the first of these that says something holds:

1. `at`, a context around the call that traces the function;
2. the configuration's section `sizes`;
3. the arguments of the call that made TensorFlow trace the function, or, if larger, those of
   earlier calls that it was traced for. The inputs of a function within another one, and what it
   captures, are followed outwards.

The step keeps within its budget at these sizes and at smaller ones.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from optckpt.config import Config
from optckpt.errors import ConfigError
from optckpt.frontends import tf_ops
from optckpt.frontends.tf_functions import function_graph, function_names
from optckpt.frontends.tf_shadow import shadow
from optckpt.frontends.tf_shapes import argument_name

logger = logging.getLogger("optckpt.sizes")

_ITERATORS = tf_ops.words("""
    IteratorGetNext IteratorGetNextSync OptionalGetValue MultiDeviceIteratorGetNextFromShard
    """)
_BRANCHES = tf_ops.words("If StatelessIf")


@dataclass(frozen=True, eq=False)
class _Scope:
    """What `at` was told."""

    thread: int
    elements: tuple[tf.TensorShape, ...]
    named: Mapping[str, tf.TensorShape]
    positional: tuple[tf.TensorShape, ...]


_scopes: list[_Scope] = []
_lock = threading.Lock()


@contextmanager
def at(elements: Any = None, *, inputs: Any = None) -> Iterator[None]:
    """Within the context, functions that are traced with unknown sizes are planned at these.

    Holds for what this thread traces, in the threads of a distribution strategy's replicas as
    well. Dimensions that are known anyway need not be the same; None leaves one open. Contexts may
    be nested: the innermost that fits an input holds.

    Args:
        elements: shapes of one element of a data set (per replica), in its structure. They hold
            for what iterators return, and for functions that take as many tensors, of shapes that
            agree. In the place of a shape may be a tensor, an array, a `tf.TensorSpec`.
        inputs: shapes of the arguments of a function: a dict by name, or a list in their order.

    Raises:
        ConfigError: if something is given that is no shape.
    """
    named = inputs if isinstance(inputs, Mapping) else {}
    positional = () if isinstance(inputs, Mapping) else inputs
    scope = _Scope(
        threading.get_ident(),
        tuple(_flatten(elements)),
        {str(name): _shape(value, f"inputs[{name!r}]") for name, value in named.items()},
        tuple(_flatten(positional)),
    )
    with _lock:
        _scopes.append(scope)
    try:
        yield
    finally:
        with _lock:
            _scopes.remove(scope)


def are_given() -> bool:
    """Whether this thread is within the context `at`."""
    here = threading.get_ident()
    with _lock:
        return any(scope.thread == here for scope in _scopes)


def of_inputs(
    graph: tf.Graph, settings: Config, like: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()
) -> dict[int, tf.TensorShape]:
    """Shapes of the inputs of `graph` that it does not know itself, as far as they are known.

    Returns {id(tensor): shape}, for `optckpt.frontends.tensorflow.capture`; empty if the graph
    knows the shapes of all its inputs.

    Args:
        like: (placeholder, tensor) pairs: placeholders that are no arguments, but have the shapes
            of what is computed from these.

    Raises:
        ConfigError: if a declared size contradicts what the graph knows; names the input.
        CaptureError: if sizes do not go together.
    """
    # AutoGraph would convert all that is called while a function is traced.
    find = tf.autograph.experimental.do_not_convert(_of_inputs)
    found: dict[int, tf.TensorShape] = find(graph, settings, like)
    return found


def _of_inputs(
    graph: tf.Graph, settings: Config, like: Sequence[tuple[tf.Tensor, tf.Tensor]]
) -> dict[int, tf.TensorShape]:
    inputs = _Inputs(settings, {id(t) for t, _ in like})
    found = dict(inputs.of(graph))
    shapes = inputs.followed([other for t, other in like if _is_open(t)])
    for t, other in like:
        shape = shapes.get(id(other))
        if shape is not None and shape.rank is not None and shape.as_list() != _dims(t):
            found[id(t)] = shape
    return found


def values_of_inputs(graph: tf.Graph) -> dict[int, tf.Tensor]:
    """{id(placeholder): tensor} of the arguments of the call that made TensorFlow trace `graph`,
    and of the constants that it captures; without those that are no numbers."""
    given = dict(arguments_of(graph))
    given.update(
        (id(inner), outer) for outer, inner in getattr(graph, "captures", ()) if _is_value(outer)
    )
    return given


def arguments_of(graph: tf.Graph) -> dict[int, tf.Tensor]:
    """{id(placeholder): tensor} of the arguments of the call that made TensorFlow trace `graph`;
    without those that are no numbers."""
    return {key: t for key, t in _call_of(graph).arguments.items() if _is_value(t)}


def _is_value(tensor: Any) -> bool:
    is_value = isinstance(tensor, tf.__internal__.EagerTensor)
    return is_value and not tf_ops.is_opaque(tensor.dtype)


# --- Shapes that are given ---------------------------------------------------------------------


def _flatten(structure: Any) -> Iterator[tf.TensorShape]:
    """The shapes in a nested structure, in the order in which TensorFlow flattens it."""
    if structure is None:
        return
    if _is_shape(structure):
        yield _shape(structure, "elements")
    elif isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from _flatten(structure[key])
    elif isinstance(structure, list | tuple):
        for part in structure:
            yield from _flatten(part)
    else:
        for part in tf.nest.flatten(structure, expand_composites=True):
            yield _shape(part, "elements")


def _is_shape(value: Any) -> bool:
    if isinstance(value, tf.TensorShape) or hasattr(value, "shape"):
        return True
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and any(isinstance(n, int) for n in value)
        and all(n is None or isinstance(n, int) for n in value)
    )


def _shape(value: Any, where: str) -> tf.TensorShape:
    try:
        return tf.TensorShape(getattr(value, "shape", value))
    except (TypeError, ValueError):
        raise ConfigError(
            f"optckpt.sizes.at: {where} has {value!r} where a shape is needed, such as "
            "[64, 224, 224, 3]"
        ) from None


# --- Inputs of graphs --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """The call of a function that made TensorFlow trace it."""

    arguments: Mapping[int, tf.Tensor]
    """id(placeholder) -> what was given for it."""
    earlier: Mapping[int, Sequence[tf.TensorShape]]
    """id(placeholder) -> shapes that the function was traced for before."""


class _Inputs:
    """Finds shapes of inputs; remembers what it has found of each graph."""

    def __init__(self, settings: Config, others: Collection[int] = ()) -> None:
        """`others`: id() of placeholders whose shapes are not to be found."""
        self._sizes = settings.sizes
        self._others = others
        self._known: dict[int, dict[int, tf.TensorShape]] = {}

    def of(self, graph: tf.Graph) -> dict[int, tf.TensorShape]:
        """Shapes of the inputs of a graph, by id(tensor)."""
        key = id(graph)
        if key not in self._known:
            self._known[key] = {}
            self._known[key] = self._find(graph)
        return self._known[key]

    def _find(self, graph: tf.Graph) -> dict[int, tf.TensorShape]:
        placeholders: list[tf.Tensor] = []
        groups: list[list[tf.Tensor]] = []
        for op in graph.get_operations():
            kind = op.type
            if kind in tf_ops.PLACEHOLDERS:
                placeholders += (t for t in op.outputs if id(t) not in self._others)
            elif kind in _ITERATORS or (kind in _BRANCHES and _returns_data(op)):
                groups.append(list(op.outputs))
        sources = [t for t in (*placeholders, *(t for g in groups for t in g)) if _is_open(t)]
        if not sources:
            return {}
        captures = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        arguments = [t for t in placeholders if id(t) not in captures and _has_shape(t)]
        call = _call_of(graph)
        outer = {
            key: t
            for key, t in (captures | dict(call.arguments)).items()
            if hasattr(t, "graph") and t.graph is not graph
        }
        followed = self.followed([outer[id(t)] for t in sources if id(t) in outer])
        given = _given(graph, arguments, groups)
        found = {}
        for t in sources:
            candidates = [given.get(id(t)), self._named(t)]
            if id(t) in outer:
                candidates.append(followed.get(id(outer[id(t)])))
            if id(t) not in captures:
                candidates.append(self._batch(t))
            argument = call.arguments.get(id(t))
            seen = None
            if argument is not None and id(t) not in outer:
                seen = _largest(t, [argument.shape, *call.earlier.get(id(t), ())])
                candidates.append(seen)
            shape = t.shape
            for candidate in candidates:
                shape = _filled(t, shape, candidate)
            if seen is not None:
                _warn_if_larger(t, shape, seen)
            if shape.rank is not None and shape.as_list() != _dims(t):
                found[id(t)] = shape
        if found:
            text = ", ".join(
                f"{argument_name(t.op)} {found[id(t)]}" for t in sources if id(t) in found
            )
            logger.info("%s is planned at %s", getattr(graph, "name", "the graph"), text)
        return found

    def _named(self, tensor: tf.Tensor) -> tf.TensorShape | None:
        dims = self._sizes.inputs.get(argument_name(tensor.op))
        return None if dims is None else tf.TensorShape(dims)

    def _batch(self, tensor: tf.Tensor) -> tf.TensorShape | None:
        dims = _dims(tensor)
        if self._sizes.batch is None or not dims or dims[0] is not None:
            return None
        return tf.TensorShape([self._sizes.batch, *([None] * (len(dims) - 1))])

    def followed(self, tensors: Sequence[tf.Tensor]) -> dict[int, tf.TensorShape]:
        """Shapes of tensors of other graphs or the same, as these would be planned."""
        found = {id(t): t.shape for t in tensors}
        by_graph: dict[int, list[tf.Tensor]] = {}
        for t in tensors:
            if _is_open(t):
                by_graph.setdefault(id(t.graph), []).append(t)
        for wanted in by_graph.values():
            graph = wanted[0].graph
            shapes = self.of(graph)
            if not shapes:
                continue
            direct = {id(t): shapes[id(t)] for t in wanted if id(t) in shapes}
            rest = [t for t in wanted if id(t) not in direct]
            found.update(direct)
            if rest:
                sized = shadow(graph, shapes, [t.op for t in rest])
                if sized is not None:
                    found.update((id(t), sized.carried(t).shape) for t in rest)
        return found


def _given(
    graph: tf.Graph, arguments: Sequence[tf.Tensor], groups: Sequence[Sequence[tf.Tensor]]
) -> dict[int, tf.TensorShape]:
    """What `at` says of the inputs of a graph."""
    found: dict[int, tf.TensorShape] = {}
    for scope in _scopes_of(graph):
        for t in arguments:
            shape = scope.named.get(argument_name(t.op))
            if shape is not None:
                found.setdefault(id(t), shape)
        for t, shape in zip(arguments, scope.positional, strict=False):
            found.setdefault(id(t), shape)
        # Beside the element, a function may have arguments of known size: counters, say.
        for group in (arguments, [t for t in arguments if _is_open(t)], *groups):
            data = [t for t in group if _has_shape(t)]
            # A branch that gets the next element gets that of each replica. Given as arguments, the
            # tensors of all replicas follow each other.
            count = len(data) // max(1, len(scope.elements))
            of_each = tuple(shape for shape in scope.elements for _ in range(count))
            for shapes in (scope.elements * count, of_each):
                if len(shapes) == len(data) and all(map(_agree, data, shapes)):
                    for t, shape in zip(data, shapes, strict=True):
                        found.setdefault(id(t), shape)
                    break
    return found


def _scopes_of(graph: tf.Graph) -> list[_Scope]:
    """The contexts that hold for a graph, the innermost first."""
    with _lock:
        scopes = _scopes[::-1]
    if not scopes:
        return []
    here = threading.get_ident()
    mine = [scope for scope in scopes if scope.thread == here]
    if mine:
        return mine
    # The thread of a replica: the function around it is traced by another one.
    tracing = set()
    level: Any = graph
    while isinstance(level, FuncGraph):
        found = _frame_of(level)
        if found is not None:
            tracing.add(found[0])
        level = level.outer_graph
    return [scope for scope in scopes if scope.thread in tracing]


def _returns_data(op: tf.Operation) -> bool:
    """Whether a branch does nothing but get the next element, if there is one."""
    if any(t.dtype not in (tf.bool, tf.resource, tf.variant) for t in op.inputs):
        return False
    graphs = [function_graph(op, name) for name in function_names(op)]
    return any(
        g is not None and any(inner.type in _ITERATORS for inner in g.get_operations())
        for g in graphs
    )


# --- The call that is being traced -------------------------------------------------------------


def _call_of(graph: tf.Graph) -> _Call:
    """What the function of this graph, which is being traced, was called with."""
    nothing = _Call({}, {})
    found = _frame_of(graph)
    if found is None or found[1].f_back is None:
        return nothing
    inner, outer = found[1].f_locals, found[1].f_back.f_locals
    try:
        kind = inner["function_type"]
        placeholders = kind.unpack_inputs(inner["placeholder_bound_args"])
        bound = outer["bound_args"]
        given = kind.unpack_inputs(kind.bind(*bound.args, **bound.kwargs))
        earlier: list[Sequence[Any]] = []
        cache = outer["tracing_options"].function_cache
        for _, other in [] if cache is None else list(cache._primary):
            if len(other.flat_inputs) == len(kind.flat_inputs) == len(placeholders):
                earlier.append(other.flat_inputs)
    except Exception as error:
        # Traced for specifications, which have no sizes; or TensorFlow's inside has changed.
        logger.debug("the arguments of %s cannot be seen: %s", getattr(graph, "name", "?"), error)
        return nothing
    if len(placeholders) != len(given):
        return nothing
    return _Call(
        {id(p): t for p, t in zip(placeholders, given, strict=True)},
        {
            id(p): [spec[i].shape for spec in earlier if hasattr(spec[i], "shape")]
            for i, p in enumerate(placeholders)
        },
    )


def _frame_of(graph: tf.Graph) -> tuple[int, FrameType] | None:
    """The thread and the frame in which TensorFlow traces the function of this graph.

    TensorFlow does not hand down to a graph what the function was called with.
    """
    here = threading.get_ident()
    frames = sys._current_frames()
    for thread in (here, *(t for t in frames if t != here)):
        frame = frames.get(thread)
        while frame is not None:
            if frame.f_code.co_name == _TRACING and frame.f_locals.get("func_graph") is graph:
                return thread, frame
            frame = frame.f_back
    return None


_TRACING = "_create_concrete_function"


# --- Shapes ------------------------------------------------------------------------------------


def _has_shape(tensor: tf.Tensor) -> bool:
    return not tf_ops.is_opaque(tensor.dtype)


def _is_open(tensor: tf.Tensor) -> bool:
    return _has_shape(tensor) and tf_ops.element_count(tensor) is None


def _dims(tensor: tf.Tensor) -> list[int | None] | None:
    return None if tensor.shape.rank is None else tensor.shape.as_list()


def _agree(tensor: tf.Tensor, shape: tf.TensorShape) -> bool:
    return bool(tensor.shape.is_compatible_with(shape))


def _filled(
    tensor: tf.Tensor, shape: tf.TensorShape, candidate: tf.TensorShape | None
) -> tf.TensorShape:
    """`shape` with its unknown dimensions as in `candidate`."""
    if candidate is None or candidate.rank is None:
        return shape
    if shape.rank is None:
        shape = tf.TensorShape([None] * candidate.rank)
    if shape.rank != candidate.rank:
        raise ConfigError(
            f"the declared size {candidate} of input {argument_name(tensor.op)!r} has "
            f"{candidate.rank} dimensions, but the input has {shape.rank}: {tensor.shape}"
        )
    pairs = zip(_listed(shape), _listed(candidate), strict=True)
    return tf.TensorShape([b if a is None else a for a, b in pairs])


def _listed(shape: tf.TensorShape) -> list[int | None]:
    found: list[int | None] = shape.as_list()
    return found


def _largest(tensor: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """The largest size of each dimension among the shapes that `tensor` may have."""
    fitting = [_listed(s) for s in shapes if s.rank is not None and _agree(tensor, s)]
    if not fitting:
        return tf.TensorShape(None)
    if len({len(dims) for dims in fitting}) > 1:
        return tf.TensorShape(fitting[0])
    return tf.TensorShape(
        [
            max((n for n in each if n is not None), default=None)
            for each in zip(*fitting, strict=True)
        ]
    )


def _warn_if_larger(tensor: tf.Tensor, planned: tf.TensorShape, seen: tf.TensorShape) -> None:
    if planned.rank is None or seen.rank != planned.rank:
        return
    pairs = zip(_listed(planned), _listed(seen), strict=True)
    if any(p is not None and s is not None and s > p for p, s in pairs):
        logger.warning(
            "input %r has shape %s in this call, more than the declared %s: the budget is kept up "
            "to the declared size only",
            argument_name(tensor.op),
            seen,
            planned,
        )
