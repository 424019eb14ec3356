"""What is asked of the device."""

from __future__ import annotations

import pytest
import tensorflow as tf

from optckpt import device

# What other tests leave in reference cycles may be freed between two looks.
pytestmark = pytest.mark.fresh_process

MIB = 1 << 20
CPU = "/device:CPU:0"


def info() -> dict[str, int]:
    return dict(tf.config.experimental.get_memory_info("CPU:0"))


@pytest.fixture
def room() -> None:
    """The process has had 96 MiB more in use than it has now."""
    blocks = [tf.zeros([8 * MIB], tf.uint8) for _ in range(12)]
    if not info()["peak"]:
        pytest.skip("this build of TensorFlow does not track CPU memory")
    del blocks


@pytest.mark.usefixtures("room")
def test_free_chunks_serve_as_they_say() -> None:
    free = device.free_chunks(CPU, MIB // 4)
    assert free is not None
    assert list(free[:-1]) == sorted(free[:-1])
    assert sum(free) >= 90 * MIB
    # The largest of which all is known serves a request of its size whole.
    known = [size for size in free[:-1] if size == max(free[:-1])]
    before = info()["current"]
    blocks = [tf.zeros([size], tf.uint8) for size in known]
    assert info()["current"] - before == sum(known)
    del blocks


@pytest.mark.usefixtures("room")
def test_looking_for_free_chunks_changes_nothing() -> None:
    before = info()
    first = device.free_chunks(CPU, MIB // 4)
    assert info() == before
    assert device.free_chunks(CPU, MIB // 4) == first


@pytest.mark.usefixtures("room")
def test_wanted_bytes_are_found_whatever_is_known_of_the_past() -> None:
    block = tf.zeros([8 * MIB], tf.uint8)
    tf.config.experimental.reset_memory_stats("CPU:0")
    assert device.free_chunks(CPU, MIB // 4) is None
    used, wanted = info()["current"], 200 * MIB
    free = device.free_chunks(CPU, MIB // 4, wanted)
    assert free is not None
    assert wanted - MIB <= sum(free) <= wanted + MIB
    assert info()["current"] == used
    assert info()["peak"] - used == sum(free)
    del block


@pytest.mark.usefixtures("room")
def test_the_allocator_is_not_made_to_grow_near_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = info()
    found = device.free_chunks(CPU, MIB // 4)
    used, wanted = before["current"], before["peak"] - before["current"] + 64 * MIB
    monkeypatch.setattr(device, "memory_limit", lambda _: 2 * (used + wanted) - 1)
    assert device.free_chunks(CPU, MIB // 4, wanted) == found
    assert info() == before


@pytest.mark.usefixtures("room")
def test_free_chunks_are_found_while_a_function_is_traced() -> None:
    found = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        found.append(device.free_chunks(CPU, MIB // 4))
        return x + 1.0

    step(tf.zeros([]))
    assert found == [device.free_chunks(CPU, MIB // 4)]


def test_free_chunks_of_an_unknown_device_are_unknown() -> None:
    assert device.free_chunks("/device:GPU:0", 256) is None
    with tf.Graph().as_default():
        assert device.free_chunks(CPU, 0) is None


@pytest.mark.usefixtures("room")
def test_what_several_devices_use_together_is_told_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    block = tf.zeros([8 * MIB], tf.uint8)
    assert device.memory_info(CPU) == info()
    assert device.bytes_in_use(CPU) == info()["current"] > 0
    monkeypatch.setattr(device, "_is_shared", lambda _: True)
    assert device.memory_info(CPU) is None
    assert device.bytes_in_use(CPU) == 0
    del block
