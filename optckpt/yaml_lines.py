"""YAML that remembers where things stand, and refuses what PyYAML lets pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from optckpt.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a place in the file."""


MOST_NODES = 100_000
"""Aliases of aliases can make a short text endless."""
MOST_BITS = 1000
"""Longer integers fit no float, and Python refuses to print some of them."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as YAML 1.2 does (PyYAML wants 1.0e-3).

    Scalars that cannot be read (`!!int x`) are errors with a line, as all others are.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                problem=f"{_shortened(str(node.value))!r} is no {kind}",
                problem_mark=node.start_mark,
            ) from e
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise yaml.constructor.ConstructorError(
                problem="the number is too long", problem_mark=node.start_mark
            )
        return value


_Loader.yaml_implicit_resolvers = {
    k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The data, and the line (from 1) on which each key or item stands; an empty text gives {}.

    Raises:
        ConfigError: "source:line: ..." if it is not YAML, not a mapping, or gives a key twice.
    """
    lines: dict[KeyPath, int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, lines
        _walk(node, (), lines, source, ())
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {e.problem or e.context}") from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise ConfigError(
            f"{source}:{line}: not valid YAML: character U+{ord(text[e.position]):04X}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    if data is None:
        return {}, lines
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}:{node.start_mark.line + 1}: expected keys such as 'budget: 60%', "
            f"got {kind_of(data)}"
        )
    return data, lines


def _walk(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str, above: tuple[int, ...]
) -> None:
    if id(node) in above:
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: an alias contains itself")
    if len(lines) > MOST_NODES:
        raise ConfigError(f"{source}: more than {MOST_NODES} keys and items, aliases repeated")
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ConfigError(f"{source}:{line}: keys are words, this one is not")
            name = str(key.value)
            if name in first:
                raise ConfigError(
                    f"{source}:{line}: {dotted((*path, name))}: given twice, first on line "
                    f"{first[name]}; keep one"
                )
            first[name] = line
            below = (*path, name)
            lines[below] = line
            _walk(value, below, lines, source, above)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            item = (*path, i)
            lines[item] = value.start_mark.line + 1
            _walk(value, item, lines, source, above)


def dotted(path: KeyPath) -> str:
    """A place for people: "compare.strategies[1]"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def kind_of(value: Any) -> str:
    """What a value is, for a message: "a list", "the text 'x'", "3"."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    if isinstance(value, str):
        return f"the text {_shortened(value)!r}"
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
