"""What is wrong with a configuration, in sentences that name the key and what it may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from optckpt.models.params import USER, AnyModelParams
from optckpt.registry import suggest
from optckpt.yaml_lines import KeyPath, kind_of


def explain(
    error: ErrorDetails, data: Mapping[str, Any], schema: type[BaseModel]
) -> tuple[KeyPath, str]:
    """The place of a mistake in `data`, and a sentence about it.

    `schema`: the class of the whole configuration, whose fields are the known keys.
    """
    path: KeyPath = tuple(error["loc"])
    model = data.get("model")
    name = None
    if isinstance(model, dict):
        name = USER if USER in model else model.get("name")
    if path[:1] == ("model",) and len(path) > 1 and path[1] == name:
        path = ("model", *path[2:])  # pydantic inserts the name of the chosen class
    kind = error["type"]
    context: Mapping[str, Any] = error.get("ctx", {})
    value = error["input"]
    if kind == "extra_forbidden":
        return path, f"unknown key; {suggest(str(path[-1]), _keys(schema, path[:-1], name))}"
    if kind == "union_tag_invalid":
        return (*path, "name"), f"unknown model {name!r}; {suggest(str(name), _model_names())}"
    if kind == "union_tag_not_found":
        return path, f"needs a function, or a name, one of {', '.join(_model_names())}"
    if kind in ("value_error", "assertion_error"):
        return path, str(context.get("error", error["msg"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return path, f"expected a section with keys below it, got {kind_of(value)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        return path, f"unknown value {value!r}; {suggest(str(value), choices)}"
    nouns = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    nouns |= {"string": "text", "str": "text", "tuple": "a list", "list": "a list"}
    noun = nouns.get(kind.removesuffix("_type"))
    if kind.endswith("_type") and noun:
        return path, f"expected {noun}, got {kind_of(value)}"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return path, f"{message}, got {kind_of(value)}"


def _keys(schema: type[BaseModel], path: KeyPath, model_name: Any) -> list[str]:
    if not path:
        return list(schema.model_fields)
    if path == ("model",):
        for tag, cls in _model_classes().items():
            if tag == model_name:
                return list(cls.model_fields)
    field = schema.model_fields.get(str(path[0]))
    section: Any = field.annotation if field and len(path) == 1 else None
    return list(getattr(section, "model_fields", ()))


def _model_classes() -> dict[str, type[BaseModel]]:
    pairs = (get_args(tagged) for tagged in get_args(get_args(AnyModelParams)[0]))
    return {tag.tag: cls for cls, tag in pairs}


def _model_names() -> list[str]:
    return [name for name in _model_classes() if name != USER]
