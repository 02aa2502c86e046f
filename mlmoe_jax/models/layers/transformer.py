"""The pre-norm transformer block of the ViT family."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.layers.attention import Attention
from mlmoe_jax.models.layers.deltas import NO_DELTAS, Deltas, add_delta, call_layer, raise_no_kernel
from mlmoe_jax.models.layers.initializers import Dtype
from mlmoe_jax.models.layers.recompute import LayerNorm, gelu

MLP, BRANCH = "mlp", "branch"  # names of deltas besides layers, see Block


class Mlp(nnx.Module):
    """A feed-forward network: linear layer, activation (by default the exact GELU), dropout, linear layer.

    `linear` builds the layers from the arguments of nnx.Linear. With `gated`, the first layer has 2·`hidden` outputs.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = gelu,
        gated: bool = False,
        dropout: float = 0.0,
        linear: Callable[..., nnx.Linear] = nnx.Linear,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.fc1 = linear(width, 2 * hidden if gated else hidden, dtype=dtype, rngs=rngs)
        self.fc2 = linear(hidden, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def __call__(self, tokens: jax.Array, deltas: Deltas = NO_DELTAS, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """f32[B,T,D] -> f32[B,T,D], with deltas of the layers `fc1` and `fc2`; `rngs` are for dropout in training."""
        hidden = self.activation(call_layer(self.fc1, tokens, "fc1", deltas))
        return call_layer(self.fc2, self.dropout(hidden, rngs=rngs), "fc2", deltas)


def swiglu(x: jax.Array) -> jax.Array:
    """Return silu(gate)·value for the halves gate and value of `x` […,2H], as in the files of DINOv2 giant.

    Shazeer, "GLU variants improve transformer", 2020. One layer computes both halves, the gate in its first columns.
    """
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


MLPS = {
    "gelu": Mlp,
    # Approximates Φ by tanh (Hendrycks and Gimpel, 2016), as in SigLIP.
    "gelu_tanh": partial(Mlp, activation=partial(jax.nn.gelu, approximate=True)),
    "quick_gelu": partial(Mlp, activation=lambda x: x * jax.nn.sigmoid(1.702 * x)),  # as in OpenAI's CLIP
    "relu": partial(Mlp, activation=jax.nn.relu),  # in the text tower of TIPSv2
    "swiglu": partial(Mlp, activation=swiglu, gated=True),
}


class LayerScale(nnx.Module):
    """A layer that multiplies each channel by a learned factor (CaiT, sec. 2)."""

    def __init__(self, width: int, init: float):
        self.gamma = nnx.Param(jnp.full((width,), init))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return tokens * self.gamma[...]


class Block(nnx.Module):
    """A pre-norm transformer block: x + s1·Attention(LN x), then x + s2·MLP(LN x).

    The LayerScales s1 and s2 start with the value `layer_scale`; if it is None, there are no LayerScales. LayerNorm,
    softmax, LayerScale and the residual stream are always float32. `dtype` is the type of the matmuls and of their
    inputs and outputs (queries, keys, values, attention output, MLP). `mlp` is a key of MLPS.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        mlp: str = "gelu",
        eps: float,
        layer_scale: float | None,
        key_bias: bool = True,
        dtype: Dtype,
        rngs: nnx.Rngs,
    ):
        self.norm1 = LayerNorm(width, epsilon=eps, rngs=rngs)
        self.attn = Attention(width, heads, key_bias=key_bias, dtype=dtype, rngs=rngs)
        self.norm2 = LayerNorm(width, epsilon=eps, rngs=rngs)
        self.mlp = MLPS[mlp](width, hidden, dtype=dtype, rngs=rngs)
        self.scaled = layer_scale is not None
        if self.scaled:
            self.ls1 = LayerScale(width, layer_scale)
            self.ls2 = LayerScale(width, layer_scale)

    def __call__(
        self,
        tokens: jax.Array,
        context: Sequence[jax.Array] = (),
        mask: np.ndarray | jax.Array | None = None,
        *,
        deltas: Deltas = NO_DELTAS,
        **settings: Any,
    ) -> jax.Array:
        """Apply the block to `tokens` f32[b,Q,D]. `context` arrays f32[b,C,D] provide only keys and values.

        The keys of `deltas` are layer names: `norm1`, `query`, `key`, `value`, `output`, `norm2`, `fc1`, `fc2`. Two
        further keys, MLP and BRANCH, add a delta to the output of the MLP. The input of the delta MLP is the normalized
        tokens; the input of the delta BRANCH is the tokens before the norm. `mask` and `settings` are arguments of
        `Attention.__call__`.
        """
        normed, *context = (call_layer(self.norm1, part, "norm1", deltas) for part in (tokens, *context))
        mixed = self.attn(normed, context, mask, deltas=deltas, **settings)
        tokens = tokens + (self.ls1(mixed) if self.scaled else mixed)
        normed = call_layer(self.norm2, tokens, "norm2", deltas)
        mixed = self.mlp(normed, deltas)
        mixed = self.ls2(mixed) if self.scaled else mixed
        mixed = add_delta(mixed, MLP, normed, deltas, raise_no_kernel)
        return tokens + add_delta(mixed, BRANCH, tokens, deltas, raise_no_kernel)
