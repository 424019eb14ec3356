"""Options that several commands share, and what is wrong with them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optckpt.budget import Budget
from optckpt.errors import OptckptError
from optckpt.solvers import registry

if TYPE_CHECKING:
    from optckpt.config import Config

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG|MODULE:FUNCTION]",
        help="A YAML file, or a function that returns a compiled keras.Model, (model, batch) or "
        "(step, inputs); without it, $OPTCKPT_CONFIG, ./optckpt.yaml or the defaults.",
    ),
]
AnyBudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="B", help="Instead of the configuration's budget."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder for what is written: out/NAME."),
]
BudgetOption = Annotated[
    str, typer.Option("--budget", metavar="B", help='Bytes, "6GiB", or "80%" of the plain peak.')
]
TimeLimitOption = Annotated[
    str | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Wall time for one solve."),
]


def settings_for(target: str | None, time_limit: str | None = None) -> Config:
    """The configuration that an argument CONFIG or MODULE:FUNCTION stands for."""
    from optckpt.config import find_config, parse_config
    from optckpt.models.params import FUNCTION

    seconds = seconds_of(time_limit)
    if target is not None and FUNCTION.fullmatch(target) and not Path(target).exists():
        base = find_config()
        model = parse_config({"model": {"function": target}}).model
        known = getattr(base.model, "function", None)
        # The arguments that a configuration here gives to the same function hold.
        settings = base if known == target else base.model_copy(update={"model": model})
    else:
        settings = find_config(target)
    if seconds is not None:
        limits = settings.solver.model_copy(update={"time_limit": seconds})
        settings = settings.model_copy(update={"solver": limits})
    return settings


def out_folder(out: Path | None, target: str | None, settings: Config) -> Path:
    """The folder for what is written about `target`."""
    if out is not None:
        return out
    is_file = target is not None and Path(target).exists()
    return Path("out") / (Path(str(target)).stem if is_file else settings.model.name)


def budget_of(text: str | None, settings: Config) -> Budget | None:
    """What `--budget` says, else the configuration; None: neither says anything."""
    wanted = settings.budget if text is None else text
    return None if wanted is None else Budget.parse(wanted)


def names_of(text: str) -> list[str]:
    """The strategies that `--strategies` names; all are known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise OptckptError("--strategies names no strategy; give one or more, joined by commas")
    for name in names:
        check_strategy(name)
    return names


def check_strategy(name: str) -> None:
    """Refuse a strategy that is unknown, or that nobody can use from here."""
    registry.get(name)
    if name == "explicit":
        raise OptckptError(
            "strategy 'explicit' is for Python, where SolveOptions(checkpoints=...) names the "
            "buffers to keep: use another strategy on the command line"
        )


@contextmanager
def folder_for(path: Path) -> Iterator[Path]:
    """A folder that can be written into; if nothing was, what was created for it is gone again."""
    created = [p for p in (path, *path.parents) if not p.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as e:
            raise OptckptError(f"cannot write into {path}: {e.strerror or e}") from None
        yield path
    finally:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()


def seconds_of(time_limit: str | None) -> float | None:
    """What `--time-limit` says, or None."""
    if time_limit is None:
        return None
    try:
        return registry.SolveOptions(float(time_limit)).time_limit
    except ValueError:
        raise OptckptError(
            f"--time-limit must be a number of seconds, got {time_limit!r}"
        ) from None
    except OptckptError as e:
        raise OptckptError(str(e).replace("time_limit", "--time-limit", 1)) from None
