"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fresh_process import MARKER, pytest_collection_finish, pytest_runtest_protocol

__all__ = ["pytest_collection_finish", "pytest_runtest_protocol"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_configure(config: pytest.Config) -> None:
    # A test run neither reads nor fills the user's cost cache; workers do not share one either.
    if "OPTCKPT_CACHE_DIR" not in os.environ:
        import atexit
        import shutil
        import tempfile

        folder = tempfile.mkdtemp(prefix="optckpt-test-cache-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["OPTCKPT_CACHE_DIR"] = folder
    os.environ.pop("OPTCKPT_CONFIG", None)
    # A run in the background of a shell ignores Ctrl-C, and so would what the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


FRESH = (
    "models/test_loops.py",
    "models/test_memory_model.py",
    "models/test_toolkit_cases.py",
    "test_calibration.py",
    "test_eager.py",
    "test_inline.py",
    "test_keras.py",
    "test_sizes.py",
    "test_step.py",
    "zoo/",
)
"""Files of tests that compare budgets and predictions with what the allocator reports."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.relative_to(folder).as_posix().startswith(FRESH):
            item.add_marker(MARKER)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def grappler_off():
    """Switch TensorFlow's graph optimiser off, so that equal means equal in every bit."""
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
    )
