"""The outputs of backbones, adapters and heads.

Shape letters: B batch, N patch tokens, D width, L blocks, P prompts per block, K labels, E entries of a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

CLS, PROMPTS, PATCHES, MEAN = "cls", "prompts", "patches", "mean"
LABELS = "labels"


@dataclass(frozen=True)
class Prompts:
    """The prompts that an adapter passes to the ViT.

    Attributes:
      tokens: f32[L or 1, 1 or B, P, D]. With L sets, block i uses `tokens[i]` and discards it afterwards (deep
        prompts). With one set and `carry`, the prompts enter the first block and are carried through all blocks.
      mask: bool[P,P] numpy, True if a prompt (row) may attend to a prompt (column); None = all True.
      present: bool[P]; absent prompts are masked out for all tokens; None = all True.
      key_value: f32[L, 1 or 2, m, D], additional keys and values of each block, added after the projection; with 1, the
        keys are also the values.
      carry: f32[L−1] in 0…1. The prompts entering block i+1 are c·(prompts leaving block i) + (1 − c)·(prompts entering
        block i).
      temperature: f32[L], divides the attention logits of each block.
    """

    tokens: jax.Array
    mask: np.ndarray | None = None
    present: jax.Array | None = None
    key_value: jax.Array | None = None
    carry: jax.Array | None = None
    temperature: jax.Array | None = None

    @classmethod
    def none(cls, blocks: int, width: int) -> Self:
        """Return P = 0 prompts for L = `blocks` blocks and D = `width`."""
        return cls(np.zeros((blocks, 1, 0, width), np.float32))

    @property
    def count(self) -> int:
        """The number of prompts P."""
        return self.tokens.shape[2]

    def entering(self, block: int, entered: jax.Array, left: jax.Array | None) -> jax.Array:
        """Return the prompts [1 or B, P, D] that enter a block after the first.

        Args:
          block: number of the block, from 1.
          entered: the prompts that entered the block before it.
          left: the prompts that left the block before it; deep prompts don't need them.
        """
        if self.carry is None:
            return self.tokens[block]
        gate = self.carry[block - 1]
        return gate * left + (1 - gate) * entered


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """The output of a backbone. Fields that the head does not read are None and are not computed.

    Attributes:
      cls: f32[B,D], the summary of the image in the pretraining: the class token, the output of an attention pool over
        the normalized patches (without prompts, for any `norm`), or the mean of the feature map of a CNN.
      prompts: f32[B,P,D].
      patches: f32[B,N,D], row-major over `grid`.
      grid: (rows, columns) of the patches.
      attention: attention weights of `cls` and `prompts`, if they are read and `return_attention` is set; see
        Prediction.
      mean: f32[B,D], the mean over prompts (if any) and patches, followed by the final norm.
    """

    cls: jax.Array | None
    prompts: jax.Array | None
    patches: jax.Array | None
    grid: tuple[int, int] = field(metadata={"static": True})
    attention: dict[str, jax.Array] = field(default_factory=dict)
    mean: jax.Array | None = None

    def arrays(self) -> dict[str, jax.Array]:
        """Return the present features except prompts: `cls` and `mean` [B,D], `patches` [B,h,w,D]."""
        arrays = {name: value for name, value in ((CLS, self.cls), (MEAN, self.mean)) if value is not None}
        if self.patches is not None:
            batch, _, width = self.patches.shape
            arrays[PATCHES] = self.patches.reshape(batch, *self.grid, width)
        return arrays

    def pooled(self) -> jax.Array:
        """Return one vector per image, f32[B,D]: `cls` or `mean`, else the mean of the patches, else of the prompts."""
        if (vector := self.mean if self.cls is None else self.cls) is not None:
            return vector.astype(jnp.float32)
        if (tokens := self.prompts if self.patches is None else self.patches) is None:
            raise ValueError("there are no features")
        return tokens.mean(axis=1).astype(jnp.float32)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, jax.Array]) -> Self:
        """Return the features of `arrays`. Other entries are ignored, and the grid is (0, 0) without patches."""
        patches = arrays.get(PATCHES)
        grid = (0, 0)
        if patches is not None:
            batch, rows, columns, width = patches.shape
            patches, grid = patches.reshape(batch, -1, width), (rows, columns)
        return cls(arrays.get(CLS), None, patches, grid, mean=arrays.get(MEAN))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prediction:
    """The output of a model.

    Attributes:
      logits: f32[B,K], the logit of the reported probability.
      terms: name -> additional logits f32[B,K] with their own loss.
      gates: name -> routing weights f32[B,K,E] (static gates: f32[1,K,E]).
      penalties: name -> f32[B], values per image that are added to the loss.
      attention: attention weights f32[B,Q,N] over the N patches, averaged over heads; only with `return_attention`.
        `cls` (Q = 1) and `prompts` (Q = P) are queries of the last block of the backbone, present if the head reads
        them; without a class token, `cls` is the query of the attention pool. `labels` (Q = K) are the label queries in
        the last layer of a decoder, or ADD-GCN's attention over the map. Rows are not renormalized over the patches: a
        row sums to 1 minus the weights of other tokens (class token, registers, prompts).
      grid: (rows, columns) of the patches, row-major, with `attention`.
    """

    logits: jax.Array
    terms: dict[str, jax.Array] = field(default_factory=dict)
    gates: dict[str, jax.Array] = field(default_factory=dict)
    penalties: dict[str, jax.Array] = field(default_factory=dict)
    attention: dict[str, jax.Array] = field(default_factory=dict)
    grid: tuple[int, int] | None = field(default=None, metadata={"static": True})
