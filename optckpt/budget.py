"""Budgets: peak bytes on the device during the step, resident bytes included."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from operator import index
from typing import Any

from optckpt.errors import BudgetError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MOST_BYTES = 2**63 - 1
"""The largest budget; more than any device has, and what 64 bits hold."""
_PATTERN = re.compile(r"\s*([0-9]{1,999}(?:\.[0-9]{0,999})?|\.[0-9]{1,999})\s*([a-zA-Z]*|%)\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """Either `bytes`, or a `fraction` of the plain step's peak (both resident included)."""

    bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.fraction is None):
            raise BudgetError("Budget takes either bytes= or fraction=: give one of the two")
        if self.bytes is not None and not (_is_whole(self.bytes) and 0 < self.bytes <= MOST_BYTES):
            raise BudgetError(
                f"Budget(bytes={self.bytes!r}): give a whole number of bytes, from 1 to 2**63 - 1"
            )
        if self.fraction is not None and not (_is_real(self.fraction) and 0 < self.fraction <= 1):
            raise BudgetError(
                f"Budget(fraction={self.fraction!r}): give a share of the plain step's peak, more "
                "than 0 and at most 1"
            )

    def resolve(self, plain_peak: int) -> int:
        """The budget in bytes for a step whose plain peak is `plain_peak` bytes."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return round(self.fraction * plain_peak)

    @classmethod
    def parse(cls, value: Budget | int | float | str) -> Budget:
        """Read a budget: an int of bytes, a float fraction (0 < f <= 1), "6GiB", "6 GB", "60%".

        "0.6" is a fraction too, for command lines. KB, MB, GB are powers of 1000;
        KiB, MiB, GiB and K, M, G powers of 1024.

        Raises:
            BudgetError: names the value and shows the accepted forms.
        """
        if isinstance(value, Budget):
            return value
        if not isinstance(value, bool):
            if _is_whole(value):
                count = int(value)
                if 0 < count <= MOST_BYTES:
                    return cls(bytes=count)
            elif _is_real(value):
                number = float(value)
                if 0 < number <= 1:
                    return cls(fraction=number)
                if 1 < number <= MOST_BYTES and number.is_integer():
                    return cls(bytes=int(number))
            elif isinstance(value, str):
                match = _PATTERN.fullmatch(value)
                if match:
                    amount, unit = Fraction(match[1]), match[2].lower()
                    if unit == "%" and 0 < amount <= 100:
                        return cls(fraction=float(amount) / 100)
                    if not unit and "." in match[1] and 0 < amount <= 1:
                        return cls(fraction=float(amount))
                    if unit in _UNITS and 1 <= amount * _UNITS[unit] <= MOST_BYTES:
                        return cls(bytes=int(amount * _UNITS[unit]))
        raise BudgetError(
            f"cannot read the budget {reprlib.repr(value)}: give bytes (6442450944), a size with "
            'a unit ("6GiB", "500MB") or a share of the plain peak ("60%", 0.6)'
        )


def whole_bytes(value: Any) -> int | None:
    """A budget where only bytes are taken, not shares or units; None: no limit.

    It may be smaller than any `Budget`, as in a search for the smallest one that can be met.

    Raises:
        BudgetError: if it is neither None nor a whole number; names the value.
    """
    if value is None:
        return None
    if _is_whole(value):
        return index(value)
    if _is_real(value) and abs(value) > 1 and value % 1 == 0:
        return int(value)
    raise BudgetError(
        f"a budget must be a whole number of bytes here, got {reprlib.repr(value)}: "
        "Budget.parse(...).resolve(plain_peak) makes bytes of sizes and shares"
    )


def points_of(points: Any) -> int | list[int]:
    """The budgets of a frontier in bytes, or how many are asked for.

    Raises:
        BudgetError: if fewer than two are asked for, or `points` is neither; names the value.
    """
    if _is_whole(points):
        count = index(points)
        if count < 2:
            raise BudgetError(f"a frontier needs at least 2 points, not {count}")
        return count
    if isinstance(points, str | bytes) or not isinstance(points, Iterable):
        raise BudgetError(
            "a frontier takes the number of its points, or a list of budgets in bytes, "
            f"got {reprlib.repr(points)}"
        )
    budgets = [whole_bytes(budget) for budget in points]
    limits = [budget for budget in budgets if budget is not None]
    if len(limits) < len(budgets):
        raise BudgetError("a point of a frontier needs a budget in bytes, got None")
    return limits


def check_overhead(max_overhead: Any) -> None:
    """Raise BudgetError if `max_overhead` is no share of time."""
    if not _is_number(max_overhead):
        raise BudgetError(
            "max_overhead is a share of the plain step's time, such as 0.1, not "
            f"{reprlib.repr(max_overhead)}"
        )
    if not max_overhead >= 0:
        raise BudgetError(f"max_overhead must be a number of at least 0, not {max_overhead!r}")


def check_price(budget: Any, max_overhead: Any) -> None:
    """Raise BudgetError if `max_overhead` is no share of time, or there is a budget as well."""
    if max_overhead is None:
        return
    if budget is not None:
        raise BudgetError("give either a budget or max_overhead, not both")
    check_overhead(max_overhead)


def check_margin(margin: Any) -> None:
    """Raise BudgetError if `margin` is no share of a budget that may be held back."""
    if not _is_number(margin) or not 0 <= margin < 1:
        raise BudgetError(
            "margin is a share of the budget, from 0 to less than 1, such as 0.03, not "
            f"{reprlib.repr(margin)}"
        )


def _is_whole(value: Any) -> bool:
    """Whether it is an integer of Python, numpy or the like, but no truth value and no array."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    """Whether it is a number with a fraction, of Python, numpy or the like."""
    return _is_number(value) and not _is_whole(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class DeviceBudgets:
    """A budget for each device of a step that runs on several."""

    by_device: Mapping[str, Budget | None]
    """Device ("/device:GPU:1") -> its budget; None: no limit but the device's own."""

    def on(self, device: str) -> Budget | None:
        """The budget of a device. Raises BudgetError if there is none for it."""
        if device not in self.by_device:
            raise BudgetError(
                f"budget= says nothing of device {short_name(device)}, on which a part of the step "
                f"runs: add it (None: no limit) to {', '.join(map(short_name, self.by_device))}"
            )
        return self.by_device[device]


AnyBudget = (
    Budget | DeviceBudgets | Mapping[str, Budget | int | float | str | None] | int | float | str
)
"""What is taken as a budget: one for each device, or a mapping with one per device."""


def parse_budget(value: AnyBudget) -> Budget | DeviceBudgets:
    """Read a budget, or a mapping of devices ("GPU:0") to budgets.

    Raises:
        BudgetError: names the value, or the device, and shows the accepted forms.
    """
    if isinstance(value, DeviceBudgets):
        return value
    if not isinstance(value, Mapping):
        return Budget.parse(value)
    if not value:
        raise BudgetError('budget= names no device: give {"GPU:0": "6GiB", "GPU:1": "80%"}')
    found: dict[str, Budget | None] = {}
    for name, budget in value.items():
        device = device_name(name)
        if device in found:
            raise BudgetError(f"budget= names device {short_name(device)} twice")
        found[device] = None if budget is None else Budget.parse(budget)
    return DeviceBudgets(found)


def device_name(name: str) -> str:
    """The full form ("/device:GPU:1") of "GPU:1", "/gpu:1", "/job:worker/task:0/device:GPU:1".

    Raises:
        BudgetError: if it names no device.
    """
    match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise BudgetError(f'{reprlib.repr(name)} is not the name of a device, such as "GPU:0"')
    return f"/device:{match[1].upper()}:{int(match[2])}"


def short_name(device: str) -> str:
    """ "GPU:1" for "/device:GPU:1"."""
    return device.removeprefix("/device:")


_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-zA-Z_]+):([0-9]+)")


def format_bytes(count: float) -> str:
    """`count` bytes for people: "84.3 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
