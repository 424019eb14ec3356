"""Distributed training: the workers of a run agree on the chief's plan.

Under tf.distribute.MultiWorkerMirroredStrategy each worker is a process that traces the step for
itself. They meet in the key-value store of TensorFlow's coordination service, which the strategy
starts; it can be used while a function is traced, where no collective operation can run.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

logger = logging.getLogger("optckpt.distribute")

PATIENCE = 60.0
"""Seconds for which the chief is given time to come to the step that a worker is to plan."""
_POLL = 0.5
"""Seconds of one look; in between Ctrl-C is heard."""
_PREFIX = "optckpt/plans"


@dataclass(frozen=True)
class Workers:
    """The workers of a run, as one of them sees them."""

    is_chief: bool

    @contextmanager
    def publishing(self, key: str) -> Iterator[Callable[[str], None]]:
        """For the chief, around the planning of what `key` stands for.

        Yields the function that hands the plan's text to the others. If it was not called when the
        context ends, they are told so and plan for themselves. What is published once stays.
        """
        _put(f"{_PREFIX}/{key}/begun", "yes")
        published = False

        def publish(text: str) -> None:
            nonlocal published
            packed = base64.b64encode(zlib.compress(text.encode())).decode("ascii")
            published = _put(f"{_PREFIX}/{key}/plan", packed)

        try:
            yield publish
        finally:
            if not published:
                _put(f"{_PREFIX}/{key}/plan", "")

    def receive(self, key: str, seconds: float) -> str | None:
        """For the others: the text that the chief publishes for `key`.

        Waits PATIENCE for the chief to begin with it, and then `seconds` for it to be done. None
        if it does not come to it, or has no plan.
        """
        if _get(f"{_PREFIX}/{key}/begun", PATIENCE) is None:
            logger.warning(
                "the chief has not come to plan this step within %.0f s: this worker plans for "
                "itself, and its plan may be another one",
                PATIENCE,
            )
            return None
        packed = _get(f"{_PREFIX}/{key}/plan", seconds)
        if not packed:
            logger.warning(
                "the chief %s: this worker plans for itself",
                "has no plan for this step"
                if packed == ""
                else f"has not planned this step within {seconds:.0f} s",
            )
            return None
        try:
            return zlib.decompress(base64.b64decode(packed, validate=True)).decode()
        except (binascii.Error, zlib.error, UnicodeDecodeError) as e:
            logger.warning("the chief's plan cannot be read (%s); this worker plans for itself", e)
            return None


def workers() -> Workers | None:
    """The workers of the distribution strategy that is in use here; None if there is but one.

    Also None, with a line in the log, if they have no coordination service to meet in.
    """
    if not is_worker():
        return None
    resolver = tf.distribute.get_strategy().cluster_resolver
    cluster = resolver.cluster_spec()
    if context.context().coordination_service is None:
        logger.warning(
            "TensorFlow's coordination service is off, so that each worker plans for itself; the "
            "plans are the same where the measured costs are"
        )
        return None
    return Workers(multi_worker_util.is_chief(cluster, resolver.task_type, resolver.task_id))


def is_worker() -> bool:
    """Whether other processes take part in each step under the strategy that is in use here."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    resolver = strategy.cluster_resolver
    count: int = multi_worker_util.worker_count(resolver.cluster_spec(), resolver.task_type)
    return count > 1


def _put(key: str, value: str) -> bool:
    try:
        context.context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        pass
    except tf.errors.OpError as e:
        logger.warning(
            "the coordination service does not take the plan (%s); the other workers plan for "
            "themselves",
            e.message,
        )
        return False
    return True


def _get(key: str, seconds: float) -> str | None:
    """The value of `key`, waiting for it; None if it does not come."""
    end = time.monotonic() + seconds
    while True:
        try:
            return str(context.context().get_config_key_value(key, int(1000 * _POLL)))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            if time.monotonic() > end:
                return None
        except tf.errors.OpError as e:
            logger.warning("the coordination service does not answer (%s)", e.message)
            return None
