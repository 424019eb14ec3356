"""Checked reading of JSON files: every field is of its kind, or a sentence names it."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optckpt.errors import OptckptError


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field must be: in words, and as a test."""

    words: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            f"{self.words} or {other.words}", lambda value: self.fits(value) or other.fits(value)
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # NaN and infinities, which Python's JSON knows, are not within; nor are too long integers.
    limit = sys.float_info.max
    return (_is_whole(value) or isinstance(value, float)) and -limit <= value <= limit


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a finite number", _is_number)
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NULL = Kind("null", lambda value: value is None)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads data of one sort; raises `error` with sentences that call the whole `noun`."""

    noun: str
    error: type[OptckptError]

    def load(self, path: str | Path) -> dict[str, Any]:
        """The object in a JSON file. Raises the error naming the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise self.error(f"cannot read the {self.noun} {path}: {e.strerror or e}") from None
        except RecursionError:
            raise self.error(f"cannot read the {self.noun} {path}: nested too deeply") from None
        except ValueError as e:
            raise self.error(f"cannot read the {self.noun} {path}: {e}") from None
        if not isinstance(data, dict):
            raise self.error(f"{path} holds no {self.noun}: the top level is not an object")
        return data

    def header(self, data: Mapping[str, Any], format_: str, version: int) -> None:
        """Raise the error unless the data are of this format and version."""
        if data.get("format") != format_:
            found = reprlib.repr(data.get("format"))
            raise self.error(f"not a {self.noun}: format is {found}, not {format_!r}")
        if data.get("version") != version or not _is_whole(data["version"]):
            found = reprlib.repr(data.get("version"))
            raise self.error(
                f"{self.noun} of version {found}; this optckpt reads version {version}"
            )

    def field(self, row: Mapping[str, Any], key: str, kind: Kind, where: str, *default: Any) -> Any:
        """The value of a field; the default, if one is given, where there is none."""
        if key not in row:
            if default:
                return default[0]
            raise self.error(f"{self.noun} lacks the field {key!r} of {where}")
        return self.checked(row[key], kind, f"{key!r} of {where}")

    def items(
        self, row: Mapping[str, Any], key: str, kind: Kind, where: str, *default: Any
    ) -> tuple[Any, ...]:
        """The values of a field that is a list of things of one kind."""
        return tuple(
            self.checked(item, kind, f"entry {k} of {key!r} of {where}")
            for k, item in enumerate(self.field(row, key, LIST, where, *default))
        )

    def checked(self, value: Any, kind: Kind, where: str) -> Any:
        """The value, if it is of this kind."""
        if not kind.fits(value):
            raise self.error(
                f"{self.noun} has a malformed field: {where} must be {kind.words}, "
                f"it is {reprlib.repr(value)}"
            )
        return value
