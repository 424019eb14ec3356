"""What the results of a part depend on beside its tensors: what is around the call, and Keras."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import optckpt
from tests.test_part import QUICK, X, gradients_of, same, stack, weights

pytestmark = pytest.mark.usefixtures("grappler_off")

SMALL = X[:64]


def part_of(fn):
    return optckpt.budgeted(strategy="store_all", config=QUICK)(fn)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("remat", [tf.recompute_grad, keras.remat])
def test_recomputed_by_tensorflow(graph, remat):
    """That calls it first while tapes do not record."""
    ws = weights(2)
    part = part_of(lambda x: stack(x, ws))
    plain = gradients_of(tf.function(lambda x: stack(x, ws)), SMALL, ws, graph)
    same(gradients_of(remat(lambda x: part(x)), SMALL, ws, graph), plain)
    same(gradients_of(part, SMALL, ws, graph), plain)
