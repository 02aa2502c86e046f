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
QUARTERS = "quarters"
LABELS = "labels"


@dataclass(frozen=True)
class Prompts:
    """The prompts that an adapter passes to the ViT.

    Attributes:
      tokens: f32[L or 1, 1 or B, P, D]. With a leading axis L (deep prompts), block i receives `tokens[i]`, and its
        output tokens for the prompts are discarded. With a leading axis 1, `carry` must be set: the prompts enter the
        first block and are carried through all blocks.
      mask: bool[P,P] numpy, True if a prompt (row) may attend to a prompt (column); None = all True.
      present: bool[P], False for prompts to which no token may attend; None = all True.
      key_value: f32[L, 1 or 2, m, D], m additional keys and values of each block, appended to the projected keys and
        values. With size 1 on axis 1, the keys are also the values. None = no additional keys.
      carry: f32[L−1], factors c in 0…1. The prompts entering block i+1 are c[i]·(prompts leaving block i) +
        (1 − c[i])·(prompts entering block i). None = deep prompts.
      temperature: f32[L]. The attention logits of block i are divided by `temperature[i]`. None = no division.
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
        return cls(jnp.zeros((blocks, 1, 0, width), jnp.float32))

    @property
    def count(self) -> int:
        """The number of prompts P."""
        return self.tokens.shape[2]

    def entering(self, block: int, entered: jax.Array, left: jax.Array) -> jax.Array:
        """Return the prompts [1 or B, P, D] that enter block `block`, which is not the first.

        `entered` and `left` are the prompts before and after the previous block. Deep prompts do not depend on them.
        """
        if self.carry is None:
            return self.tokens[block]
        gate = self.carry[block - 1]
        return gate * left + (1 - gate) * entered


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """The output of a backbone. Features that the head does not read are None and are not computed.

    Attributes:
      cls: f32[B,D], the image feature of the pretraining. For a ViT with a class token, it is the class token. For a
        ViT without one, it is the output of an attention pool over the patches after the final norm, without prompts
        (also if the backbone is called with norm=False). For a CNN, it is the mean of the feature map.
      prompts: f32[B,P,D], the output tokens for the prompts.
      patches: f32[B,N,D], the output tokens for the patches, row-major over `grid`; for a CNN, the cells of the map.
      grid: (rows, columns) of the patches.
      attention: attention weights by query, keys `cls` and `prompts`; see Prediction. A key exists if
        `return_attention` is set and the head reads this feature.
      mean: f32[B,D], the mean over patches and prompts (if there are prompts), followed by the final norm.
      quarters: f32[B,4,D], `cls` of the quarters of the image, each resized to the size of the image.
      cells: f32[B,N,D] by feature, `cls`, `mean` or `patches`: what the feature would be if a patch were the only one,
        for each patch. The class token then attends to this patch alone in the last block. A key exists if
        `return_attention` is set and the head reads this feature.
    """

    cls: jax.Array | None
    prompts: jax.Array | None
    patches: jax.Array | None
    grid: tuple[int, int] = field(metadata={"static": True})
    attention: dict[str, jax.Array] = field(default_factory=dict)
    mean: jax.Array | None = None
    quarters: jax.Array | None = None
    cells: dict[str, jax.Array] = field(default_factory=dict)

    def arrays(self) -> dict[str, jax.Array]:
        """Return the features that are not None, except prompts, by name. `patches` is [B,rows,columns,D]."""
        pooled = {CLS: self.cls, MEAN: self.mean, QUARTERS: self.quarters}
        arrays = {name: value for name, value in pooled.items() if value is not None}
        if self.patches is not None:
            batch, _, width = self.patches.shape
            arrays[PATCHES] = self.patches.reshape(batch, *self.grid, width)
        return arrays

    def pooled(self) -> jax.Array:
        """Return one vector per image, f32[B,D]: `cls`, `mean`, the mean of `patches`, or the mean of `prompts`.

        It is the first that is available. Raises ValueError if all of them are None.
        """
        if (vector := self.mean if self.cls is None else self.cls) is not None:
            return vector.astype(jnp.float32)
        if (tokens := self.prompts if self.patches is None else self.patches) is None:
            raise ValueError("there are no features")
        return tokens.mean(axis=1).astype(jnp.float32)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, jax.Array]) -> Self:
        """Return the features for arrays as in `Features.arrays`. Other names are ignored.

        Without patches, `grid` is (0, 0).
        """
        patches = arrays.get(PATCHES)
        grid = (0, 0)
        if patches is not None:
            batch, rows, columns, width = patches.shape
            patches, grid = patches.reshape(batch, -1, width), (rows, columns)
        return cls(arrays.get(CLS), None, patches, grid, mean=arrays.get(MEAN), quarters=arrays.get(QUARTERS))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prediction:
    """The output of a model.

    Attributes:
      logits: f32[B,K], the logits of the reported probabilities.
      terms: name -> f32[B,K], additional logits; `config.loss.terms` can give each of them a loss.
      gates: name -> f32[B,K,E], routing weights. Static gates, which do not depend on the image, are f32[1,K,E].
      penalties: name -> f32[B], values per image that are added to the loss.
      attention: name -> f32[B,Q,N], attention weights of Q queries over the N patches, averaged over heads. Empty
        unless `return_attention` is set. Possible keys:
        `cls` (Q = 1): the class token in the last block; without a class token, the query of the attention pool. Set
        if the head reads `cls`.
        `prompts` (Q = P): the prompts in the last block. Set if the head reads `prompts`.
        `labels` (Q = K): the label queries in the last layer of a query decoder, ADD-GCN's attention over the map, or
        the prompts of the groups of a label, weighted by its gates. Set if the head has attention.
        Rows are not renormalized over the patches. A row sums to 1 minus the weights of other tokens (class token,
        registers, prompts).
      grid: (rows, columns) of the patches, row-major. Set only with `return_attention`.
      features: f32[B,D], see `Features.pooled`. Set only with `return_attention`.
      map: f32[B,K,rows,columns], where a label is: the attention of `labels`, or without it the class activation, the
        logits of the head for `Features.cells` (Zhou et al., CVPR 2016, for a linear classifier of a CNN). Set only
        with `return_attention`, unless the head reads prompts without attention, or quarters.
    """

    logits: jax.Array
    terms: dict[str, jax.Array] = field(default_factory=dict)
    gates: dict[str, jax.Array] = field(default_factory=dict)
    penalties: dict[str, jax.Array] = field(default_factory=dict)
    attention: dict[str, jax.Array] = field(default_factory=dict)
    grid: tuple[int, int] | None = field(default=None, metadata={"static": True})
    features: jax.Array | None = None
    map: jax.Array | None = None
