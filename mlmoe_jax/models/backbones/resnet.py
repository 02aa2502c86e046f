"""ResNets with bottleneck blocks (He et al., CVPR 2016), numerically equal to torchvision's code (first weights).

As in torchvision, the stride of a stage is in the 3×3 convolution ("v1.5"), and padding is symmetric, unlike XLA's
`SAME` for stride-2 convolutions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.backbones.convolutional import ConvNorm, ConvolutionalBackbone, convolution, run_blocks
from mlmoe_jax.models.backbones.entry import BackboneEntry, torchvision_entry
from mlmoe_jax.models.contracts import BackboneShape
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.layers.dispatch import max_pool, rectify
from mlmoe_jax.models.layers.initializers import Dtype

EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class ResNetShape(BackboneShape):
    """The architecture of a bottleneck ResNet with `blocks` per stage.

    The stem has `stem` output channels. In stage i = 0, 1, …, the 3×3 convolutions have `stem`·2^i output channels, and
    the blocks have EXPANSION·`stem`·2^i.
    """

    blocks: tuple[int, ...]
    stem: int = 64

    any_size = True
    batch_norm_rule = (r"^backbone/(stem|stages/\d+/\d+(/shortcut)?)/norm\d?/(scale|bias)$", False)

    @property
    def width(self) -> int:
        return self.stem * 2 ** (len(self.blocks) - 1) * EXPANSION

    @property
    def patch(self) -> int:
        return 2 ** (len(self.blocks) + 1)

    def build(self, **options: Any) -> ResNet:
        return ResNet(self, **options)


def _convolution(inputs: int, outputs: int, size: int, stride: int, dtype: Dtype, rngs: nnx.Rngs) -> nnx.Conv:
    draw = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    settings = {"strides": stride, "use_bias": False, "kernel_init": draw}
    return convolution(inputs, outputs, size, **settings, dtype=dtype, rngs=rngs)


class Bottleneck(nnx.Module):
    """A bottleneck block, relu(shortcut(x) + F(x)) (ResNet, figure 5).

    F are 1×1, 3×3 and 1×1 convolutions, each with batch normalization, with ReLU between them. The shortcut is the
    identity, or a 1×1 convolution with batch normalization if the shape of x changes.
    """

    def __init__(self, inputs: int, hidden: int, stride: int, *, dtype: Dtype, batch_norm: str, rngs: nnx.Rngs):
        outputs = hidden * EXPANSION
        self.conv1 = _convolution(inputs, hidden, 1, 1, dtype, rngs)
        self.norm1 = BatchNorm(hidden, mode=batch_norm, dtype=dtype)
        self.conv2 = _convolution(hidden, hidden, 3, stride, dtype, rngs)
        self.norm2 = BatchNorm(hidden, mode=batch_norm, dtype=dtype)
        self.conv3 = _convolution(hidden, outputs, 1, 1, dtype, rngs)
        self.norm3 = BatchNorm(outputs, mode=batch_norm, dtype=dtype)
        shortcut = None
        if stride != 1 or inputs != outputs:
            conv = _convolution(inputs, outputs, 1, stride, dtype, rngs)
            shortcut = ConvNorm(conv, BatchNorm(outputs, mode=batch_norm, dtype=dtype))
        self.shortcut = shortcut

    def __call__(self, x: Float[ArrayLike, "b _ _ _"]) -> Float[Array, "b _ _ d"]:
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = jax.nn.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y)) + (x if self.shortcut is None else self.shortcut(x))
        return rectify(y)


class ResNet(ConvolutionalBackbone):
    """A ResNet without its classifier; `batch_norm` is a mode of `BatchNorm`.

    Stages and blocks are numbered from 0. Parameter paths are such as `stages/2/5/conv1/kernel` and
    `stages/0/0/shortcut/norm/scale`. Rules over these paths can freeze stages.
    """

    def __init__(
        self,
        shape: ResNetShape,
        *,
        dtype: Dtype = None,
        batch_norm: str = "frozen",
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        self.remat = remat
        stem_conv = _convolution(3, shape.stem, 7, 2, dtype, rngs)
        self.stem = ConvNorm(stem_conv, BatchNorm(shape.stem, mode=batch_norm, dtype=dtype))
        stages = []
        inputs = shape.stem
        for stage, count in enumerate(shape.blocks):
            hidden = shape.stem * 2**stage
            blocks = []
            for block in range(count):
                stride = 2 if block == 0 and stage > 0 else 1
                blocks.append(Bottleneck(inputs, hidden, stride, dtype=dtype, batch_norm=batch_norm, rngs=rngs))
                inputs = hidden * EXPANSION
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)

    def maps(self, image: Float[ArrayLike, "b h w 3"]) -> list[Float[Array, "b _ _ _"]]:
        """Return the feature maps after the stem and after each stage, with strides of 4, 4, 8, 16, … pixels."""
        x = jax.nn.relu(self.stem(image))
        maps = [max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))]
        for stage in self.stages:
            maps.append(run_blocks(stage, maps[-1], remat=self.remat))
        return maps

    def last_map(self, image: Float[ArrayLike, "b h w 3"]) -> Float[Array, "b _ _ d"]:
        """Return the map after the last stage, with four stages of size ⌈H/32⌉ × ⌈W/32⌉. Images may have any size."""
        return self.maps(image)[-1]


RESNETS: dict[str, BackboneEntry] = {
    "resnet50": torchvision_entry(ResNetShape((3, 4, 6, 3)), "resnet50-0676ba61.pth"),
    "resnet101": torchvision_entry(ResNetShape((3, 4, 23, 3)), "resnet101-5d3b4d8f.pth"),
}
