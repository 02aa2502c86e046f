"""What text towers have in common: tables of tokens and positions, pre-norm blocks, and a pooled vector per text."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.layers.transformer import Block

TOKEN_TABLE = "token_embed"  # the parameter f32[V,D], a row per token of the vocabulary


@dataclass(frozen=True)
class TextShape:
    """The architecture of a text tower."""

    tower: type[TextTower]
    width: int  # D
    depth: int
    heads: int
    hidden: int  # hidden width of the MLPs
    length: int  # the most tokens of a text, start, end and padding included
    vocabulary: int  # V, the number of rows of the table of tokens
    mlp: str  # a key of layers.transformer.MLPS
    eps: float  # epsilon of LayerNorm
    output: int  # E, the width of the vectors of texts
    # W, the width of the feature of the backbone, which is projected to E; None: it is compared as it is
    image_width: int | None = None

    def build(self, *, dtype: Dtype = None, rngs: nnx.Rngs) -> TextTower:
        """Build the tower with random weights."""
        return self.tower(self, dtype=dtype, rngs=rngs)


class Similarity(nnx.Module):
    """The parameters with which a family compares an image with a text: scale · cos(P·image, text) + bias.

    They belong to neither tower, and are stored beside both. P maps the pooled feature f32[W] of the backbone to the
    space of text vectors f32[E]. `projection` is its shape (W, E); None = no P. If `bias` is False, the bias is 0.
    """

    def __init__(self, *, bias: bool, projection: tuple[int, int] | None = None):
        self.scale = nnx.Param(jnp.ones(()))
        self.bias = nnx.Param(jnp.zeros(())) if bias else None
        self.projection = None if projection is None else nnx.Param(jnp.zeros(projection))


class TextTower(nnx.Module):
    """A transformer over the tokens of a text. Subclasses say which tokens attend to which, and how they are pooled."""

    has_bias = False  # of similarities
    projection_bias: bool | None = None  # of the last layer; None = there is none

    def __init__(self, shape: TextShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.shape = shape
        projection = None if shape.image_width is None else (shape.image_width, shape.output)
        self.similarity = Similarity(bias=self.has_bias, projection=projection)
        normal = nnx.initializers.truncated_normal(0.02)
        self.token_embed = nnx.Param(normal(rngs.params(), (shape.vocabulary, shape.width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (shape.length, shape.width)))
        options = {"mlp": shape.mlp, "eps": shape.eps, "layer_scale": None, "dtype": dtype, "rngs": rngs}
        self.blocks = nnx.List(Block(shape.width, shape.heads, shape.hidden, **options) for _ in range(shape.depth))
        self.norm = LayerNorm(shape.width, epsilon=shape.eps, rngs=rngs)
        if self.projection_bias is not None:
            settings = {"use_bias": self.projection_bias, "dtype": dtype, "rngs": rngs}
            self.proj = nnx.Linear(shape.width, shape.output, **settings)

    def __call__(self, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        """Return a vector f32[n,E] per text, not normalized, for rows i32[n,t] of the table of tokens.

        t is at most the length of the shape; `valid` is bool[n,t], False for padding.
        """
        embedded = self.embed(tokens, valid)
        mask = self.mask(valid)
        for block in self.blocks:
            embedded = block(embedded, mask=mask)
        return self.pool(self.norm(embedded), tokens, valid)

    def embed(self, tokens: jax.Array, valid: jax.Array) -> jax.Array:
        """Return the input f32[n,t,D] of the first block."""
        return self.token_embed[tokens] + self.pos_embed[: tokens.shape[1]]

    def mask(self, valid: jax.Array) -> np.ndarray | jax.Array | None:
        """Return which tokens (rows) may attend to which (columns), a mask of `layers.dispatch.attend`; None = all."""
        raise NotImplementedError

    def pool(self, tokens: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
        """Return a vector f32[n,E] per text.

        Args:
          tokens: the output f32[n,t,D] of the last block, after `norm`.
          ids: the rows i32[n,t] of the table of tokens, which are the input of the tower.
          valid: bool[n,t], False for padding.
        """
        raise NotImplementedError
