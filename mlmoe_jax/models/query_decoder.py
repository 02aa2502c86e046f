"""A transformer encoder over image tokens and a decoder with learned queries.

Q2L, ML-Decoder, HSQ and DR-MoE use variants of it. Axes: b batch, n patches, d width, q query tokens (k if each label
has its own query), t memory tokens, c channels of the backbone, e memory tokens in addition to patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float
from ml_collections import ConfigDict

from mlmoe_jax.data.labels.name_vectors import NameVectors
from mlmoe_jax.errors import UserError
from mlmoe_jax.models import partition
from mlmoe_jax.models.layers.detr import TORCH_EPSILON, DecoderLayer, EncoderLayer, add_positions
from mlmoe_jax.models.layers.dispatch import record_attention
from mlmoe_jax.models.layers.dropout import drops
from mlmoe_jax.models.layers.initializers import Constant, Dtype, torch_linear
from mlmoe_jax.models.layers.positions import detr_positions
from mlmoe_jax.models.layers.recompute import LayerNorm
from mlmoe_jax.models.outputs import PATCHES, Features
from mlmoe_jax.models.partition import WORD_VECTOR, axes

# Precedes the trainable rules if queries are fixed. They count as parameters but must not change.
FIXED_QUERIES = (r"^head/decoder/queries$", False)


@dataclass(frozen=True)
class Style:
    """The differences between the decoders of the papers.

    Attributes:
      self_attention: self-attention of queries in every decoder layer, see DecoderLayer. `off` and `identity` have no
        array of size Q×Q.
      added_queries: start from zeros and add the learned queries to the queries, and to the keys of self-attention, in
        every layer; otherwise the learned queries are the input of the first layer.
      fixed_queries: keep the initial values of the queries by stopping their gradient.
      positions: positions of the patches. `once` adds sines to the input of the encoder; `detr` adds sines to queries
        and keys of every encoder layer, and to the keys of the decoder; `none` adds nothing.
      norm: whether a norm follows the last decoder layer.
      relu_projection: project the patches by a linear layer and ReLU. If False, the patches are projected by a linear
        layer, and only if C differs from D.
      init: initializer of matrices, see layers.detr.
    """

    self_attention: str = "on"
    added_queries: bool = False
    fixed_queries: bool = False
    positions: str = "once"
    norm: bool = True
    relu_projection: bool = False
    init: str = "xavier"


# By the values of `model.head.decoder.style`. `dr_moe` follows torch.nn.Transformer where the paper is silent.
# `independent` is for label counts at which self-attention does not fit into memory.
STYLES = {
    "dr_moe": Style(),
    "independent": Style(self_attention="off"),
    "q2l": Style(self_attention="off", added_queries=True, positions="detr"),
    "q2l_self_attention": Style(added_queries=True, positions="detr"),  # of its --keep_first/other_self_attn_dec
    "ml_decoder": Style(
        self_attention="identity", fixed_queries=True, positions="none", norm=False, relu_projection=True, init="torch"
    ),
}


class NameQueries(nnx.Module):
    """Queries from the vectors t f32[K,d] of the label names, of length 1: relu(W t_k + b), with learned W and b.

    The code of RAM++ and of the zero-shot ML-Decoder does so. No parameter belongs to a label, so a label needs only
    its vector. Here vectors are scaled to the length √d, so that queries are about as large as learned ones.
    """

    def __init__(self, vectors: np.ndarray, width: int, *, dtype: Dtype = None, rngs: nnx.Rngs):
        inputs = vectors.shape[1]
        self.vectors = Constant(vectors * np.float32(math.sqrt(inputs)))
        self.projection = torch_linear(inputs, width, kernel_metadata=axes(WORD_VECTOR, None), dtype=dtype, rngs=rngs)

    def __call__(self) -> Float[Array, "k d"]:
        queries = jax.nn.relu(self.projection(self.vectors.value).astype(jnp.float32))
        return partition.shard_labels(queries[None])[0]


class QueryDecoder(nnx.Module):
    """Map image tokens f32[B,N,C] to one feature per query f32[B,Q,D], by an encoder over patches and a decoder.

    Layers are post-norm. Norms, softmax and sums are always float32.

    Args:
      num_queries: Q, or K if each label has its own query.
      settings: `config.model.head.decoder`.
      owner: name of the axis of the queries, `partition.LABEL` or `partition.LABEL_GROUP`.
      names: the vectors of the names of the labels, for NameQueries; None = the queries are parameters.

    Raises:
      UserError: the sizes do not fit together.
    """

    read = (PATCHES,)
    extra = 0  # the number E of tokens that `extend` adds

    def __init__(
        self,
        channels: int,
        num_queries: int,
        settings: ConfigDict,
        *,
        owner: str = partition.LABEL,
        names: NameVectors | None = None,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        self.style = STYLES[settings.style]
        self.width = width = settings.width or channels
        self.hidden = settings.hidden
        _check_sizes(width, settings.heads, self.style.positions)
        self.num_queries = num_queries
        projects = self.style.relu_projection or channels != width
        self.project = torch_linear(channels, width, dtype=dtype, rngs=rngs) if projects else None
        if names is None:
            queries = nnx.initializers.normal(1.0)(rngs.params(), (num_queries, width))
            self.queries = nnx.Param(queries, **axes(owner, None))
        else:
            self.name_queries = NameQueries(names.vectors, width, dtype=dtype, rngs=rngs)
        self.by_name = names is not None
        rate, sizes = settings.dropout, (width, settings.heads, settings.hidden)
        rates = {"dropout": rate, "attention_dropout": rate if settings.attention_dropout else 0.0}
        options = {**rates, "init": self.style.init, "dtype": dtype, "rngs": rngs}
        self.encoder = nnx.List(EncoderLayer(*sizes, **options) for _ in range(settings.encoder_layers))
        options["self_attention"] = self.style.self_attention
        self.layers = nnx.List(DecoderLayer(*sizes, **options) for _ in range(settings.decoder_layers))
        self.norm = LayerNorm(width, epsilon=TORCH_EPSILON, rngs=rngs) if self.style.norm else None

    def __call__(self, features: Features, *, rngs: nnx.Rngs | None = None) -> Float[Array, "#b q d"]:
        """Return the features of all queries. Every query attends to all of `features.patches`."""
        memory, positions = self.encode(features.patches, features.grid, rngs=rngs)
        memory, positions, mask = self.extend(memory, positions, features)
        return self.decode(partition.shard_images(memory), positions, mask=mask, rngs=rngs)

    def attention(self, features: Features) -> Float[Array, "b q n"]:
        """Return the attention of queries over patches in the last layer, averaged over heads, without dropout.

        A row sums to 1 minus the weights of the tokens that `extend` adds.
        """
        with record_attention() as weights:
            self(features)
        return weights[-1].mean(axis=1)[..., : features.patches.shape[1]]

    def extend(
        self, memory: jax.Array, positions: jax.Array | None, features: Features
    ) -> tuple[jax.Array, jax.Array | None, np.ndarray | None]:
        """Return the arguments of `decode` for what `encode` has returned. Subclasses add tokens to the memory."""
        return memory, positions, None

    def encode(
        self, tokens: Float[ArrayLike, "b n c"], grid: tuple[int, int], *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[ArrayLike, "b n d"], Float[ArrayLike, "1 n d"] | None]:
        """Return memory and positions (None = no positions) for `decode`, for patch tokens, row-major over `grid`."""
        tokens, positions = self.project_tokens(tokens), None
        if self.style.positions == "once":
            tokens = tokens + detr_positions(grid, self.width)
        elif self.style.positions == "detr":
            positions = detr_positions(grid, self.width)
        for layer in self.encoder:
            tokens = layer(tokens, positions, rngs=rngs)
        return tokens, positions

    def decode(
        self,
        memory: Float[ArrayLike, "b t d"],
        positions: Float[ArrayLike, "_ t d"] | None = None,
        *,
        mask: Bool[np.ndarray, "q t"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "#b q d"]:
        """Return the features of the queries for memory tokens.

        `positions` are added to the keys; None = no positions. `mask` is True if a query may attend to a token; None =
        all True.
        """
        tokens, query_positions, keys = self._start(memory, positions)
        for layer in self.layers:
            tokens = layer(tokens, query_positions, memory, keys, mask=mask, rngs=rngs)
        return tokens if self.norm is None else self.norm(tokens)

    def _start(self, memory: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Return the inputs of the first decoder layer: query tokens, query positions or None, and memory keys."""
        if self.by_name:
            queries = self.name_queries()[None]
        else:
            queries = self.queries[...][None]
            queries = jax.lax.stop_gradient(queries) if self.style.fixed_queries else queries
        tokens, query_positions = (jnp.zeros_like(queries), queries) if self.style.added_queries else (queries, None)
        if drops(self.layers[0].dropout):
            # Without dropout, the layers before the first cross-attention run once per batch.
            tokens = jnp.broadcast_to(tokens, (memory.shape[0], *tokens.shape[1:]))
        return tokens, query_positions, add_positions(memory, positions)

    def layer_macs(self, tokens: int) -> int:
        """Return the multiply-adds per image of linear layers and norms, with N = `tokens` patches."""
        queries = self.num_queries
        memory = tokens + self.extra
        square = self.width**2
        feed = 2 * self.width * self.hidden
        macs = 0 if self.project is None else memory * self.project.kernel.size
        macs += queries * self.name_queries.projection.kernel.size if self.by_name else 0
        macs += len(self.encoder) * tokens * (4 * square + feed) + self.norm_macs(tokens)
        for layer in self.layers:
            own = 2 if layer.self_attn is None else 6  # square layers of the queries, beside two of the memory
            macs += queries * (own * square + feed) + memory * 2 * square
        return macs

    def norm_macs(self, tokens: int) -> int:
        """Return the sum over all norms: 4·N·D per encoder norm, with N = `tokens`, and 4·Q·D per decoder norm."""
        encoder_norms = 2 * len(self.encoder)
        decoder_norms = sum(2 + (layer.norm1 is not None) for layer in self.layers) + (self.norm is not None)
        return 4 * self.width * (encoder_norms * tokens + decoder_norms * self.num_queries)

    def project_tokens(self, tokens: jax.Array) -> jax.Array:
        """Return tokens f32[b,T,C] projected to f32[b,T,D], see `Style.relu_projection`."""
        if self.project is not None:
            tokens = self.project(tokens)
        tokens = tokens.astype(jnp.float32)
        return jax.nn.relu(tokens) if self.style.relu_projection else tokens


def _check_sizes(width: int, heads: int, positions: str) -> None:
    if width % heads:
        raise UserError(f"a query decoder of width {width} cannot be divided among {heads} heads: choose a divisor")
    if positions != "none" and width % 4:
        raise UserError(f"sine positions need a width that is a multiple of 4, not {width}: choose another width")
