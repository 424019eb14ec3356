"""What may cross the border of a part, and what is refused because its gradients would be lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import nest

from optckpt.errors import CaptureError
from optckpt.halves import is_differentiable


def refuse_arguments(name: str, fn: Callable[..., Any], arguments: Any) -> None:
    """Raise CaptureError for an argument that holds tensors and is none.

    `arguments`: (args, kwargs) of a call of `fn`; variables and constants may be among them.
    """
    for path, leaf in nest.flatten_with_tuple_paths(arguments):
        if isinstance(leaf, tf.TensorArray):
            what = "a TensorArray: pass what it holds as one tensor (its stack())"
        elif not tf.is_tensor(leaf) or hasattr(leaf, "assign"):
            continue
        elif not isinstance(leaf, tf.Tensor):
            what = f"a {type(leaf).__name__}: pass the tensors that it consists of"
        elif _is_list(leaf):
            what = "a tensor of dtype variant, whose gradients would be lost: pass what it holds"
        else:
            continue
        raise CaptureError(
            f"{name!r} has a budget of its own and takes tensors, but {_argument(fn, path)} is "
            f"{what}"
        )


def refuse_results(name: str, returned: Iterable[Any]) -> None:
    """Raise CaptureError for a result that is neither a tensor nor None."""
    for t in returned:
        if t is not None and not isinstance(t, tf.Tensor):
            raise CaptureError(
                f"{name!r} has a budget of its own and must return tensors, or structures of "
                f"them, but returned a {type(t).__name__}"
            )
        if t is not None and _is_list(t):
            raise CaptureError(
                f"{name!r} has a budget of its own and returned a tensor of dtype variant, whose "
                "gradients would be lost: return what it holds (of a list, its stack)"
            )


def refuse_captures(name: str, graph: tf.Graph) -> None:
    """Raise CaptureError if the traced `graph` takes tensors that have gradients from another."""
    for outer, _ in graph.captures:
        if not isinstance(outer, tf.Tensor) or not hasattr(outer, "op"):
            continue
        if is_differentiable(outer) or _is_list(outer):
            how = "what it holds" if outer.dtype == tf.variant else "it"
            raise CaptureError(
                f"{name!r} has a budget of its own and takes tensor {outer.name!r} from the "
                f"tf.function around it, to which no gradient would flow: pass {how} as an argument"
            )


def _is_list(tensor: tf.Tensor) -> bool:
    """Whether it is a variant that may hold tensors with gradients."""
    if tensor.dtype != tf.variant:
        return False
    if isinstance(tensor, ops.EagerTensor):
        data = tensor._handle_data
    else:
        data = handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set or not data.shape_and_type:
        return True
    held = [tf.as_dtype(s.dtype) for s in data.shape_and_type]
    return any(d.is_floating or d.is_complex or d == tf.variant for d in held)


def _argument(fn: Callable[..., Any], path: Sequence[Any]) -> str:
    """What to call the argument at `path` of (args, kwargs)."""
    where = path[1]
    if path[0] == 0:
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # Of something built in.
            parameters = []
        named = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if where >= len(named):
            return f"its argument {where + 1}"
        where = named[where]
    inside = "".join(f"[{p!r}]" for p in path[2:])
    return f"its argument {where!r}" if not inside else f"{inside} of its argument {where!r}"
