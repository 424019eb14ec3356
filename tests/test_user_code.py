"""Functions named by module and function."""

from __future__ import annotations

import sys

import pytest

from optckpt.errors import OptckptError
from optckpt.models.params import UserModel
from optckpt.user_code import find_function, made_by, takes_batch_size

MODULE = """
def sized(batch_size=1, width=2):
    return batch_size, width

def fails():
    raise ValueError("no data\\nhere")

class Nested:
    @staticmethod
    def inner():
        return 5

NUMBER = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the working directory, not imported before."""
    name = f"user_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def made(function: str, **more):
    return made_by(UserModel(function=function, **more))


def test_modules_and_files(module, tmp_path):
    assert made(f"{module}:sized") == (32, 2)
    assert made(f"{tmp_path / module}.py:sized", batch_size=7) == (7, 2)
    assert made(f"{module}:Nested.inner") == 5


def test_arguments(module):
    assert made(f"{module}:sized", arguments={"width": 9}) == (32, 9)
    assert made(f"{module}:sized", arguments={"batch_size": 4}, batch_size=8) == (4, 2)
    with pytest.raises(OptckptError, match=r"arguments: .*'widht'; did you mean 'width'"):
        made(f"{module}:sized", arguments={"widht": 9})
    assert takes_batch_size(find_function(f"{module}:sized"))
    assert not takes_batch_size(find_function(f"{module}:fails"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{}:szed", "there is no 'szed'; did you mean 'sized'"),
        ("{}:NUMBER", "is no function but int"),
        ("{}:fails", r"failed: ValueError: no data \(user_.*py, line 6\)"),
        ("no_such_module_x:f", "no module 'no_such_module_x' here"),
        ("nothing.py:f", "there is no file nothing.py"),
        ("broken.py:f", r"importing broken.py failed: ModuleNotFoundError: .*no_such_y"),
        ("wrong.py:f", r"importing wrong.py failed: SyntaxError"),
    ],
)
def test_mistakes(module, tmp_path, function, message):
    (tmp_path / "broken.py").write_text("import no_such_y\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    with pytest.raises(OptckptError, match=message):
        made(function.format(module))
