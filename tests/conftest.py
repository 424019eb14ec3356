"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="module", autouse=True)
def _leave_no_graphs() -> Iterator[None]:
    """Free what the tests of a module have left in reference cycles: variables, constants."""
    yield
    if "tensorflow" in sys.modules:
        gc.collect()


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
