"""ConvNeXt (Liu et al., CVPR 2022), numerically equal to the authors' and torchvision's code.

Stochastic depth, which regularizes long trainings from scratch and does not affect evaluation, is left out.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.backbones.convolutional import ConvNorm, ConvolutionalBackbone, convolution, run_blocks
from mlmoe_jax.models.backbones.entry import BackboneEntry, torchvision_entry
from mlmoe_jax.models.contracts import Adapter, BackboneShape
from mlmoe_jax.models.layers.dispatch import dot_general
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.layers.transformer import LayerScale, Mlp

NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class ConvNeXtShape(BackboneShape):
    """The architecture of a ConvNeXt."""

    blocks: tuple[int, ...]  # the number of blocks of each stage
    widths: tuple[int, ...]  # the channels of each stage
    layer_scale: float = 1e-6  # the initial value of the layer scales

    @property
    def width(self) -> int:
        return self.widths[-1]

    @property
    def patch(self) -> int:
        return 2 ** (len(self.widths) + 1)

    def build(self, *, batch_norm: str = "frozen", **options: Any) -> ConvNeXt:
        return ConvNeXt(self, **options)

    def norm_macs(self, side: int, prompts: Adapter) -> int:
        grids = [(side // (4 * 2**stage)) ** 2 for stage in range(len(self.widths))]
        # One norm in each block, after the stem, before each downsampling, and on the pooled feature.
        norms = sum(blocks * grid * width for blocks, width, grid in zip(self.blocks, self.widths, grids, strict=True))
        norms += grids[0] * self.widths[0] + self.widths[-1]
        norms += sum(grid * width for grid, width in zip(grids, self.widths[:-1], strict=False))
        return 4 * norms


def _convolution(
    inputs: int, outputs: int, size: int, *, dtype: Dtype, rngs: nnx.Rngs, depthwise: bool = False
) -> nnx.Conv:
    """Return a convolution with stride `size` and no padding; a `depthwise` one keeps the size of the map."""
    place = {"feature_group_count": inputs} if depthwise else {"strides": size, "padding": "VALID"}
    draw = nnx.initializers.truncated_normal(0.02)
    return convolution(inputs, outputs, size, **place, kernel_init=draw, dtype=dtype, rngs=rngs)


class ConvNeXtBlock(nnx.Module):
    """A residual block, x + s·MLP(LN(DW(x))), with a depthwise 7×7 convolution DW (ConvNeXt, figure 4)."""

    def __init__(self, width: int, *, layer_scale: float, dtype: Dtype, rngs: nnx.Rngs):
        self.depthwise = _convolution(width, width, 7, dtype=dtype, rngs=rngs, depthwise=True)
        self.norm = LayerNorm(width, epsilon=NORM_EPSILON, rngs=rngs)
        self.mlp = Mlp(width, 4 * width, linear=partial(nnx.Linear, dot_general=dot_general), dtype=dtype, rngs=rngs)
        self.layer_scale = LayerScale(width, layer_scale)

    def __call__(self, x: Float[ArrayLike, "b h w d"]) -> Float[Array, "b h w d"]:
        return x + self.layer_scale(self.mlp(self.norm(self.depthwise(x))))


class Downsample(nnx.Module):
    """The layers between two stages: LayerNorm, then a 2×2 convolution with stride 2."""

    def __init__(self, inputs: int, outputs: int, *, dtype: Dtype, rngs: nnx.Rngs):
        self.norm = LayerNorm(inputs, epsilon=NORM_EPSILON, rngs=rngs)
        self.conv = _convolution(inputs, outputs, 2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[ArrayLike, "b h w c"]) -> Float[Array, "b h//2 w//2 d"]:
        return self.conv(self.norm(x))


class Stage(nnx.Module):
    """One stage: downsampling (except in the first stage), then the blocks of one resolution."""

    def __init__(self, shape: ConvNeXtShape, index: int, *, dtype: Dtype, rngs: nnx.Rngs):
        width = shape.widths[index]
        self.downsample = Downsample(shape.widths[index - 1], width, dtype=dtype, rngs=rngs) if index else None
        self.blocks = nnx.List(
            ConvNeXtBlock(width, layer_scale=shape.layer_scale, dtype=dtype, rngs=rngs)
            for _ in range(shape.blocks[index])
        )

    def __call__(self, x: Float[ArrayLike, "b _ _ _"], remat: bool) -> Float[Array, "b _ _ d"]:
        if self.downsample is not None:
            x = self.downsample(x)
        return run_blocks(self.blocks, x, remat=remat)


class ConvNeXt(ConvolutionalBackbone):
    """A ConvNeXt without its classifier.

    Stages and blocks are numbered from 0. Parameter paths are such as `stages/2/blocks/5/mlp/fc1/kernel`.
    """

    def __init__(self, shape: ConvNeXtShape, *, dtype: Dtype = None, remat: bool = False, rngs: nnx.Rngs):
        self.shape = shape
        self.remat = remat
        stem_conv = _convolution(3, shape.widths[0], 4, dtype=dtype, rngs=rngs)
        self.stem = ConvNorm(stem_conv, LayerNorm(shape.widths[0], epsilon=NORM_EPSILON, rngs=rngs))
        self.stages = nnx.List(Stage(shape, index, dtype=dtype, rngs=rngs) for index in range(len(shape.widths)))
        self.norm = LayerNorm(shape.width, epsilon=NORM_EPSILON, rngs=rngs)

    def maps(self, image: Float[ArrayLike, "b h w 3"]) -> list[Float[Array, "b _ _ _"]]:
        """Return the feature maps after the stem and after each stage, with strides of 4, 4, 8, 16, … pixels."""
        maps = [self.stem(image)]
        for stage in self.stages:
            maps.append(stage(maps[-1], self.remat))
        return maps

    def last_map(self, image: Float[ArrayLike, "b h w 3"]) -> Float[Array, "b _ _ d"]:
        """Return the feature map after the last stage; with four stages, its size is ⌊H/32⌋ × ⌊W/32⌋.

        The published model applies the final norm only to the mean of the map. Here, `__call__` also applies it to each
        cell, so that heads that read the map have inputs of a suitable scale. Raises ValueError if a side of the images
        is smaller than the stride, 32 pixels with four stages.
        """
        height, width = image.shape[1:3]
        if min(height, width) < self.shape.patch:
            raise ValueError(f"images of {height}×{width} pixels are smaller than the stride {self.shape.patch}")
        return self.maps(image)[-1]


CONVNEXTS: dict[str, BackboneEntry] = {
    f"convnext_{size}": torchvision_entry(ConvNeXtShape(blocks, widths), f"convnext_{size}-{digest}.pth")
    for size, blocks, widths, digest in (
        ("tiny", (3, 3, 9, 3), (96, 192, 384, 768), "983f1562"),
        ("small", (3, 3, 27, 3), (96, 192, 384, 768), "0c510722"),
        ("base", (3, 3, 27, 3), (128, 256, 512, 1024), "6075fbad"),
        ("large", (3, 3, 27, 3), (192, 384, 768, 1536), "ea097f82"),
    )
}
