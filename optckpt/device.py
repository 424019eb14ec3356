"""What the device says of its memory: its limit and what is in use now (bytes)."""

from __future__ import annotations

import os
from pathlib import Path

import tensorflow as tf

from optckpt.allocator import Allocator
from optckpt.frontends.tensorflow import CPU_COUNT_FROM

_MOST_BLOCKS = 4096
"""How finely free chunks are looked for."""


def memory_limit(device: str) -> int:
    """Bytes that the allocator of `device` ("/device:GPU:0") may hand out.

    On a GPU the limit that TensorFlow gave its allocator. On a CPU the environment variable
    TF_MKL_ALLOC_MAX_BYTES where set (TensorFlow's allocator obeys it), else the memory of the
    machine or of its control group.
    """
    if "GPU" in device.upper():
        return _allocator_limit(device)
    limit = os.environ.get("TF_MKL_ALLOC_MAX_BYTES", "")
    if limit.isdigit() and int(limit) > 0:
        return int(limit)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def allocator(device: str, count_from: int, held: tuple[int, ...]) -> Allocator | None:
    """A model of the allocator of `device`, with the blocks `held` (bytes) in use.

    None if `count_from`, from which bytes on a capture counts blocks, is not the device's own:
    then the step is not measured by what the allocator reports.
    """
    if "GPU" in device.upper():
        growing = tf.config.experimental.get_memory_growth(
            tf.config.list_physical_devices("GPU")[0]
        )
        return Allocator(region=0 if growing else _allocator_limit(device), held=held)
    if count_from != CPU_COUNT_FROM or _is_shared(device):
        return None
    return Allocator(smallest=CPU_COUNT_FROM, held=held)


def free_chunks(device: str, smallest: int, wanted: int = 0) -> tuple[int, ...] | None:
    """Bytes of the free chunks of the allocator of `device`, the smallest first; None if unknown.

    They are found by taking blocks of at least `smallest` bytes one after the other: each comes
    from the smallest chunk that is large enough, next to the one before while there is something
    left of that chunk. As much is taken as was in use before, or `wanted` bytes, for which the
    allocator may grow now instead of later (and the device's peak rise); not if its limit is so
    near that it might refuse, for which it would wait. Of the last and largest chunk perhaps only
    the beginning is found, and nothing of what is larger still. Nothing is written to the blocks,
    so that the machine has no memory to give for them. On CPU only.
    """
    if "CPU" not in device.upper() or not smallest:
        return None
    name = device.removeprefix("/device:")
    sizes: list[int] = []
    blocks: list[tf.Tensor] = []
    with tf.init_scope(), tf.device(device):
        if not tf.executing_eagerly():
            return None
        try:
            info = tf.config.experimental.get_memory_info(name)
            used = int(info["current"])
            highest = int(info["peak"])
            room = highest - used
            # Doubling as it grows, it has no more than about twice what was ever in use.
            if 2 * (max(highest, used + wanted)) <= memory_limit(device):
                room = max(room, wanted)
            block = max(smallest, room // _MOST_BLOCKS)
            shape = tf.constant([block])
            end = 0
            while room >= 2 * block:
                blocks.append(tf.raw_ops.Empty(shape=shape, dtype=tf.uint8))
                now = int(tf.config.experimental.get_memory_info(name)["current"])
                size, used = now - used, now
                start = int(blocks[-1]._numpy().__array_interface__["data"][0])
                if sizes and start == end:
                    sizes[-1] += size
                else:
                    sizes.append(size)
                end = start + size
                room -= size
        except (ValueError, tf.errors.ResourceExhaustedError):
            return None
    return tuple(sizes) or None


def _is_shared(device: str) -> bool:
    """Whether there are several logical CPUs: they have one allocator, which tells the sum."""
    return "CPU" in device.upper() and len(tf.config.list_logical_devices("CPU")) > 1


def _allocator_limit(device: str) -> int:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.eager import context

    handle = context.context()
    handle.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(handle._handle)
    wanted = device.lower()
    for i in range(pywrap_tf_session.TF_DeviceListCount(devices)):
        if pywrap_tf_session.TF_DeviceListName(devices, i).lower().endswith(wanted):
            return int(pywrap_tf_session.TF_DeviceListMemoryBytes(devices, i))
    raise ValueError(f"TensorFlow has no device {device!r}")


def memory_info(device: str) -> dict[str, int] | None:
    """Bytes that the allocator of `device` has handed out now ("current") and at most ("peak").

    None where it is not tracked, or serves other devices as well.
    """
    if _is_shared(device):
        return None
    try:
        return dict(tf.config.experimental.get_memory_info(device.removeprefix("/device:")))
    except ValueError:
        return None


def bytes_in_use(device: str) -> int:
    """Bytes that the allocator of `device` has handed out now; 0 where it is not tracked."""
    info = memory_info(device)
    return 0 if info is None else info["current"]
