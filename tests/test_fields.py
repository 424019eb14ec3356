"""Checked reading of JSON: kinds of values, and messages that name file, field and value."""

from __future__ import annotations

import pytest

from optckpt.errors import ConfigError
from optckpt.fields import FLAG, LIST, NULL, NUMBER, OBJECT, TEXT, WHOLE, Reader

READER = Reader("recipe", ConfigError)


@pytest.mark.parametrize(
    ("kind", "fitting", "others"),
    [
        (TEXT, ["", "a"], [None, 1, ["a"]]),
        (FLAG, [True, False], [0, 1, None, "true"]),
        (WHOLE, [0, -3, 10**400], [True, 1.0, "1", None, float("nan")]),
        (NUMBER, [0, 1.5, -1e308], [True, "1", None, float("nan"), float("inf"), 10**400]),
        (LIST, [[], [1]], [(), {}, "a", None]),
        (OBJECT, [{}, {"a": 1}], [[], "a", None]),
        (WHOLE | NULL, [3, None], [0.5, "", False]),
    ],
)
def test_kinds(kind, fitting, others):
    assert all(kind.fits(value) for value in fitting)
    assert not any(kind.fits(value) for value in others)


def test_fields():
    assert READER.field({"eggs": 3}, "eggs", WHOLE, "the cake") == 3
    assert READER.field({}, "eggs", WHOLE, "the cake", None) is None
    with pytest.raises(ConfigError, match=r"^recipe lacks the field 'eggs' of the cake$"):
        READER.field({}, "eggs", WHOLE, "the cake")
    with pytest.raises(
        ConfigError,
        match=r"malformed field: 'eggs' of the cake must be a whole number or null, it is 'three'$",
    ):
        READER.field({"eggs": "three"}, "eggs", WHOLE | NULL, "the cake")


def test_items():
    assert READER.items({"steps": [1, 2]}, "steps", WHOLE, "the cake") == (1, 2)
    assert READER.items({}, "steps", WHOLE, "the cake", ()) == ()
    with pytest.raises(ConfigError, match="entry 1 of 'steps' of the cake must be a text, it is 2"):
        READER.items({"steps": ["mix", 2]}, "steps", TEXT, "the cake")
    with pytest.raises(ConfigError, match="'steps' of the cake must be a list"):
        READER.items({"steps": "mix"}, "steps", TEXT, "the cake")


def test_messages_stay_short():
    for value in ("a" * 5000, [["a" * 5000]] * 5000, 10**4000):
        with pytest.raises(ConfigError) as error:
            READER.checked(value, NULL, "it")
        assert len(str(error.value)) < 300


def test_headers():
    READER.header({"format": "r", "version": 1}, "r", 1)
    with pytest.raises(ConfigError, match="not a recipe: format is None, not 'r'"):
        READER.header({}, "r", 1)
    for version in (True, 2, "1", None):
        with pytest.raises(
            ConfigError, match=r"recipe of version .*; this optckpt reads version 1"
        ):
            READER.header({"format": "r", "version": version}, "r", 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot read the recipe"),
        (b"\xff", "cannot read the recipe"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "cannot read the recipe"),
        (b"[1]", "holds no recipe: the top level is not an object"),
    ],
)
def test_files(tmp_path, content, words):
    path = tmp_path / "cake.json"
    with pytest.raises(ConfigError, match=r"cake\.json: No such file or directory$"):
        READER.load(path)
    path.write_bytes(b'{"eggs": 3}')
    assert READER.load(path) == {"eggs": 3}
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        READER.load(path)
    assert "cake.json" in str(error.value)
