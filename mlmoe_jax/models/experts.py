"""Experts, gates and their combination, each usable alone.

An expert is written once for one token and lifted to a bank with `jax.vmap`; a bank's parameters are the expert's with
a leading axis.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mlmoe_jax.models.initializers import torch_linear


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": _gelu, "relu": jax.nn.relu}


class BottleneckExpert(nnx.Module):
    """E(z) = z + W₂ᵀ act(W₁ᵀ z + b₁) + b₂ with a narrow hidden layer (ML-VPT, eq. 12–13).

    The paper writes ReLU, the authors' code computes the exact GELU.
    """

    def __init__(
        self, width: int, hidden: int, *, activation: str = "gelu", dtype: jnp.dtype | None = None, rngs: nnx.Rngs
    ):
        self.activation = activation
        into, out_of = torch_linear(width), torch_linear(hidden)
        self.up = nnx.Linear(width, hidden, kernel_init=into, bias_init=into, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, kernel_init=out_of, bias_init=out_of, dtype=dtype, rngs=rngs)

    def __call__(self, token: jax.Array) -> jax.Array:
        """f32[...,D] -> f32[...,D]."""
        return token + self.down(ACTIVATIONS[self.activation](self.up(token)))


def make_bank(make_expert: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Return `count` experts as one module whose parameters have a leading axis of that size."""
    return jax.vmap(make_expert)(rngs.split(count))


def apply_bank(bank: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Let expert p work on token p: f32[B,P,D] -> f32[B,P,D]."""
    return jax.vmap(lambda expert, token: expert(token), in_axes=(0, 1), out_axes=1)(bank, tokens)


class LabelGates(nnx.Module):
    """A softmax over the M experts of a label's group, for every label and image (ML-VPT, eq. 14).

    Expert e's logit for label k is the product of a weight vector w[e,k] with the expert's own input token.
    bias: `used` adds b[e,k] as the paper's formula has it; `unused` allocates it and leaves it out, as the authors'
    code does (the published parameter count includes it).
    """

    def __init__(self, width: int, labels: int, per_group: int, *, bias: str = "unused", rngs: nnx.Rngs):
        if bias not in ("used", "unused"):
            raise ValueError(f"gate bias is 'used' or 'unused', not {bias!r}")
        draw = torch_linear(width)
        self.kernel = nnx.Param(draw(rngs.params(), (per_group, labels, width)))
        self.bias = nnx.Param(draw(rngs.params(), (per_group, labels)))
        self.adds_bias = bias == "used"

    def scores(self, tokens: jax.Array) -> jax.Array:
        """Return w[e,k]·z for the tokens of every group, without bias: f32[B,M,G,D] -> f32[B,M,G,K]."""
        return jnp.einsum("bmgd,mkd->bmgk", tokens, self.kernel[...])

    def added_bias(self) -> jax.Array | float:
        """Return f32[M,K] to be added to the chosen scores, or 0 where the bias is unused."""
        return self.bias[...] if self.adds_bias else 0.0
