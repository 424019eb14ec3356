"""Arguments that are not what they should be: checks and words for messages."""

from __future__ import annotations

import reprlib
from numbers import Number
from typing import Any

import numpy as np
import tensorflow as tf

from optckpt.errors import OptckptError


def check_tensors(value: Any, what: str) -> None:
    """Raise OptckptError if `value`, called `what`, is no nested structure of tensors."""
    for leaf in tf.nest.flatten(value):
        if not tf.is_tensor(leaf) and not isinstance(leaf, Number | np.ndarray | np.generic):
            raise OptckptError(
                f"{what} takes tensors or variables, in any nested structure, got {shown(leaf)}"
            )


def shown(value: Any) -> str:
    """A wrong argument for people: its value if that says enough, else its type."""
    if value is None or isinstance(value, str | bytes | Number):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"
