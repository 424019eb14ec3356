"""The plan cache: plans that were solved once, kept in files and in the memory of the process.

One JSON file per key of what was asked (`Asked.key`), in the folder `plans` beside the cost
cache. It holds the latest few plans: what a step needs depends a little on what the process did
before, and the plan of a first trace may not do for a second. Files are written whole or not at
all; one that is damaged, or not ours, is passed over and replaced by the next plan of that key.
Anything that goes wrong with the folder costs one warning and nothing else: plans are then kept for
the process only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optckpt.costs.cache import FOLDER_VARIABLE, cache_folder
from optckpt.errors import PlanError
from optckpt.fields import NUMBER, OBJECT, TEXT, WHOLE, Reader
from optckpt.schedule import Plan

logger = logging.getLogger("optckpt.plan_cache")

FORMAT = "optckpt.cached-plan"
VERSION = 1
FOLDER = "plans"
ALTERNATIVES = 4
"""Plans kept of one key."""
MOST_PLANS = 500
"""Files kept; those that were not used for longest are deleted."""
MOST_BYTES = 128 << 20
"""Bytes of all files kept."""
_MOST_IN_MEMORY = 64
_ABANDONED = 3600.0
"""Seconds after which an unfinished file is taken to be left behind."""


@dataclass(frozen=True)
class Asked:
    """What a plan was asked for: all that decides what the solver may answer."""

    fields: Mapping[str, Any]
    """JSON-able; the fingerprint of the graph among them."""

    @property
    def key(self) -> str:
        """SHA-256 (hex) of the fields."""
        return hashlib.sha256(_canonical(self.fields).encode()).hexdigest()


@dataclass(frozen=True)
class StoredPlan:
    """A plan and the costs that it was solved with."""

    asked: Asked
    plan: Plan
    seconds: tuple[float, ...]
    """Of each operation, as the graph had it."""
    workspace: tuple[int, ...]
    """Bytes, of each operation."""
    resident: int
    """Bytes of the graph."""
    made_at: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class PlanFile:
    """A file of the cache."""

    path: Path
    size: int
    """Bytes."""
    stored: tuple[StoredPlan, ...]
    """The latest first; none if the file is damaged, of another version or not ours."""


class PlanCache:
    """Plans by what was asked, in `folder` (None: in the memory of the process only).

    Reads and writes never raise. For use by several threads and processes at once.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: OrderedDict[str, tuple[StoredPlan, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._solving: dict[str, tuple[threading.RLock, int]] = {}
        self._warned = False

    @property
    def folder(self) -> Path | None:
        """Where the files are (it may not exist yet); None if plans are not written."""
        return self._folder

    @contextmanager
    def one_at_a_time(self, asked: Asked) -> Iterator[None]:
        """In this process only one thread at a time is in the context of the same key.

        The others wait, and then find what the first has put.
        """
        key = asked.key
        with self._lock:
            lock, users = self._solving.get(key, (threading.RLock(), 0))
            self._solving[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._solving.pop(key)
                if users > 1:
                    self._solving[key] = (lock, users - 1)

    def recall(self, asked: Asked) -> tuple[StoredPlan, ...]:
        """The plans that this process has got or put for what is asked, the latest first."""
        key = asked.key
        with self._lock:
            known = self._memory.get(key, ())
            if known:
                self._memory.move_to_end(key)
            return known

    def get(self, asked: Asked) -> tuple[StoredPlan, ...]:
        """The plans that were stored for what is asked, the latest first."""
        known = self.recall(asked)
        if known:
            return known
        key = asked.key
        path = self._path(key)
        if path is None:
            return ()
        try:
            found = _read(path)
            if any(stored.asked.key != key for stored in found):
                raise PlanError(f"{path} holds the plan of another key")
        except FileNotFoundError:
            return ()
        except PlanError as error:
            self._warn(f"a plan in the plan cache cannot be read and will be replaced: {error}")
            return ()
        except OSError as error:
            self._disable(error)
            return ()
        with suppress(OSError):
            os.utime(path)
        self._remember(key, found)
        return found

    def put(self, stored: StoredPlan) -> None:
        """Store a plan beside the latest others of its key; what is too old goes."""
        key = stored.asked.key
        others = [s for s in self.get(stored.asked) if s.plan.schedule != stored.plan.schedule]
        kept = (stored, *others)[:ALTERNATIVES]
        self._remember(key, kept)
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, to_text(kept))
            _prune(path.parent)
        except OSError as error:
            self._disable(error)

    def forget(self) -> None:
        """Drop what is in memory; the files stay."""
        with self._lock:
            self._memory.clear()

    def _remember(self, key: str, stored: tuple[StoredPlan, ...]) -> None:
        with self._lock:
            self._memory[key] = stored
            self._memory.move_to_end(key)
            while len(self._memory) > _MOST_IN_MEMORY:
                self._memory.popitem(last=False)

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{key}.json"

    def _disable(self, error: OSError) -> None:
        self._warn(
            f"the plan cache {self._folder} cannot be used ({error.strerror or error}); plans are "
            f"kept for this process only. Set {FOLDER_VARIABLE} to a writable folder to keep them"
        )
        self._folder = None

    def _warn(self, message: str) -> None:
        logger.log(logging.DEBUG if self._warned else logging.WARNING, message)
        self._warned = True


def plan_folder(base: Path | None = None) -> Path:
    """The folder of plans in `base` (None: in `optckpt.costs.cache_folder()`)."""
    return (cache_folder() if base is None else base) / FOLDER


def plan_files(folder: Path) -> list[PlanFile]:
    """The files in a folder of plans, the latest used first.

    Raises:
        OSError: if the folder is there but cannot be read.
    """
    found = []
    for path, size, _ in sorted(_entries(folder), key=lambda entry: -entry[2]):
        try:
            stored = _read(path)
        except (PlanError, OSError):
            stored = ()
        found.append(PlanFile(path, size, stored))
    return found


def clear_plans(folder: Path) -> tuple[int, int]:
    """Delete the plans in a folder; returns how many there were and their bytes.

    Raises:
        OSError: if the folder cannot be read, or a file not be deleted.
    """
    count = freed = 0
    for path, size, _ in _entries(folder):
        path.unlink(missing_ok=True)
        count, freed = count + 1, freed + size
    for path in _partial(folder):
        path.unlink(missing_ok=True)
    return count, freed


_caches: dict[Path | None, PlanCache] = {}
_caches_lock = threading.Lock()


def cache_for(setting: bool | str | Path) -> PlanCache:
    """The process-wide cache for the configuration's `plans.cache`.

    True: files in `optckpt.costs.cache_folder()`; False: no files; otherwise the folder to use.
    """
    folder = None if setting is False else plan_folder(None if setting is True else Path(setting))
    with _caches_lock:
        return _caches.setdefault(folder, PlanCache(folder))


# --- Files ---------------------------------------------------------------------------------------

_JSON = Reader("cached plan", PlanError)


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def to_text(plans: Sequence[StoredPlan]) -> str:
    """Plans of one key, at least one, as they stand in a file."""
    content = {
        "asked": dict(plans[0].asked.fields),
        "plans": [
            {
                "made_at": stored.made_at,
                "resident": stored.resident,
                "seconds": list(stored.seconds),
                "workspace": list(stored.workspace),
                "plan": stored.plan.to_json(),
            }
            for stored in plans
        ],
    }
    return _canonical(
        {"format": FORMAT, "version": VERSION, "checksum": _checksum(content), "content": content}
    )


def from_text(text: str) -> tuple[StoredPlan, ...]:
    """Read what `to_text` wrote. Raises PlanError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise PlanError(str(e)) from None
    if not isinstance(data, dict):
        raise PlanError("the top level is not an object")
    _JSON.header(data, FORMAT, VERSION)
    content = _JSON.field(data, "content", OBJECT, "the file")
    if _JSON.field(data, "checksum", TEXT, "the file") != _checksum(content):
        raise PlanError("the checksum is wrong")
    asked = Asked(_JSON.field(content, "asked", OBJECT, "the content"))
    where = "a plan"
    return tuple(
        StoredPlan(
            asked=asked,
            plan=Plan.from_json(_JSON.field(row, "plan", OBJECT, where)),
            seconds=tuple(map(float, _JSON.items(row, "seconds", NUMBER, where))),
            workspace=_JSON.items(row, "workspace", WHOLE, where),
            resident=_JSON.field(row, "resident", WHOLE, where),
            made_at=float(_JSON.field(row, "made_at", NUMBER, where)),
        )
        for row in _JSON.items(content, "plans", OBJECT, "the content")
    )


def _read(path: Path) -> tuple[StoredPlan, ...]:
    """Raises PlanError naming the file, or OSError."""
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, PlanError) as e:
        raise PlanError(f"{path}: {e}") from None


def _write(path: Path, text: str) -> None:
    # Of a name of its own: other processes may be writing the same plan.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    partial = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _entries(folder: Path) -> list[tuple[Path, int, float]]:
    """(path, bytes, last use) of each file of the cache."""
    found = []
    if folder.exists():
        for path in folder.iterdir():
            if path.suffix == ".json" and len(path.stem) == 64:
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((path, status.st_size, status.st_mtime))
    return found


def _partial(folder: Path) -> list[Path]:
    return list(folder.glob(".*.partial")) if folder.exists() else []


def _prune(folder: Path) -> None:
    kept = used = 0
    for path, size, _ in sorted(_entries(folder), key=lambda entry: -entry[2]):
        kept, used = kept + 1, used + size
        # The latest stays, however large.
        if kept > 1 and (kept > MOST_PLANS or used > MOST_BYTES):
            path.unlink(missing_ok=True)
    for path in _partial(folder):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
