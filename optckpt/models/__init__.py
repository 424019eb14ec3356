"""Small reference networks for configurations, tests and benchmarks, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from optckpt.models.params import (
    Gpt,
    MobilenetV2,
    ModelParams,
    ResnetCifar10,
    Unet,
    UserModel,
    Vgg16,
)

if TYPE_CHECKING:
    from optckpt.models.layers import Step

REGISTRY: dict[str, type[ModelParams]] = {
    "resnet_cifar10": ResnetCifar10,
    "vgg16": Vgg16,
    "unet": Unet,
    "gpt": Gpt,
    "mobilenetv2": MobilenetV2,
}
"""The parameters of each network; the module of the same name builds it."""

__all__ = [
    "REGISTRY",
    "Gpt",
    "MobilenetV2",
    "ModelParams",
    "ResnetCifar10",
    "Unet",
    "UserModel",
    "Vgg16",
    "build",
]


def build(params: ModelParams) -> Step:
    """Create the network's variables and one synthetic batch. Loads TensorFlow.

    Equal parameters give equal values in every process. Call `step.loss(*step.inputs)` inside a
    tf.function.
    """
    for name, cls in REGISTRY.items():
        if type(params) is cls:
            step: Step = importlib.import_module(f"optckpt.models.{name}").build(params)
            return step
    raise TypeError(f"not the parameters of a reference network: {params!r}")
