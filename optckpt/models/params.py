"""What is trained, as it stands in a configuration file: a reference network or a function.

Framework-free: reading a configuration does not load TensorFlow.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)


class ModelParams(BaseModel):
    """What every reference network can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    batch_size: int = Field(default=1, ge=1, description="Examples per training step.")
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights and the data.")


class ResnetCifar10(ModelParams):
    """ResNet v2 (pre-activation) for 32x32 colour images: 6 x blocks_per_stage + 2 layers."""

    name: Literal["resnet_cifar10"] = Field(
        default="resnet_cifar10", description="ResNet v2 for CIFAR-10 images."
    )
    batch_size: int = Field(default=64, ge=1, description="Images per training step.")
    blocks_per_stage: int = Field(
        default=12,
        ge=1,
        description="Residual blocks in each of the three stages; 12 make 74 layers.",
    )
    width: int = Field(
        default=16, ge=1, description="Channels of the first stage; doubled at each further stage."
    )
    image_size: int = Field(
        default=32, ge=4, multiple_of=4, description="Height and width of an image, in pixels."
    )
    classes: int = Field(default=10, ge=2, description="Number of classes.")
    weight_decay: float = Field(
        default=2e-4, ge=0, description="Factor of the L2 penalty on all weights; 0: none."
    )


class Vgg16(ModelParams):
    """VGG-16 (13 convolutions, 3 dense layers), without batch normalisation."""

    name: Literal["vgg16"] = Field(default="vgg16", description="VGG-16.")
    batch_size: int = Field(default=16, ge=1, description="Images per training step.")
    image_size: int = Field(
        default=64, ge=32, multiple_of=32, description="Height and width of an image, in pixels."
    )
    width: int = Field(
        default=64, ge=1, description="Channels of the first convolutions; the last have 8 times."
    )
    dense_width: int = Field(default=512, ge=1, description="Units of the two dense layers.")
    classes: int = Field(default=10, ge=2, description="Number of classes.")


class Unet(ModelParams):
    """U-Net for segmentation: contracting and expanding path joined by concatenation."""

    name: Literal["unet"] = Field(default="unet", description="U-Net for segmentation.")
    batch_size: int = Field(default=8, ge=1, description="Images per training step.")
    image_size: int = Field(
        default=64, ge=2, description="Height and width of an image, in pixels."
    )
    width: int = Field(
        default=32, ge=1, description="Channels at full resolution; doubled at each level down."
    )
    levels: int = Field(
        default=4, ge=1, description="Times the resolution is halved; 2^levels divides image_size."
    )
    classes: int = Field(default=4, ge=2, description="Number of classes per pixel.")

    @model_validator(mode="after")
    def _divisible(self) -> Unet:
        if self.image_size % 2**self.levels:
            raise ValueError(
                f"image_size {self.image_size} cannot be halved {self.levels} times; choose a "
                f"multiple of {2**self.levels}"
            )
        return self


class Gpt(ModelParams):
    """Causal transformer (pre-norm) that predicts the next token."""

    name: Literal["gpt"] = Field(default="gpt", description="Causal transformer.")
    batch_size: int = Field(default=8, ge=1, description="Sequences per training step.")
    blocks: int = Field(default=4, ge=1, description="Transformer blocks.")
    width: int = Field(default=256, ge=1, description="Size of a token's representation.")
    heads: int = Field(default=4, ge=1, description="Attention heads; divides width.")
    tokens: int = Field(default=128, ge=1, description="Length of a sequence.")
    vocabulary: int = Field(default=1024, ge=2, description="Number of different tokens.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of activations dropped (stateless random numbers); 0: no dropout.",
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Gpt:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} cannot be split into {self.heads} heads; choose a multiple"
            )
        return self


class MobilenetV2(ModelParams):
    """MobileNetV2: inverted residual blocks around depthwise convolutions."""

    name: Literal["mobilenetv2"] = Field(default="mobilenetv2", description="MobileNetV2.")
    batch_size: int = Field(default=16, ge=1, description="Images per training step.")
    image_size: int = Field(
        default=96, ge=32, multiple_of=32, description="Height and width of an image, in pixels."
    )
    width: float = Field(default=1.0, gt=0, description="Factor on the number of channels.")
    classes: int = Field(default=10, ge=2, description="Number of classes.")


FUNCTION = re.compile(r"(?P<module>[^:]*[^:.\s]):(?P<function>[A-Za-z_][\w.]*)")
"""How a function of the user's own is named: package.module:function, or file.py:function."""


def _check_function(value: Any) -> Any:
    if not isinstance(value, str) or not FUNCTION.fullmatch(value):
        raise ValueError(
            f'expected "module:function" or "file.py:function", got {value!r}; the function is to '
            "return a compiled keras.Model, (model, batch) or (step, inputs)"
        )
    return value


class UserModel(ModelParams):
    """A model or a step of the user's own; see `optckpt.workload` for what the function returns."""

    function: Annotated[str, BeforeValidator(_check_function)] = Field(
        description="Called to make the model or the step: module:function or file.py:function."
    )
    arguments: dict[str, Any] = Field(
        default={}, description="Keyword arguments that the function is called with."
    )
    batch_size: int = Field(
        default=32,
        ge=1,
        description=(
            "Examples per training step: the function's argument batch_size, if it has one, and "
            "the size of the batch that is made for a model without one."
        ),
    )

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.rpartition(":")[2]


def _tag(value: Any) -> Any:
    if isinstance(value, dict):
        return USER if "function" in value else value.get("name")
    return USER if isinstance(value, UserModel) else getattr(value, "name", None)


USER = "function"
"""Stands for `UserModel` among the names of the reference networks."""

AnyModelParams = Annotated[
    Annotated[ResnetCifar10, Tag("resnet_cifar10")]
    | Annotated[Vgg16, Tag("vgg16")]
    | Annotated[Unet, Tag("unet")]
    | Annotated[Gpt, Tag("gpt")]
    | Annotated[MobilenetV2, Tag("mobilenetv2")]
    | Annotated[UserModel, Tag(USER)],
    Discriminator(_tag),
]
"""What is trained: one of the reference networks, told apart by `name`, or a function."""
