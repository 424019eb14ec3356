"""Things that users name, choose and add to: strategies, cost models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from optckpt.errors import OptckptError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by name: built-in ones, imported when first asked for, and those registered.

    Args:
        noun: what the objects are called in messages ("strategy").
        built_in: name -> "module:attribute".
    """

    def __init__(self, noun: str, built_in: Mapping[str, str]) -> None:
        self._noun = noun
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        return list({**self._built_in, **self._registered})

    def register(self, name: str, item: T) -> None:
        """Add `item`, or replace what has this name, for this process.

        Raises:
            OptckptError: if the name is no text, or empty.
        """
        if not isinstance(name, str) or not name:
            raise OptckptError(f"the name of a {self._noun} is a text, got {name!r}")
        self._registered[name] = item

    def get(self, name: str) -> T:
        """What is called `name`. Raises OptckptError listing the known names."""
        if name in self._registered:
            return self._registered[name]
        if name not in self._built_in:
            known = ", ".join(self.names())
            raise OptckptError(f"unknown {self._noun} {name!r}; known: {known}")
        module, attribute = self._built_in[name].split(":")
        return cast(T, getattr(importlib.import_module(module), attribute))
