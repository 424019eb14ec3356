"""The cost cache: what was measured once on a device is read back next time.

One SQLite file, one row per signature: key (SHA-256 of the signature), the signature as
readable JSON, seconds, workspace in bytes. Anything that goes wrong with the file costs one
warning and nothing else: measuring goes on, and results are kept for the process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs

logger = logging.getLogger("optckpt.costs.cache")

SCHEMA = 1
FILE_NAME = "costs.sqlite3"
FOLDER_VARIABLE = "OPTCKPT_CACHE_DIR"
_BUSY_SECONDS = 10.0
_CREATE = (
    "CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, signature TEXT NOT NULL, "
    "seconds REAL NOT NULL, workspace INTEGER NOT NULL, measured_at REAL NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one execution."""

    seconds: float
    workspace: int
    """Bytes allocated at the peak of the execution beside inputs and outputs."""


def cache_folder() -> Path:
    """Where the cache lives: `OPTCKPT_CACHE_DIR`, else the user's cache folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else Path(platformdirs.user_cache_dir("optckpt"))


class CostCache:
    """Costs by signature, in `folder` (None: `cache_folder()`), shared between processes.

    Reads and writes never raise: a file that cannot be used is reported in one warning, and
    the object then remembers costs for the life of the process only. A corrupt file is moved
    aside (`costs.sqlite3.corrupt`) and a new one begun.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._path = (cache_folder() if folder is None else Path(folder)) / FILE_NAME
        self._memory: dict[str, Cost] = {}
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._disabled = False
        self._warned = False
        self._lock = threading.RLock()

    @property
    def path(self) -> Path:
        """The SQLite file (it may not exist yet)."""
        return self._path

    def get(self, signature: str) -> Cost | None:
        """The cost stored for `signature`, or None."""
        key = _key(signature)
        with self._lock:
            if key in self._memory:
                return self._memory[key]
            row = self._execute("SELECT seconds, workspace FROM costs WHERE key = ?", (key,))
            if not row:
                return None
            cost = _checked(row[0])
            if cost is None:
                self._warn(f"an entry of the cost cache {self._path} is corrupt; measuring anew")
                return None
            self._memory[key] = cost
            return cost

    def put(self, signature: str, cost: Cost) -> None:
        """Store `cost` for `signature`, replacing what was there."""
        key = _key(signature)
        with self._lock:
            self._memory[key] = cost
            self._execute(
                "INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?)",
                (key, signature, cost.seconds, cost.workspace, time.time()),
            )

    def close(self) -> None:
        """Close the file; the next access opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None

    def _execute(self, sql: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        for attempt in range(2):
            if self._disabled:
                return []
            try:
                return self._open().execute(sql, values).fetchall()
            except sqlite3.DatabaseError as error:
                if _is_corrupt(error) and attempt == 0:
                    self._set_aside()
                elif "locked" in str(error) or "busy" in str(error):
                    # Another process is slow; a miss costs one measurement, so stay enabled.
                    self._warn(f"the cost cache {self._path} is busy; measuring without it")
                    return []
                else:
                    self._disable(error)
            except OSError as error:
                self._disable(error)
        return []

    def _open(self) -> sqlite3.Connection:
        # A connection must not be carried over a fork.
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection, self._pid = self._connect(), os.getpid()
                return self._connection
            except sqlite3.OperationalError as error:
                # SQLite does not wait for the switch to WAL by another process.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _connect(self) -> sqlite3.Connection:
        # Autocommit: each statement is a transaction of its own, as short as can be.
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                connection.execute("DROP TABLE IF EXISTS costs")
            connection.execute(_CREATE)
            if version != SCHEMA:
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_aside(self) -> None:
        self.close()
        aside = self._path.with_name(self._path.name + ".corrupt")
        self._warn(
            f"the cost cache {self._path} is corrupt; moved to {aside.name}, beginning a new one"
        )
        try:
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # Another process was quicker.
        except OSError as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._disabled = True
        self.close()
        self._warn(
            f"the cost cache {self._path} cannot be used ({error}); measuring without it. "
            f"Set {FOLDER_VARIABLE} to a writable folder to keep measurements"
        )

    def _warn(self, message: str) -> None:
        logger.log(logging.DEBUG if self._warned else logging.WARNING, message)
        self._warned = True


def _key(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()


def _checked(row: tuple[object, ...]) -> Cost | None:
    seconds, workspace = row
    if not isinstance(seconds, float) or not isinstance(workspace, int):
        return None
    if not math.isfinite(seconds) or seconds < 0 or workspace < 0:
        return None
    return Cost(seconds, workspace)


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    text = str(error)
    return (
        "not a database" in text
        or "malformed" in text
        or "no such column" in text
        or "no such table" in text
        or "columns but" in text
    )


_default: CostCache | None = None


def default_cache() -> CostCache:
    """The process-wide cache in `cache_folder()`; a new one if that folder has changed."""
    global _default
    if _default is None or _default.path.parent != cache_folder():
        _default = CostCache()
    return _default
