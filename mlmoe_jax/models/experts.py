"""Experts, gates and their combination, each usable alone.

An expert is a module for one token. A bank is a module of several experts, made with `jax.vmap`. The parameters of a
bank have an additional leading axis. There are two families: ML-VPT has one expert per prompt (`BottleneckExpert`,
`LabelGates`); DR-MoE and its relatives apply experts to one feature per label (`LabelExperts`, `Gates`, `mix_experts`).

Axes: b batch, d width, k labels, s shared experts, t task experts per label, e = s + t entries of a gate, o output
width of an expert; p prompts, g groups, m experts per group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from mlmoe_jax.models.layers.initializers import Dtype, torch_linear, torch_uniform
from mlmoe_jax.models.layers.recompute import gelu
from mlmoe_jax.models.losses import as_float
from mlmoe_jax.models.partition import LABEL, PROMPT, axes

# By the values of `config.model.head.activation`
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": gelu, "relu": jax.nn.relu}


class FeedForwardExpert(nnx.Module):
    """A two-layer feed-forward expert, E(h) = W₂ᵀ act(W₁ᵀh + b₁) + b₂, followed by a ReLU with `relu_output`."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "relu",
        relu_output: bool = False,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.relu_output = relu_output
        self.up = torch_linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = torch_linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, feature: Float[ArrayLike, "... d"]) -> Float[Array, "... d"]:
        output = self.down(ACTIVATIONS[self.activation](self.up(feature)))
        return jax.nn.relu(output) if self.relu_output else output


class BottleneckExpert(FeedForwardExpert):
    """A residual expert with a narrow hidden layer, E(z) = z + W₂ᵀ act(W₁ᵀ z + b₁) + b₂ (ML-VPT, eq. 11).

    z is the token of the expert. The activation is ReLU in the paper and the exact GELU in the authors' code.
    """

    def __call__(self, token: Float[ArrayLike, "... d"]) -> Float[Array, "... d"]:
        return token + super().__call__(token)


def make_bank(
    make_expert: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs, axis: str | None = None
) -> nnx.Module:
    """Return a bank of `count` experts: one module whose parameters have a leading axis of size `count`.

    `axis` is the name of the leading axis, see `partition.axes`; None = no name.
    """
    bank = jax.vmap(make_expert)(rngs.split(count))
    if axis is not None:
        for _, variable in nnx.to_flat_state(nnx.state(bank)):
            variable.set_metadata(**axes(axis, *[None] * (len(variable.shape) - 1)))
    return bank


def apply_bank(bank: nnx.Module, tokens: Float[ArrayLike, "b p d"]) -> Float[Array, "b p o"]:
    """Apply each expert to its own token: expert p of the bank to `tokens[:, p]`."""
    return jax.vmap(lambda expert, token: expert(token), in_axes=(0, 1), out_axes=1)(bank, tokens)


class LabelGates(nnx.Module):
    """The weights and biases of gates over the M experts of a label's group (ML-VPT, eq. 12–13).

    The gate logit of expert e for label k is w[e,k]·z. w[e,k] is a learned weight vector, and z is the input token of
    the expert. The routing weights are the softmax of the gate logits over the experts, per label and image.

    Args:
      bias: `used` adds a bias b[e,k] to the logit, as in the paper. `unused` allocates the bias without adding it, as
        in the authors' code. The published parameter count includes the bias.
      owner: the name of the axis of size `labels`. With one gate per group instead of per label, `labels` is the number
        of groups and `owner` is `partition.PROMPT`.
    """

    def __init__(
        self, width: int, labels: int, per_group: int, *, bias: str = "unused", owner: str = LABEL, rngs: nnx.Rngs
    ):
        draw = torch_uniform(width)
        self.kernel = nnx.Param(draw(rngs.params(), (per_group, labels, width)), **axes(PROMPT, owner, None))
        self.bias = nnx.Param(draw(rngs.params(), (per_group, labels)), **axes(PROMPT, owner))
        self.adds_bias = bias == "used"

    def scores(self, tokens: Float[ArrayLike, "b m g d"]) -> Float[Array, "b m g k"]:
        """Return the gate logits w[e,k]·z of every label for the tokens of every group, without bias."""
        return jnp.einsum("bmgd,mkd->bmgk", tokens, self.kernel[...])

    def group_scores(self, tokens: Float[ArrayLike, "b m g d"]) -> Float[Array, "b m g"]:
        """Return the gate logits w[e,g]·z of each group for its own tokens, for one gate per group; without bias."""
        return jnp.einsum("bmgd,mgd->bmg", tokens, self.kernel[...])

    def added_bias(self) -> Float[Array, "m k"] | float:
        """Return the bias to add to the gate logits; 0.0 if the bias is `unused`."""
        return self.bias[...] if self.adds_bias else 0.0


class ReluLinearExpert(nnx.Module):
    """A one-layer expert with `hidden` outputs, E(h) = ReLU(Wᵀh + b), as printed (DR-MoE, eq. 3–4)."""

    def __init__(self, width: int, hidden: int, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.linear = torch_linear(width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, feature: Float[ArrayLike, "... d"]) -> Float[Array, "... o"]:
        return jax.nn.relu(self.linear(feature))


EXPERTS: dict[str, Callable[..., nnx.Module]] = {
    "relu_linear": ReluLinearExpert,
    "ffn": FeedForwardExpert,
    "ffn_relu": partial(FeedForwardExpert, relu_output=True),
}


class LabelExperts(nnx.Module):
    """S experts shared by all labels and T task experts per label, applied to one feature per label.

    The parameters of the attribute `shared` have a leading axis S. The parameters of `task` have leading axes K and T;
    those at index k are applied only to the feature of label k. DR-MoE has S = 4 and T = 1 (DR-MoE, eq. 3–4).

    `routing` has the keys of `config.model.head.routing`: `shared_experts` and `task_experts` are S and T, which may be
    0. With `expert=relu_linear`, as printed in DR-MoE, eq. 3–4, an expert is one layer of `expert_hidden` outputs, the
    output width O. With `ffn`, as its text describes, it is a feed-forward network of this hidden width, with O =
    `width`. `ffn_relu` is `ffn` with the printed outer ReLU.
    """

    def __init__(self, width: int, labels: int, routing: Mapping[str, Any], *, dtype: Dtype = None, rngs: nnx.Rngs):
        kind, hidden = routing["expert"], routing["expert_hidden"]
        shared, task = routing["shared_experts"], routing["task_experts"]

        def expert(rngs: nnx.Rngs) -> nnx.Module:
            return EXPERTS[kind](width, hidden, dtype=dtype, rngs=rngs)

        def label_experts(rngs: nnx.Rngs) -> nnx.Module:
            return make_bank(expert, task, rngs)

        self.out_width = hidden if kind == "relu_linear" else width
        self.entries = shared + task
        self.shared = make_bank(expert, shared, rngs) if shared else None
        self.task = make_bank(label_experts, labels, rngs, LABEL) if task else None

    def __call__(self, features: Float[ArrayLike, "b k d"]) -> tuple[Float[Array, "b k _ o"], ...]:
        """Return f32[B,K,S,O] of the shared experts if S > 0, then f32[B,K,T,O] of the task experts if T > 0."""
        outputs = []
        if self.shared is not None:
            outputs.append(_apply_each(self.shared, features))
        if self.task is not None:
            outputs.append(jax.vmap(_apply_each, in_axes=(0, 1), out_axes=1)(self.task, features))
        return tuple(outputs)


def _apply_each(bank: nnx.Module, features: jax.Array) -> jax.Array:
    """Apply every expert of a bank to every feature: f32[...,D] -> f32[...,count,O] for a bank of `count` experts."""
    return jax.vmap(lambda expert, feature: expert(feature), in_axes=(0, None), out_axes=-2)(bank, features)


class Gate(nnx.Module):
    """A network from the feature of a label to a logit per expert (G in DR-MoE); `hidden`: width of a ReLU layer, or
    None.

    The layer of the logits is float32 for every `dtype`, because the softmax amplifies rounding errors (Switch
    Transformers, sec. 2.4).
    """

    def __init__(self, width: int, entries: int, *, hidden: int | None = None, dtype: Dtype = None, rngs: nnx.Rngs):
        self.hidden = torch_linear(width, hidden, dtype=dtype, rngs=rngs) if hidden else None
        self.logits = torch_linear(hidden or width, entries, dtype=jnp.float32, rngs=rngs)

    def __call__(self, feature: Float[ArrayLike, "... d"]) -> Float[Array, "... e"]:
        if self.hidden is not None:
            feature = jax.nn.relu(self.hidden(feature))
        return self.logits(feature)


class Gates(nnx.Module):
    """The routing weights of each label over its E experts (DR-MoE).

    The weights of label i are w_i = softmax(G_i(h_i)), where h_i is the feature of the label and G_i is its gate. The
    experts are in the order [shared 1…S, task 1…T].

    `routing` has the keys of `config.model.head.routing`. The gates `mlp` (DR-MoE) and `linear` (as in the text of HSQ)
    read the feature of the label. `static`, the ablation in DR-MoE, has free logits, which start at 0 and do not depend
    on the image. With `gate_share=per_label`, there is one gate per label, as the subscript of G_i indicates, and every
    parameter has a leading axis K. With `shared`, there is one gate for all labels.
    """

    def __init__(
        self,
        width: int,
        labels: int,
        entries: int,
        routing: Mapping[str, Any],
        *,
        dtype: Dtype = None,
        rngs: nnx.Rngs,
    ):
        self.kind = routing["gate"]
        self.per_label = routing["gate_share"] == "per_label"
        self.labels = labels
        hidden = routing["gate_hidden"] if self.kind == "mlp" else None

        def gate(rngs: nnx.Rngs) -> Gate:
            return Gate(width, entries, hidden=hidden, dtype=dtype, rngs=rngs)

        if self.kind == "static":
            rows, metadata = (labels, axes(LABEL, None)) if self.per_label else (1, {})
            self.free_logits = nnx.Param(jnp.zeros((rows, entries)), **metadata)
        else:
            self.net = make_bank(gate, labels, rngs, LABEL) if self.per_label else gate(rngs)

    def __call__(self, features: Float[ArrayLike, "b k d"]) -> Float[Array, "#b k e"]:
        """Return the routing weights, which sum to 1 over the experts. Static gates return f32[1,K,E]."""
        if self.kind == "static":
            logits = jnp.broadcast_to(self.free_logits[...], (1, self.labels, self.free_logits.shape[-1]))
        else:
            logits = apply_bank(self.net, features) if self.per_label else self.net(features)
        return jax.nn.softmax(logits, axis=-1)


def mix_experts(
    weights: Float[ArrayLike, "#b k e"], outputs: Sequence[Float[ArrayLike, "b k _ o"]]
) -> Float[Array, "b k o"]:
    """Return the mixture of the experts of each label, o_i = Σₑ w_ie·E_ie (DR-MoE, eq. 8).

    E_ie is the output of expert e for label i, and w_ie is its routing weight. `outputs` has one array per kind of
    expert (shared, task). Concatenated along axis 2, they have the E experts in the order of `weights`.
    """
    shares = jnp.split(weights, np.cumsum([part.shape[2] for part in outputs])[:-1], axis=-1)
    return sum(jnp.sum(share[..., None] * part, axis=2) for share, part in zip(shares, outputs, strict=True))


def gate_entropy(gates: Float[ArrayLike, "*rows e"]) -> Float[Array, "*rows"]:
    """Return the entropy −Σ w log w over the last axis, in nats, for weights w that sum to 1, not logits.

    A weight of 0 adds 0 and has a finite gradient. The gradient through a softmax is therefore correct even if a weight
    underflows to 0.
    """
    gates = as_float(gates)
    return -jnp.sum(gates * jnp.log(jnp.maximum(gates, jnp.finfo(gates.dtype).tiny)), axis=-1)
