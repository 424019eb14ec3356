"""Constants among the arguments of a part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf
from part_support import QUICK, X, same

import optckpt

pytestmark = pytest.mark.usefixtures("grappler_off")

SMALL = X[:64]


def part_of(fn):
    return optckpt.budgeted(strategy="store_all", config=QUICK)(fn)


class Opaque:
    """Neither hashed nor copied."""

    __hash__ = None

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __deepcopy__(self, memo):
        raise TypeError


@dataclass
class Options:
    factor: float


class TestConstants:
    """Arguments that are no tensors."""

    @pytest.mark.parametrize(
        ("value", "change", "factor", "traces"),
        [
            ({1}, lambda v: v.add(2), sum, 2),
            (bytearray([1]), lambda v: v.append(2), sum, 2),
            (Options(1.0), lambda v: setattr(v, "factor", 3.0), lambda v: v.factor, 2),
            (Opaque(1.0), lambda v: setattr(v, "factor", 3.0), lambda v: v.factor, 3),
        ],
    )
    def test_changed_in_place(self, value, change, factor, traces):
        plans = []
        part = optckpt.budgeted(strategy="store_all", config=QUICK, on_plan=plans.append)(
            lambda x, v: tf.sin(x) * float(factor(v))
        )
        for _ in range(2):
            same(part(SMALL, value), tf.sin(SMALL))
        change(value)
        same(part(SMALL, value), tf.sin(SMALL) * 3.0)
        assert len(plans) == traces

    def test_floats_that_are_equal_and_differ(self):
        plans = []
        part = optckpt.budgeted(strategy="store_all", config=QUICK, on_plan=plans.append)(
            lambda x, v: tf.sin(x) + tf.atan2(tf.constant(v), -1.0)
        )
        first, second = (part(SMALL, v) for v in (0.0, -0.0))
        tf.debugging.assert_near(first - second, tf.fill(SMALL.shape, 2 * np.pi))
        for _ in range(2):
            part(SMALL, float("nan"))
        assert len(plans) == 3
