"""Learned queries that read an image's tokens through a transformer encoder and decoder.

Q2L, ML-Decoder, HSQ and DR-MoE share it in one form or another. Shape letters beside those of `contracts`: Q query
tokens (K where each label has its own), T memory tokens, C channels of the backbone, E memory tokens beyond patches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import PATCHES, Features
from mlmoe_jax.models.layers.activations import ACTIVATIONS
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.layers.detr import EPSILON, INITS, DecoderLayer, EncoderLayer
from mlmoe_jax.models.layers.initializers import torch_linear
from mlmoe_jax.models.layers.positions import detr_positions, resample_positions
from mlmoe_jax.models.layers.transformer import layer_norm

QUERY_ROLES = ("input", "added")
POSITIONS = ("none", "once", "detr", "learned")
SELF_ATTENTION = ("all", "first", "others", "none", "identity")
PROJECTIONS = ("linear", "linear_relu", "none")
# To stand before the trainable rules if queries are fixed: they are counted, and nothing may move them.
FIXED_QUERIES = (r"^head/decoder/queries$", False)


def decoder_settings(settings: ConfigDict, channels: int) -> dict[str, Any]:
    """Return the arguments of a QueryDecoder that `config.model.head.decoder` stands for on C = `channels`."""
    given = {key: value for key, value in settings.items() if key != "queries"}
    given["width"] = settings.width or channels
    if settings.project == "auto":
        given["project"] = "none" if given["width"] == channels else "linear"
    return given


def fixed_queries(settings: ConfigDict) -> tuple[tuple[str, bool], ...]:
    """Return the rules that `config.model.head.decoder` puts before those of `config.trainable`."""
    return (FIXED_QUERIES,) if settings.fixed_queries else ()


class QueryDecoder(nnx.Module):
    """Image tokens f32[B,N,C] -> one feature a query f32[B,Q,D], by an encoder of patches and a decoder of queries.

    The defaults are what DR-MoE says (sec. 3: D = 512, two and two layers, eight heads) and what torch.nn.Transformer
    does where the paper is silent: post-norm, ReLU, hidden layers of 2048, dropout 0.1, one norm after the decoder.
    Q2L and ML-Decoder are settings of it (`heads.query`).

    channels: C. num_queries: Q, K where each label has its own. width: D. hidden: of the feed-forward layers.
    query_role: `input` feeds the learned queries into the first decoder layer; `added` starts from zeros and adds them
        to what asks (and to the keys of self-attention) in every layer, as DETR and Q2L do.
    fixed_queries: the queries stay at their initial values; no gradient reaches them. Put `FIXED_QUERIES` before
        the trainable rules as well: weight decay needs no gradient.
    query_std: standard deviation of the queries' normal initial values.
    positions: of patches. `once` adds sines to the encoder's input; `detr` adds them to what asks and answers in every
        encoder layer, and to the keys of the decoder; `learned` is `once` with a learned table of `table_side` rows and
        columns, resampled to the grid; `none`.
    self_attention: which decoder layers let queries see one another: `all`, `first`, `others` (all but the first),
        `none`; `identity` puts the queries themselves in the place of its result, LN(x + dropout(x)), as ML-Decoder
        does. Without it nothing has the size Q×Q.
    pre_norm: norms before the parts of a layer instead of after them.
    encoder_norm, decoder_norm: a norm after the last layer; None = as DETR: after the encoder only with pre_norm.
    project: from C to D. `linear`, `linear_relu`, or `none`, which needs C = D.
    init: of matrices. `xavier` (DETR, Q2L) or `torch`, the default values of PyTorch's layers (ML-Decoder).
    dtype: of the matrix products; None = float32. Norms, softmax and sums stay in float32.
    Raises UserError for sizes that do not fit together.
    """

    read = (PATCHES,)

    def __init__(
        self,
        channels: int,
        num_queries: int,
        *,
        width: int = 512,
        heads: int = 8,
        hidden: int = 2048,
        encoder_layers: int = 2,
        decoder_layers: int = 2,
        self_attention: str = "all",
        query_role: str = "input",
        fixed_queries: bool = False,
        query_std: float = 1.0,
        positions: str = "once",
        table_side: int = 14,
        pre_norm: bool = False,
        encoder_norm: bool | None = None,
        decoder_norm: bool = True,
        activation: str = "relu",
        dropout: float = 0.1,
        project: str = "linear",
        init: str = "xavier",
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        _check_choices(query_role, positions, self_attention, project, init, activation)
        _check_sizes(channels, width, heads, decoder_layers, positions, project)
        self.width, self.query_role, self.positions = width, query_role, positions
        self.fixed_queries, self.project_relu = fixed_queries, project == "linear_relu"
        self.hidden, self.num_queries = hidden, num_queries
        into = torch_linear(channels)
        self.project = (
            nnx.Linear(channels, width, kernel_init=into, bias_init=into, dtype=dtype, rngs=rngs)
            if project != "none"
            else None
        )
        self.queries = nnx.Param(nnx.initializers.normal(query_std)(rngs.params(), (num_queries, width)))
        if positions == "learned":
            table = nnx.initializers.normal(0.02)(rngs.params(), (1, table_side**2, width))
            self.table = nnx.Param(table)
        shared = {"pre_norm": pre_norm, "activation": activation, "dropout": dropout, "init": init}
        shared |= {"dtype": dtype, "rngs": rngs}
        self.encoder = nnx.List(EncoderLayer(width, heads, hidden, **shared) for _ in range(encoder_layers))
        normed = pre_norm if encoder_norm is None else encoder_norm
        self.encoder_norm = layer_norm(width, EPSILON, rngs) if normed and encoder_layers else None
        self.layers = nnx.List(
            DecoderLayer(width, heads, hidden, self_attention=_self_attention(self_attention, layer), **shared)
            for layer in range(decoder_layers)
        )
        self.norm = layer_norm(width, EPSILON, rngs) if decoder_norm else None

    def __call__(
        self,
        features: Features,
        *,
        extra: jax.Array | None = None,
        extra_mask: np.ndarray | Constant | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Return the features f32[B,Q,D] of all queries for `features.patches` f32[B,N,C].

        extra: memory tokens beyond the patches, f32[B or 1,E,C]. They are projected as patches are, have no position,
        and pass no encoder layer, through which they would show in every patch. extra_mask: bool[Q,E], True where a
        query may see a token; None = everywhere. Every query sees all patches. rngs: for dropout in training.
        """
        memory, positions, mask = self._memory(features, extra, extra_mask, rngs)
        return self.decode(memory, positions, mask=mask, rngs=rngs)

    def attention(
        self, features: Features, *, extra: jax.Array | None = None, extra_mask: np.ndarray | Constant | None = None
    ) -> jax.Array:
        """Return how much each query looks at each patch in the last layer, the mean over heads: f32[B,Q,N].

        The arguments are those of a call, of a decoder without dropout. A row sums to 1 less what goes to `extra`.
        """
        memory, positions, mask = self._memory(features, extra, extra_mask, None)
        tokens, added, keys = self._start(memory, positions)
        for layer in self.layers[:-1]:
            tokens = layer(tokens, added, memory, keys, mask=mask)
        weights = self.layers[-1].weights(tokens, added, keys, mask=mask)
        return weights.mean(axis=1)[..., : features.patches.shape[1]]

    def _memory(
        self,
        features: Features,
        extra: jax.Array | None,
        extra_mask: np.ndarray | Constant | None,
        rngs: nnx.Rngs | None,
    ) -> tuple[jax.Array, jax.Array | None, np.ndarray | None]:
        """Return memory f32[B,T,D], positions and mask as `decode` takes them, of the arguments of a call."""
        memory, positions = self.encode(features.patches, features.grid, rngs=rngs)
        if extra is None:
            return partition.gathered(memory), positions, None
        patches, extra = memory.shape[1], self._projected(extra)
        extra = jnp.broadcast_to(extra, (memory.shape[0], *extra.shape[1:]))
        memory = jnp.concatenate([memory, extra], axis=1)
        if positions is not None:
            positions = jnp.pad(positions, ((0, 0), (0, extra.shape[1]), (0, 0)))
        mask = _array(extra_mask)
        if mask is not None:
            mask = np.concatenate([np.ones((mask.shape[0], patches), bool), mask], axis=1)
        return partition.gathered(memory), positions, mask

    def encode(
        self, tokens: jax.Array, grid: tuple[int, int], *, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the memory f32[B,N,D] for patch tokens f32[B,N,C], row-major over `grid`, and what `decode` wants.

        The second value is f32[1,N,D], the positions to be added to the decoder's keys, or None if there are none.
        """
        tokens, table = self._projected(tokens), self._positions(grid)
        everywhere = table if self.positions == "detr" else None
        if table is not None and everywhere is None:
            tokens = tokens + table
        for layer in self.encoder:
            tokens = layer(tokens, everywhere, rngs=rngs)
        return tokens if self.encoder_norm is None else self.encoder_norm(tokens), everywhere

    def decode(
        self,
        memory: jax.Array,
        positions: jax.Array | None = None,
        *,
        mask: np.ndarray | Constant | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Return the features f32[B,Q,D] that the queries read from memory tokens f32[B,T,D].

        positions: f32[1 or B,T,D], added to the keys; None = nothing. mask: bool[Q,T], True where a query may see a
        token; None = everywhere. Raises ValueError for a mask that is not of this shape or hides everything from a
        query.
        """
        mask = _checked_mask(_array(mask), self.num_queries, memory.shape[1])
        tokens, added, keys = self._start(memory, positions)
        for layer in self.layers:
            tokens = layer(tokens, added, memory, keys, mask=mask, rngs=rngs)
        return tokens if self.norm is None else self.norm(tokens)

    def _start(self, memory: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Return what the first layer gets: queries, what is added to them or None, and the keys of the memory."""
        queries = self.queries[...][None]
        if self.fixed_queries:
            queries = jax.lax.stop_gradient(queries)
        tokens, added = (queries, None) if self.query_role == "input" else (jnp.zeros_like(queries), queries)
        drop = self.layers[0].dropout
        if drop.rate and not drop.deterministic:
            # Dropout differs between images; without it everything before the first look at one is done once.
            tokens = jnp.broadcast_to(tokens, (memory.shape[0], *tokens.shape[1:]))
        return tokens, added, memory if positions is None else memory + positions

    def published_macs(self, tokens: int, extra: int = 0) -> tuple[int, int]:
        """Return the multiply-adds for an image with N = `tokens` patches and E = `extra` further memory tokens.

        First those of linear layers and 4·tokens·D for each norm, then those of the attention products.
        """
        width, queries, memory = self.width, self.num_queries, tokens + extra
        square, feed = width**2, 2 * width * self.hidden
        layers = 0 if self.project is None else memory * self.project.kernel.size
        layers += len(self.encoder) * tokens * (4 * square + feed + 8 * width)
        products = len(self.encoder) * 2 * tokens**2 * width
        for layer in self.layers:
            layers += queries * (2 * square + feed + 8 * width) + memory * 2 * square
            products += 2 * queries * memory * width
            if layer.norm1 is not None:
                layers += 4 * queries * width
            if layer.self_attn is not None:
                layers += 4 * queries * square
                products += 2 * queries**2 * width
        layers += 4 * width * ((self.encoder_norm is not None) * tokens + (self.norm is not None) * queries)
        return layers, products

    def _projected(self, tokens: jax.Array) -> jax.Array:
        """f32[b,T,C] -> f32[b,T,D]."""
        if self.project is not None:
            tokens = self.project(tokens)
        tokens = tokens.astype(jnp.float32)
        return jax.nn.relu(tokens) if self.project_relu else tokens

    def _positions(self, grid: tuple[int, int]) -> jax.Array | np.ndarray | None:
        """Return f32[1,N,D] for the patches of a grid, or None."""
        if self.positions == "none":
            return None
        return (
            resample_positions(self.table[...], grid)
            if self.positions == "learned"
            else detr_positions(grid, self.width)
        )


def _self_attention(which: str, layer: int) -> str:
    """Return what a decoder layer does among queries: `on`, `off` or `identity`."""
    if which == "identity":
        return which
    return "on" if which == "all" or which == ("first" if layer == 0 else "others") else "off"


def _array(mask: np.ndarray | Constant | None) -> np.ndarray | None:
    return mask.value if isinstance(mask, Constant) else mask


def _checked_mask(mask: np.ndarray | None, queries: int, tokens: int) -> np.ndarray | None:
    if mask is None:
        return None
    if mask.dtype != bool or mask.shape != (queries, tokens):
        raise ValueError(f"a mask is bool[{queries},{tokens}] here, not {mask.dtype}{list(mask.shape)}")
    if not mask.any(axis=1).all():
        raise ValueError(f"the mask hides every token from query {int(np.argmin(mask.any(axis=1)))}")
    return mask


def _check_choices(
    query_role: str, positions: str, self_attention: str, project: str, init: str, activation: str
) -> None:
    for name, value, choices in (
        ("query_role", query_role, QUERY_ROLES),
        ("positions", positions, POSITIONS),
        ("self_attention", self_attention, SELF_ATTENTION),
        ("project", project, PROJECTIONS),
        ("init", init, INITS),
        ("activation", activation, tuple(ACTIVATIONS)),
    ):
        if value not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")


def _check_sizes(channels: int, width: int, heads: int, decoder_layers: int, positions: str, project: str) -> None:
    if width % heads:
        raise UserError(f"a query decoder of width {width} cannot be divided among {heads} heads: choose a divisor")
    if positions in ("once", "detr") and width % 4:
        raise UserError(f"sine positions need a width that is a multiple of 4, not {width}: choose another or none")
    if project == "none" and channels != width:
        raise UserError(
            f"a query decoder of width {width} needs a projection from the backbone's {channels} channels: "
            f"set project to linear, or the width to {channels}"
        )
    if decoder_layers < 1:
        raise UserError(f"a query decoder needs at least one decoder layer, not {decoder_layers}")
