import numpy as np
import pytest

from optckpt.budget import Budget, format_bytes
from optckpt.errors import BudgetError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (6442450944, 6442450944),
        (np.int64(5), 5),
        (100.0, 100),
        ("123", 123),
        ("7b", 7),
        ("1kB", 1000),
        ("2 MB", 2_000_000),
        ("6GB", 6 * 10**9),
        (" 1.5 gb ", 1_500_000_000),
        ("1TB", 10**12),
        ("1k", 1024),
        ("3K", 3 * 1024),
        ("4M", 4 << 20),
        ("6GiB", 6 << 30),
        ("0.5GiB", 1 << 29),
        (".5KiB", 512),
        ("6 gib", 6 << 30),
        ("1G", 1 << 30),
        ("1TiB", 1 << 40),
        ("9007199254740993", 2**53 + 1),
        ("8388607.5TiB", (2**24 - 1) << 39),
        (Budget(bytes=9), 9),
    ],
)
def test_sizes(value, expected):
    assert Budget.parse(value) == Budget(bytes=expected)
    assert Budget.parse(value).resolve(1000) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.6, 600),
        (1.0, 1000),
        ("60%", 600),
        ("12.5 %", 125),
        ("100%", 1000),
        ("0.6", 600),
        (".25", 250),
        ("1.0", 1000),
        (Budget(fraction=0.3), 300),
    ],
)
def test_shares_of_the_plain_peak(value, expected):
    budget = Budget.parse(value)
    assert budget.bytes is None
    assert budget.resolve(1000) == expected


@pytest.mark.parametrize(
    "value",
    [
        2**63, 1e300, "8388608TiB",
        0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, False, None, [], {},
        "", "GiB", "6 XB", "6GiB6", "-5MB", "0", "0%", "101%", "0.2b", "1e9", "lots", "5,5GB",
    ],
)  # fmt: skip
def test_everything_else_is_refused(value):
    with pytest.raises(BudgetError) as error:
        Budget.parse(value)
    assert repr(value) in str(error.value)
    assert "6GiB" in str(error.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (88_394_957, "84.3 MiB"),
        (6 << 30, "6.0 GiB"),
        (5 << 40, "5120.0 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    "value", ["9" * 5000, "." + "9" * 5000, "9" * 400, "9" * 400 + "GiB", "9" * 400 + "%", 10**400]
)
def test_long_ones_are_refused_in_short(value):
    with pytest.raises(BudgetError, match="cannot read the budget") as error:
        Budget.parse(value)
    assert len(str(error.value)) < 200
