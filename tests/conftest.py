"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

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


MODELS_MADE_BY_EACH_TEST = (
    "test_keras.py",
    "test_eager.py",
    "test_step.py",
    "test_toolkit_cases.py",
)


def _variables() -> list[Any]:
    if "tensorflow" not in sys.modules:
        return []
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    # By type: some lazy objects do much when asked what they are.
    return [o for o in gc.get_objects() if issubclass(type(o), BaseResourceVariable)]


@contextlib.contextmanager
def no_memory_left() -> Iterator[None]:
    """Free the memory of the variables that are made within the context.

    TensorFlow keeps functions that use Keras' optimizers for good, and with them all variables;
    budgets of later tests are shares of what is in memory then.
    """
    before = {id(v) for v in _variables()}
    yield
    gc.collect()
    for variable in _variables():
        handle = getattr(variable, "_handle", None)
        if id(variable) not in before and hasattr(handle, "numpy"):
            import tensorflow as tf

            with tf.init_scope():
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


@pytest.fixture(scope="module", autouse=True)
def _leave_no_memory() -> Iterator[None]:
    with no_memory_left():
        yield


@pytest.fixture(autouse=True)
def _leave_no_memory_of_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where each test makes a model of its own, also between tests."""
    path = request.node.path
    with (
        no_memory_left()
        if path.name in MODELS_MADE_BY_EACH_TEST or path.parent.name == "zoo"
        else contextlib.nullcontext()
    ):
        yield


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
