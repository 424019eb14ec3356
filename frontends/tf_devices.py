"""Which device the operations of a TensorFlow graph are for."""

from __future__ import annotations

import tensorflow as tf

from optckpt.frontends.tf_ops import default_device_type


class Devices:
    """Bytes written per device, by the operations' device strings."""

    def __init__(self) -> None:
        self._parsed: dict[str, str] = {}
        self._bytes: dict[str, int] = {}

    def of(self, op: tf.Operation) -> str:
        """Where the operation runs: "/device:CPU:0", "/device:GPU:1", ..."""
        text = op.device
        found = self._parsed.get(text)
        if found is None:
            spec = tf.DeviceSpec.from_string(text)
            kind = spec.device_type or default_device_type("")
            self._parsed[text] = found = f"/device:{kind}:{spec.device_index or 0}"
        return found

    def add(self, device: str, size: int) -> None:
        """Count `size` bytes for `device`."""
        self._bytes[device] = self._bytes.get(device, 0) + size

    def main(self) -> str:
        """The device with the most bytes ("/device:CPU:0"), or TensorFlow's default."""
        if not self._bytes:
            return f"/device:{default_device_type('')}:0"
        return max(self._bytes, key=lambda d: self._bytes[d])
