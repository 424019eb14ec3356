"""Graphs whose functions are copied at the sizes of their arguments, and found by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from optckpt.frontends import tf_ops


@dataclass(frozen=True, eq=False)
class SizedFunction:
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
    sized: dict[str, SizedFunction]

    def _get_function(self, name: str | bytes) -> Any:
        text = name.decode() if isinstance(name, bytes) else name
        return self.sized.get(text) or tf_ops.find_function(self.live, text)


class SizedFuncGraph(_Lookup, FuncGraph):  # type: ignore[misc]
    pass


class SizedGraph(_Lookup, tf.Graph):  # type: ignore[misc]
    pass
