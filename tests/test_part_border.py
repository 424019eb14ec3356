"""What may not cross the border of a part."""

from __future__ import annotations

import pytest
import tensorflow as tf
from part_support import QUICK, X, same

import optckpt
from optckpt.errors import CaptureError

pytestmark = pytest.mark.usefixtures("grappler_off")

SMALL = X[:64]


def part_of(fn):
    return optckpt.budgeted(strategy="store_all", config=QUICK)(fn)


class TestLists:
    """Their gradients would be lost."""

    def array(self, dtype=tf.float32):
        return tf.TensorArray(dtype, 2, clear_after_read=False).unstack(tf.zeros((2, 64), dtype))

    @pytest.mark.parametrize("graph", [False, True])
    def test_arrays_as_arguments(self, graph):
        part = part_of(lambda x, arrays: x * arrays[0].read(0))

        def run(x):
            return part(x, [self.array()])

        with pytest.raises(CaptureError, match=r"\[0\] of its argument 'arrays' is a TensorArray"):
            (tf.function(run, autograph=False) if graph else run)(SMALL)

    def test_arrays_of_the_function_around(self):
        @tf.function(autograph=False)
        def run(x):
            array = self.array()
            return part_of(lambda x: x * array.read(0))(x)

        with pytest.raises(CaptureError, match=r"to which no gradient.*pass what it holds"):
            run(SMALL)

    @pytest.mark.parametrize("graph", [False, True])
    @pytest.mark.parametrize("where", ["argument", "keyword", "result"])
    def test_variants(self, graph, where):
        def made(x):
            return tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[64])

        def row(handle):
            return tf.raw_ops.TensorListGetItem(
                input_handle=handle, index=0, element_shape=[64], element_dtype=tf.float32
            )

        part = part_of(made if where == "result" else lambda handle: row(handle))

        def run(x):
            if where == "result":
                return row(part(x))
            return part(made(x)) if where == "argument" else part(handle=made(x))

        said = "returned" if where == "result" else "argument 'handle' is"
        with pytest.raises(CaptureError, match=f"{said} a tensor of dtype variant"):
            (tf.function(run, autograph=False) if graph else run)(SMALL)

    def test_lists_without_gradients(self):
        """And those that stay inside."""

        def fn(x, handle):
            at = tf.raw_ops.TensorListGetItem(
                input_handle=handle,
                index=1,
                element_shape=tf.zeros((0,), tf.int32),
                element_dtype=tf.int32,
            )
            array = tf.TensorArray(tf.float32, 2).write(0, tf.sin(x)).write(1, x)
            return array.stack()[at] * x

        def step(fn):
            @tf.function(autograph=False)
            def run(x):
                handle = tf.raw_ops.TensorListFromTensor(
                    tensor=[1, 0], element_shape=tf.zeros((0,), tf.int32)
                )
                return tf.gradients(fn(x, handle), x)

            return run(SMALL)

        same(step(part_of(fn)), step(tf.function(fn)))
