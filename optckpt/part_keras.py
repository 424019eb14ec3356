"""What Keras adds to the arguments of a part: state that is handed down beside the tensors.

Keras may not be there at all: it is looked up among the modules that are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from optckpt.errors import CaptureError

_MASK = "_keras_mask"


def is_symbolic() -> bool:
    """Whether Keras traces for shapes alone, perhaps of any batch size: no step comes of that."""
    keras = sys.modules.get("keras")
    scope = getattr(keras, "SymbolicScope", None)
    if scope is None:
        return False
    # Keras does not say it by a function of its own; each scope notes the one around it.
    with scope() as inner:
        return getattr(inner, "original_scope", None) is not None


def refuse_stateless(name: str) -> None:
    """Raise CaptureError in a keras.StatelessScope, where tensors stand for the variables."""
    if _get("stateless_scope") is not None:
        raise CaptureError(
            f"{name!r} has a budget of its own and is called in a keras.StatelessScope, whose "
            "values of variables would get no gradients from it: call it outside of the scope, or "
            "leave out the decorator optckpt.budgeted"
        )


def refuse_losses(name: str, layers: Iterable[Any], graph: Any) -> None:
    """Raise CaptureError if one of the `layers`, or one around them, has a loss of this `graph`."""
    around = [getattr(scope, "caller", None) for scope in _get("name_scope_stack") or ()]
    for layer in (*layers, *around):
        losses = getattr(layer, "_losses", [])
        others = [t for t in losses if getattr(t, "graph", None) is not graph]
        if len(others) < len(losses):
            # Nobody could read it, now or in later steps.
            losses[:] = others
            raise CaptureError(
                f"{name!r} has a budget of its own, and in it layer {layer.name!r} adds a loss "
                "(add_loss or activity_regularizer) that cannot leave the part: compute it outside "
                "of the part, from what that returns, or leave out the decorator optckpt.budgeted"
            )


def handed_down() -> dict[str, Any]:
    """What layers that are called pick up from the calls around them: `training` and the like."""
    context = _get("current_call_ctx")
    return {k: v for k, v in vars(context).items() if k != "entry_layer"} if context else {}


def hand_down(values: dict[str, Any]) -> None:
    """Leave what layers left that were called: those called next would pick it up."""
    context = _get("current_call_ctx")
    if context:
        vars(context).update(values)


def state() -> list[Any]:
    """What the operations depend on that Keras' layers make here, their arguments apart."""
    remat = _get("remat_scope_stack") or [None]
    return [
        *(v for pair in sorted(handed_down().items()) for v in pair),
        getattr(_get("autocast_scope"), "dtype", None),
        *(getattr(remat[-1], k, None) for k in ("mode", "output_size_threshold")),
        *(getattr(remat[-1], "layer_names", None) or ()),
        _get("flash_attention"),
        _get("distribution"),
    ]


def mask_of(tensor: Any) -> Any:
    """The mask that hangs on a tensor (of an Embedding with mask_zero, say), or None."""
    return getattr(tensor, _MASK, None)


def hang_mask(tensor: Any, mask: Any) -> None:
    if mask is not None:
        setattr(tensor, _MASK, mask)


@contextmanager
def noting_layers() -> Iterator[list[Any]]:
    """The layers that are called within, each once."""
    layers: list[Any] = []

    class Noting(list):  # type: ignore[type-arg]
        # Each call of a layer opens a name scope of which the layer is the caller.
        def append(self, scope: Any) -> None:
            self.note(getattr(scope, "caller", None))
            super().append(scope)

        def note(self, layer: Any) -> None:
            if hasattr(layer, "trainable") and not any(layer is known for known in layers):
                layers.append(layer)

    around = _get("name_scope_stack")
    _set("name_scope_stack", Noting(around or ()))
    try:
        yield layers
    finally:
        _set("name_scope_stack", around)
        # This part may be inside of another.
        for layer in layers if hasattr(around, "note") else ():
            around.note(layer)


def _get(attribute: str) -> Any:
    found = sys.modules.get("keras.src.backend.common.global_state")
    return None if found is None else found.get_global_attribute(attribute)


def _set(attribute: str, value: Any) -> None:
    found = sys.modules.get("keras.src.backend.common.global_state")
    if found is not None:
        found.set_global_attribute(attribute, value)
