from __future__ import annotations

import json
import logging
import sqlite3
import subprocess
import sys

import pytest

from optckpt.costs import Cost, CostCache, cache_folder, default_cache


@pytest.fixture
def cache(tmp_path):
    cache = CostCache(tmp_path)
    yield cache
    cache.close()


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_was_put_is_read_back_by_another_object(cache, tmp_path):
    cache.put("a", Cost(0.25, 4096))
    cache.put("b", Cost(1e-6, 0))
    cache.put("a", Cost(0.5, 8192))
    other = CostCache(tmp_path)
    assert other.get("a") == Cost(0.5, 8192)
    assert other.get("b") == Cost(1e-6, 0)
    assert other.get("c") is None


def test_the_signature_is_stored_readably_with_a_schema_version(cache):
    signature = json.dumps({"op": "Relu"})
    cache.put(signature, Cost(0.25, 4096))
    with sqlite3.connect(cache.path) as file:
        assert file.execute("SELECT signature, seconds FROM costs").fetchall() == [
            (signature, 0.25)
        ]
        assert file.execute("PRAGMA user_version").fetchone()[0] == 1


def test_another_schema_version_begins_afresh(cache, tmp_path, caplog):
    cache.put("a", Cost(0.25, 0))
    cache.close()
    with sqlite3.connect(cache.path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    other = CostCache(tmp_path)
    assert other.get("a") is None
    other.put("a", Cost(0.5, 0))
    assert CostCache(tmp_path).get("a") == Cost(0.5, 0)
    assert not warnings(caplog)


def test_folder_from_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTCKPT_CACHE_DIR", str(tmp_path / "one"))
    first = default_cache()
    assert first.path.parent == cache_folder() == tmp_path / "one"
    assert default_cache() is first
    monkeypatch.setenv("OPTCKPT_CACHE_DIR", str(tmp_path / "two"))
    assert default_cache().path.parent == tmp_path / "two"
    monkeypatch.delenv("OPTCKPT_CACHE_DIR")
    assert cache_folder().name == "optckpt"


def test_corrupt_file_is_moved_aside_with_one_warning(tmp_path, caplog):
    path = CostCache(tmp_path).path
    path.write_bytes(b"this is no database" * 1000)
    cache = CostCache(tmp_path)
    assert cache.get("a") is None
    cache.put("a", Cost(0.25, 1))
    assert CostCache(tmp_path).get("a") == Cost(0.25, 1)
    assert len(warnings(caplog)) == 1
    assert "corrupt" in warnings(caplog)[0]
    assert (tmp_path / "costs.sqlite3.corrupt").read_bytes().startswith(b"this is no")


def test_file_damaged_in_the_middle_is_survived(tmp_path, caplog):
    cache = CostCache(tmp_path)
    for i in range(400):
        cache.put(f"signature {i} " + "x" * 200, Cost(0.25, i))
    cache._execute("PRAGMA wal_checkpoint(TRUNCATE)", ())
    cache.close()
    data = bytearray(cache.path.read_bytes())
    data[4096:-4096] = b"\xa5" * (len(data) - 8192)
    cache.path.write_bytes(data)
    other = CostCache(tmp_path)
    for i in range(400):
        assert other.get(f"signature {i} " + "x" * 200) in (None, Cost(0.25, i))
    other.put("new", Cost(0.5, 2))
    assert CostCache(tmp_path).get("new") == Cost(0.5, 2)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("seconds", "workspace"), [("fast", 0), (-1.0, 0), (0.1, "big"), (0.1, -5), (1e999, 0)]
)
def test_corrupt_entries_are_ignored_with_one_warning(cache, tmp_path, caplog, seconds, workspace):
    for name in ("a", "b", "c"):
        cache.put(name, Cost(0.25, 1))
    cache.close()
    file = sqlite3.connect(cache.path)
    with file:
        file.execute("UPDATE costs SET seconds = ?, workspace = ?", (seconds, workspace))
        file.execute("UPDATE costs SET seconds = 0.25, workspace = 1 WHERE signature = 'c'")
    file.close()
    other = CostCache(tmp_path)
    assert other.get("a") is None
    assert other.get("b") is None
    assert other.get("c") == Cost(0.25, 1)
    assert len(warnings(caplog)) == 1
    other.put("a", Cost(0.5, 2))
    assert CostCache(tmp_path).get("a") == Cost(0.5, 2)


def test_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(tmp_path / "file" / "folder")
    assert cache.get("a") is None
    cache.put("a", Cost(0.25, 1))
    assert cache.get("a") == Cost(0.25, 1)
    assert cache.get("b") is None
    assert len(warnings(caplog)) == 1
    assert "OPTCKPT_CACHE_DIR" in warnings(caplog)[0]


def test_path_that_is_a_folder_costs_one_warning(tmp_path, caplog):
    (tmp_path / "costs.sqlite3").mkdir()
    cache = CostCache(tmp_path)
    cache.put("a", Cost(0.25, 1))
    assert cache.get("a") == Cost(0.25, 1)
    assert len(warnings(caplog)) == 1


def test_full_disk_costs_one_warning(cache, tmp_path, caplog):
    cache.put("small", Cost(0.25, 1))
    pages = cache._execute("PRAGMA page_count", ())[0][0]
    cache._execute(f"PRAGMA max_page_count = {pages}", ())
    for i in range(3):
        cache.put(f"{i}" * 100_000, Cost(0.5, i))
    assert cache.get("2" * 100_000) == Cost(0.5, 2)
    assert len(warnings(caplog)) == 1
    assert "full" in warnings(caplog)[0]
    assert CostCache(tmp_path).get("small") == Cost(0.25, 1)


_WRITER = """
import logging, sys, time
logging.basicConfig(level=logging.WARNING)
from optckpt.costs import Cost, CostCache
folder, who, start = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
time.sleep(max(0.0, start - time.time()))
cache = CostCache(folder)
for i in range(150):
    cache.put(f"shared {i}", Cost(0.5, i))
    cache.put(f"own {who} {i}", Cost(0.25, i))
    assert CostCache(folder).get(f"shared {i}") == Cost(0.5, i)
"""


def test_two_processes_at_once(tmp_path):
    import time

    start = time.time() + 1.0
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(who), str(start)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for who in (0, 1)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=50)
        assert writer.returncode == 0, errors
        assert errors == ""
    cache = CostCache(tmp_path)
    for i in range(150):
        assert cache.get(f"shared {i}") == Cost(0.5, i)
        assert cache.get(f"own 0 {i}") == cache.get(f"own 1 {i}") == Cost(0.25, i)


def test_the_cache_needs_no_tensorflow():
    code = (
        "import sys, optckpt.costs; optckpt.costs.get('unit'); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
