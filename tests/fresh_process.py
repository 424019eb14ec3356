"""Tests that run in a process of their own, as a user's training does.

What the allocator reports depends on all that a process did before: on variables that TensorFlow
never frees, and on how free memory is cut up. A test marked `fresh_process` therefore runs in a
process that is forked from a server which has imported TensorFlow, but made nothing with it. That
takes a fraction of a second where a new interpreter would take several.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

MARKER = "fresh_process"


class PeakError(AssertionError):
    """The allocator's peak, or what is predicted of it, is above the budget.

    In which order threads allocate varies, and of a few MiB a chunk that is cut otherwise is a
    large share. A test that fails with this error, and no other, is run once more.
    """


_IMPORTED = [
    "hypothesis",
    "keras",
    "numba",
    "optckpt",
    "optckpt.solvers.optimal",
    "ortools.linear_solver.pywraplp",
    "ortools.sat.python.cp_model",
    "pytest",
    "tensorflow",
]
_server = multiprocessing.get_context("forkserver")
_within = False


def _own(item: pytest.Item) -> bool:
    """Whether it is to be run in a process of its own; a debugger needs this one."""
    wanted = item.get_closest_marker(MARKER) is not None
    return wanted and not _within and not item.config.getoption("usepdb")


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(_own, session.items)) and not session.config.option.collectonly:
        from multiprocessing.forkserver import ensure_running

        _server.set_forkserver_preload(_IMPORTED)
        ensure_running()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _own(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _run(item)
    if any(_is_of_peak(report) for report in reports):
        reports = _run(item)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What the test before has left set up here for this one.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _run(item: pytest.Item) -> list[pytest.TestReport]:
    ours, theirs = _server.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="optckpt-test-", suffix=".log") as log:
        process = _server.Process(
            target=_child,
            args=(item.nodeid, str(item.config.rootpath), log.name, theirs),
            daemon=False,
        )
        process.start()
        theirs.close()
        reports = []
        try:
            with contextlib.suppress(EOFError):
                while True:
                    data = ours.recv()
                    reports.append(
                        item.config.hook.pytest_report_from_serializable(
                            config=item.config, data=data
                        )
                    )
            process.join()
        finally:
            process.kill()
        if not any(report.when == "teardown" for report in reports):
            reports.append(_died(item, process.exitcode, Path(log.name).read_text()))
    return reports


def _is_of_peak(report: pytest.TestReport) -> bool:
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.failed and crash is not None and PeakError.__name__ in crash.message


def _died(item: pytest.Item, code: int | None, log: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the process of this test ended with exit code {code}:\n{log[-10_000:]}",
        when="call",
    )


class _Reports:
    """Sends the reports of the tests through a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._config: Any = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._connection.send(
            hook.pytest_report_to_serializable(config=self._config, report=report)
        )


def _child(nodeid: str, root: str, log: str, connection: Connection) -> None:
    global _within
    os.chdir(root)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _within = True
    options = ["--rootdir", root, "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([nodeid, *options], plugins=[_Reports(connection)])
    connection.close()
