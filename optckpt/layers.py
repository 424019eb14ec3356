"""Operations by the layer that they belong to, as their names tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from optckpt.graph import TrainingGraph

OTHER = "(no layer)"
"""What has no scope in its name."""
_DIFFERENTIATED = re.compile(r"(gradient_tape|gradients)(_\d+)?")
"""First part of the names of backward operations; then comes the name of a forward one."""
_GRADIENT = re.compile(r"_grad(_\d+)?$")
_IN_COMMON = 0.6
"""A scope that so many of the forward operations are in is the model's, and no layer."""

_Scopes = tuple[str, ...]


def layers_of(graph: TrainingGraph, depth: int = 1) -> list[str]:
    """The layer of each operation: `depth` scopes of its name below those of the whole model.

    A Keras layer's operations are in a scope of its name; so are those of tf.name_scope. Backward
    operations belong to the layer that they differentiate, where their names say so; an optimizer's
    operations are in its own scope. What is in no scope goes with what it reads.
    """
    forward = [_parts(op.name)[:-1] for op in graph.operations if op.forward]
    known = {s[:n] for s in forward for n in range(1, len(s) + 1)}
    common = _common(forward)
    scopes = [_own(op.name, known) for op in graph.operations]
    layers = [s[len(common) :][:depth] if s[: len(common)] == common else s[:depth] for s in scopes]
    names = _renamed(["/".join(s) or OTHER for s in layers])
    for i, op in enumerate(graph.operations):
        if names[i] == OTHER:
            above = (names[graph.producer[b]] for b in op.reads)
            names[i] = next((name for name in above if name != OTHER), OTHER)
    return names


def _parts(name: str) -> _Scopes:
    return tuple(p for p in name.split("/") if p)


def _own(name: str, known: set[_Scopes]) -> _Scopes:
    """The scopes that an operation is in, of a backward one those of the forward one."""
    parts = _parts(name)
    if not parts or not _DIFFERENTIATED.fullmatch(parts[0]):
        return parts[:-1]
    while parts and _DIFFERENTIATED.fullmatch(parts[0]):
        parts = parts[1:]
    parts = tuple(_GRADIENT.sub("", p) for p in parts)
    return next((parts[:n] for n in range(len(parts), 0, -1) if parts[:n] in known), ())


def _common(scopes: Sequence[_Scopes]) -> _Scopes:
    """The scopes around most of the operations, outermost first."""
    found: _Scopes = ()
    while True:
        inner = Counter(s[len(found)] for s in scopes if len(s) > len(found))
        if not inner:
            return found
        name, count = inner.most_common(1)[0]
        inside = [s for s in scopes if s[: len(found) + 1] == (*found, name)]
        below = {s[len(found) + 1] for s in inside if len(s) > len(found) + 1}
        if count < _IN_COMMON * len(scopes) or len(below) < 2:
            return found
        found, scopes = (*found, name), inside


def _renamed(layers: list[str]) -> list[str]:
    """Without the number that TensorFlow gives to scopes when a model is called once more."""
    numbers = Counter(match[0] if (match := re.search(r"_\d+$", s)) else "" for s in layers)
    number, count = numbers.most_common(1)[0] if numbers else ("", 0)
    if not number or count < _IN_COMMON * sum(s != OTHER for s in layers):
        return layers
    return [s.removesuffix(number) for s in layers]
