"""A transformer encoder over image tokens and a decoder with learned queries.

Q2L, ML-Decoder, HSQ and DR-MoE use variants of it. Shape letters in addition to those of `contracts`: Q query tokens (K
if each label has its own query), T memory tokens, C channels of the backbone, E memory tokens in addition to patches.
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
# Precedes the trainable rules if queries are fixed: they are counted as parameters but must not change.
FIXED_QUERIES = (r"^head/decoder/queries$", False)


def decoder_settings(settings: ConfigDict, channels: int) -> dict[str, Any]:
    """Return the arguments of QueryDecoder for `config.model.head.decoder` and C = `channels`."""
    given = {key: value for key, value in settings.items() if key != "queries"}
    given["width"] = settings.width or channels
    if settings.project == "auto":
        given["project"] = "none" if given["width"] == channels else "linear"
    return given


def fixed_queries(settings: ConfigDict) -> tuple[tuple[str, bool], ...]:
    """Return the rules of `config.model.head.decoder` that precede those of `config.trainable`."""
    return (FIXED_QUERIES,) if settings.fixed_queries else ()


class QueryDecoder(nnx.Module):
    """Map image tokens f32[B,N,C] to one feature per query f32[B,Q,D], by an encoder over patches and a decoder.

    The defaults follow DR-MoE (D = 512, two and two layers, eight heads), and torch.nn.Transformer for settings
    that the paper does not specify: post-norm, ReLU, hidden layers of 2048, dropout 0.1, one norm after the decoder.
    Q2L and ML-Decoder are settings of this class (`heads.query`).

    channels: C. num_queries: Q, or K if each label has its own query. width: D. hidden: width of the feed-forward
        layers.
    query_role: `input` uses the learned queries as input of the first decoder layer; `added` starts from zeros and adds
        them to the queries (and to the keys of self-attention) in every layer, as in DETR and Q2L.
    fixed_queries: the queries keep their initial values, because their gradient is stopped. `FIXED_QUERIES` must also
        precede the trainable rules: weight decay needs no gradient.
    owner: whose the queries are, `partition.LABEL` or `partition.LABEL_GROUP`.
    query_std: standard deviation of the normal initial values of the queries.
    positions: positions of the patches. `once` adds sines to the input of the encoder; `detr` adds them to the queries
        and keys of every encoder layer, and to the keys of the decoder; `learned` is `once` with a learned table of
        `table_side` rows and columns, resampled to the grid; `none`.
    self_attention: the decoder layers with self-attention of queries: `all`, `first`, `others` (all but the first) or
        `none`. `identity` replaces the output of self-attention by its input, LN(x + dropout(x)), as in ML-Decoder.
        Without self-attention, no array has the size Q×Q.
    pre_norm: norms precede the parts of a layer instead of following them.
    encoder_norm, decoder_norm: a norm after the last layer; None = as in DETR: after the encoder only with pre_norm.
    project: the projection from C to D: `linear`, `linear_relu`, or `none`, which requires C = D.
    init: initial values of matrices: `xavier` (DETR, Q2L) or `torch`, the defaults of PyTorch's layers (ML-Decoder).
    dtype: of the matrix products; None = float32. Norms, softmax and sums are always float32.
    Raises ValueError for an unknown choice, and UserError for sizes that do not fit together.
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
        owner: str = partition.LABEL,
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
        queries = nnx.initializers.normal(query_std)(rngs.params(), (num_queries, width))
        self.queries = nnx.Param(queries, **partition.axes(owner, None))
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

        extra: additional memory tokens, f32[B or 1,E,C]. They are projected like patches but have no positions, and
        they skip the encoder, which would mix them into the patches. extra_mask: bool[Q,E], True if a query may attend
        to a token; None = all may. Every query attends to all patches. rngs: for dropout in training.
        """
        memory, positions, mask = self._memory(features, extra, extra_mask, rngs)
        return self.decode(memory, positions, mask=mask, rngs=rngs)

    def attention(
        self, features: Features, *, extra: jax.Array | None = None, extra_mask: np.ndarray | Constant | None = None
    ) -> jax.Array:
        """Return the attention weights of queries over patches in the last layer, averaged over heads: f32[B,Q,N].

        The arguments are those of `__call__`; dropout is not applied. A row sums to 1 minus the weights of `extra`.
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
        """Return memory f32[B,T,D], positions and mask for `decode`; the arguments are those of `__call__`."""
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
        """Return memory and positions for `decode`, for patch tokens f32[B,N,C], row-major over `grid`.

        The memory is f32[B,N,D]. The positions f32[1,N,D] are added to the keys of the decoder; None if there are none.
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
        """Return the features f32[B,Q,D] of the queries for memory tokens f32[B,T,D].

        positions: f32[1 or B,T,D], added to the keys; None = no positions. mask: bool[Q,T], True if a query may attend
        to a token; None = all may. Raises ValueError for a mask that has another shape or hides all tokens from a
        query.
        """
        mask = _checked_mask(_array(mask), self.num_queries, memory.shape[1])
        tokens, added, keys = self._start(memory, positions)
        for layer in self.layers:
            tokens = layer(tokens, added, memory, keys, mask=mask, rngs=rngs)
        return tokens if self.norm is None else self.norm(tokens)

    def _start(self, memory: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Return the inputs of the first layer: tokens, queries added to them (or None), and keys of the memory."""
        queries = self.queries[...][None]
        if self.fixed_queries:
            queries = jax.lax.stop_gradient(queries)
        tokens, added = (queries, None) if self.query_role == "input" else (jnp.zeros_like(queries), queries)
        drop = self.layers[0].dropout
        if drop.rate and not drop.deterministic:
            # Dropout differs per image; without it, the layers before the first cross-attention run once per batch.
            tokens = jnp.broadcast_to(tokens, (memory.shape[0], *tokens.shape[1:]))
        return tokens, added, memory if positions is None else memory + positions

    def published_macs(self, tokens: int, extra: int = 0) -> tuple[int, int]:
        """Return the multiply-adds per image with N = `tokens` patches and E = `extra` additional memory tokens.

        The first count is linear layers and 4·tokens·D per norm, the second the attention products.
        """
        width, queries, memory = self.width, self.num_queries, tokens + extra
        square, feed = width**2, 2 * width * self.hidden
        layers = 0 if self.project is None else memory * self.project.kernel.size
        layers += len(self.encoder) * tokens * (4 * square + feed) + self.norm_macs(tokens)
        products = len(self.encoder) * 2 * tokens**2 * width
        for layer in self.layers:
            layers += queries * (2 * square + feed) + memory * 2 * square
            products += 2 * queries * memory * width
            if layer.self_attn is not None:
                layers += 4 * queries * square
                products += 2 * queries**2 * width
        return layers, products

    def norm_macs(self, tokens: int) -> int:
        """Return 4·tokens·D per norm, those of the encoder over N = `tokens` patches and the others over queries."""
        of_patches = 2 * len(self.encoder) + (self.encoder_norm is not None)
        of_queries = sum(2 + (layer.norm1 is not None) for layer in self.layers) + (self.norm is not None)
        return 4 * self.width * (of_patches * tokens + of_queries * self.num_queries)

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
    """Return the self-attention of a decoder layer: `on`, `off` or `identity`."""
    if which == "identity":
        return which
    return "on" if which == "all" or which == ("first" if layer == 0 else "others") else "off"


def _array(mask: np.ndarray | Constant | None) -> np.ndarray | None:
    return mask.value if isinstance(mask, Constant) else mask


def _checked_mask(mask: np.ndarray | None, queries: int, tokens: int) -> np.ndarray | None:
    if mask is None:
        return None
    if mask.dtype != bool or mask.shape != (queries, tokens):
        raise ValueError(f"the mask must be bool[{queries},{tokens}], not {mask.dtype}{list(mask.shape)}")
    if not mask.any(axis=1).all():
        raise ValueError(f"the mask hides all tokens from query {int(np.argmin(mask.any(axis=1)))}")
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
