"""Things that users name, choose and add to: strategies, cost models."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, cast

from optckpt.errors import OptckptError

T = TypeVar("T")


def suggest(word: str, known: Sequence[str]) -> str:
    """A word for one that is unknown: the nearest of the known ones, or all of them."""
    close = [k for k in known if word and k.startswith(word.lower())]
    close += difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


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
        """What is called `name`. Raises OptckptError with the nearest name, or all of them."""
        if name in self._registered:
            return self._registered[name]
        if name not in self._built_in:
            raise OptckptError(f"unknown {self._noun} {name!r}; {suggest(name, self.names())}")
        module, attribute = self._built_in[name].split(":")
        return cast(T, getattr(importlib.import_module(module), attribute))
