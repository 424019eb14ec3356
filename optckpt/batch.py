"""A synthetic batch for a Keras model, as its inputs, outputs and losses ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from optckpt.errors import OptckptError


def synthetic_batch(model: Any, batch_size: int, seed: int, where: str) -> tuple[Any, Any]:
    """(x, y) for `model.train_step`: `batch_size` examples, equal for equal seeds.

    Inputs and targets of floats are uniform in [0, 1), all others 0 (an index that every table
    has). The targets of a loss with "sparse" in its name are class indices, those of others have
    the shape of the model's output.

    Raises:
        OptckptError: if the model's inputs are not known, or have other unknown sizes. `where`:
            the function that made the model, for the message.
    """
    try:
        inputs, outputs = model.input, model.output
    except (AttributeError, ValueError):
        raise OptckptError(
            f"{where} returns a model whose inputs are not known before it is called: let it "
            "return (model, batch), the batch being x, (x, y) or (x, y, sample_weight)"
        ) from None
    random = tf.random.Generator.from_seed(seed)

    def value(shape: tuple[int, ...], dtype: Any) -> tf.Tensor:
        dtype = tf.as_dtype(dtype)
        if dtype == tf.string:
            return tf.fill(shape, "")
        if not dtype.is_floating:
            return tf.zeros(shape, dtype)
        return tf.cast(random.uniform(shape), dtype)

    def known(shape: tuple[int | None, ...], name: str) -> tuple[int, ...]:
        sizes = tuple(batch_size if i == 0 and n is None else n for i, n in enumerate(shape))
        if None in sizes:
            raise OptckptError(
                f"{where} returns a model whose {name!r} has the shape {list(shape)}, not all of "
                "it known: let it return (model, batch), the batch being x, (x, y) or (x, y, "
                "sample_weight)"
            )
        return sizes  # type: ignore[return-value]

    def target(output: Any, loss: Any) -> Any:
        if loss is None:
            return None
        shape = known(output.shape, output.name)
        if "sparse" in _name_of(loss):
            return tf.zeros(shape[:-1], tf.int64)
        return value(shape, output.dtype)

    x = keras.tree.map_structure(lambda t: value(known(t.shape, t.name), t.dtype), inputs)
    flat = keras.tree.flatten(outputs)
    targets = [target(*pair) for pair in zip(flat, _losses(model, len(flat)), strict=True)]
    return x, keras.tree.pack_sequence_as(outputs, targets)


def _losses(model: Any, outputs: int) -> list[Any]:
    """The loss of each output, as it was given to `compile`."""
    loss = model.loss
    if isinstance(loss, Mapping):
        return [loss.get(name) for name in model.output_names]
    if isinstance(loss, list | tuple):
        losses = keras.tree.flatten(list(loss))
        return losses if len(losses) == outputs else [None] * outputs
    return [loss] * outputs


def _name_of(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    names = (getattr(loss, "name", None), getattr(loss, "__name__", None), type(loss).__name__)
    return " ".join(str(n) for n in names).lower()
