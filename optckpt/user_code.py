"""Functions of the user's own, found by name and called."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from optckpt.errors import OptckptError
from optckpt.models.params import FUNCTION, UserModel
from optckpt.registry import suggest


def made_by(params: UserModel) -> Any:
    """What the function returns, called with `arguments`, and `batch_size` if it takes one.

    Raises:
        OptckptError: if there is no such function, it takes no such arguments, or it fails.
    """
    function = find_function(params.function)
    given = dict(params.arguments)
    if takes_batch_size(function):
        given.setdefault("batch_size", params.batch_size)
    try:
        known = inspect.signature(function)
    except (TypeError, ValueError):
        known = None
    if known is not None:
        try:
            known.bind(**given)
        except TypeError as e:
            unknown = [name for name in given if name not in known.parameters]
            hint = f"; {suggest(unknown[0], list(known.parameters))}" if unknown else ""
            raise OptckptError(
                f"{params.function} cannot be called with model.arguments: {e}{hint}"
            ) from None
    try:
        return function(**given)
    except OptckptError:
        raise
    except Exception as e:
        raise OptckptError(f"{params.function} failed: {_told(e)}") from e


def takes_batch_size(function: Callable[..., Any]) -> bool:
    """Whether the function has an argument `batch_size`."""
    try:
        return "batch_size" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def find_function(name: str) -> Callable[..., Any]:
    """The function that "module:function" or "file.py:function" names.

    Modules are looked for in the working directory first.

    Raises:
        OptckptError: if there is none, or its module cannot be imported.
    """
    match = FUNCTION.fullmatch(name)
    if match is None:
        raise OptckptError(f'expected "module:function" or "file.py:function", got {name!r}')
    found: Any = _module(match["module"], name)
    for part in match["function"].split("."):
        if not hasattr(found, part):
            known = [
                n for n in vars(found) if not n.startswith("_") and callable(getattr(found, n))
            ]
            raise OptckptError(f"{name}: there is no {part!r}; {suggest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise OptckptError(f"{name} is no function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _module(module: str, name: str) -> ModuleType:
    path = Path(module) if module.endswith(".py") else None
    folder = str((path.parent if path is not None else Path()).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if path is None:
            return importlib.import_module(module)
        if not path.is_file():
            raise OptckptError(f"{name}: there is no file {module}")
        return importlib.import_module(path.stem)
    except ModuleNotFoundError as e:
        if e.name is not None and (module == e.name or module.startswith(f"{e.name}.")):
            raise OptckptError(
                f"{name}: there is no module {e.name!r} here or in this Python's packages; run "
                "from the folder it is in, or name its file: path/to/file.py:function"
            ) from None
        raise OptckptError(f"{name}: importing {module} failed: {_told(e)}") from e
    except OptckptError:
        raise
    except Exception as e:
        raise OptckptError(f"{name}: importing {module} failed: {_told(e)}") from e


def _told(error: Exception) -> str:
    """The error and where in the user's code it was raised, in one line."""
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "<frozen" not in f.filename]
    here = Path(__file__).resolve()
    own = [f for f in own if Path(f.filename).resolve() != here]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text
