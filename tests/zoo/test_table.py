"""The zoo as a whole: enough of it, and `docs/zoo.md` lists it."""

from __future__ import annotations

from pathlib import Path

from zoo.harness import WAYS
from zoo.table import families, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"


def test_the_page_lists_what_is_tested():
    again = "PYTHONPATH=tests python -m zoo.table > docs/zoo.md"
    assert PAGE.read_text(encoding="utf-8") == table(), f"make it again: {again}"


def test_every_way_in_and_no_name_twice():
    rows = [row for family in families() for row in family.rows]
    assert len({row.name for row in rows}) == len(rows) >= 50
    assert {row.way for row in rows} == set(WAYS)
    assert sum(row.repeats for row in rows) >= 45
