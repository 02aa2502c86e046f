"""Experts, gates and their combination, each usable alone.

An expert is written once for one token and lifted to a bank with `jax.vmap`; a bank's parameters are the expert's with
a leading axis. Two families use them: ML-VPT has an expert a prompt (`BottleneckExpert`, `LabelGates`); DR-MoE and its
relatives work on a feature a label (`LabelExperts`, `Gates`, `combine`).

Shape letters: B batch, D width, K labels, S shared experts, T task experts a label, E = S + T entries of a gate,
O width of an expert's output; P prompts, G groups, M experts a group.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from mlmoe_jax.models import partition
from mlmoe_jax.models.layers.activations import ACTIVATIONS
from mlmoe_jax.models.layers.initializers import torch_linear
from mlmoe_jax.models.losses import _as_float

GATES = ("static", "linear", "mlp")


SHARES = ("per_label", "shared")


SPREADS = ("compiler", "shard_map")


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

    def own_scores(self, tokens: jax.Array) -> jax.Array:
        """Return w[e,g]·z where each group has a gate of its own (K = G): f32[B,M,G,D] -> f32[B,M,G]."""
        return jnp.einsum("bmgd,mgd->bmg", tokens, self.kernel[...])

    def added_bias(self) -> jax.Array | float:
        """Return f32[M,K] to be added to the chosen scores, or 0 where the bias is unused."""
        return self.bias[...] if self.adds_bias else 0.0


class ReluLinearExpert(nnx.Module):
    """E(h) = ReLU(Wᵀh + b) to a narrower output, as DR-MoE prints its experts (eq. 3–4)."""

    def __init__(self, width: int, hidden: int, *, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        draw = torch_linear(width)
        self.linear = nnx.Linear(width, hidden, kernel_init=draw, bias_init=draw, dtype=dtype, rngs=rngs)

    def __call__(self, feature: jax.Array) -> jax.Array:
        """f32[...,D] -> f32[...,hidden]."""
        return jax.nn.relu(self.linear(feature))


class FeedForwardExpert(nnx.Module):
    """E(h) = W₂ᵀ ReLU(W₁ᵀh + b₁) + b₂, and a ReLU on that if `relu_output`."""

    def __init__(
        self, width: int, hidden: int, *, relu_output: bool = False, dtype: jnp.dtype | None = None, rngs: nnx.Rngs
    ):
        self.relu_output = relu_output
        into, out_of = torch_linear(width), torch_linear(hidden)
        self.up = nnx.Linear(width, hidden, kernel_init=into, bias_init=into, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, kernel_init=out_of, bias_init=out_of, dtype=dtype, rngs=rngs)

    def __call__(self, feature: jax.Array) -> jax.Array:
        """f32[...,D] -> f32[...,D]."""
        worked = self.down(jax.nn.relu(self.up(feature)))
        return jax.nn.relu(worked) if self.relu_output else worked


EXPERTS: dict[str, Callable[..., nnx.Module]] = {
    "relu_linear": ReluLinearExpert,
    "ffn": FeedForwardExpert,
    "ffn_relu": partial(FeedForwardExpert, relu_output=True),
}


class LabelExperts(nnx.Module):
    """S experts that all labels share and T of each label's own, for a feature a label.

    The parameters of `shared` have a leading axis S, those of `task` leading axes K and T (DR-MoE, eq. 3 and 4, has
    S = 4 and T = 1). Either part may be left out with a 0. Label k's features meet no other label's task experts.
    kind: `relu_linear` is eq. 3–4 as printed, one layer from `width` to `hidden`, so that O = hidden. DR-MoE's text
    speaks of a feed-forward network with that hidden width: `ffn` is one, `ffn_relu` adds the printed outer ReLU, and
    O = width in both.
    spread: who lays the task experts over a mesh with labels along `expert`: the `compiler`, or `shard_map`, which is
    partition.each_label around the same function.
    Raises ValueError for another kind or spread, and where there is no expert at all.
    """

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        kind: str = "relu_linear",
        hidden: int = 256,
        shared: int = 4,
        task: int = 1,
        spread: str = "compiler",
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        if spread not in SPREADS:
            raise ValueError(f"task experts are spread by one of {', '.join(SPREADS)}, not {spread!r}")
        if kind not in EXPERTS:
            raise ValueError(f"an expert is one of {', '.join(EXPERTS)}, not {kind!r}")
        if shared < 0 or task < 0 or shared + task == 0:
            raise ValueError(f"a label needs at least one expert, not {shared} shared and {task} of its own")

        def expert(rngs: nnx.Rngs) -> nnx.Module:
            return EXPERTS[kind](width, hidden, dtype=dtype, rngs=rngs)

        def label_experts(rngs: nnx.Rngs) -> nnx.Module:
            return make_bank(expert, task, rngs)

        self.out_width = hidden if kind == "relu_linear" else width
        self.entries, self.spread = shared + task, spread
        self._macs = labels * self.entries * width * hidden * (1 if kind == "relu_linear" else 2)
        self.shared = make_bank(expert, shared, rngs) if shared else None
        self.task = make_bank(label_experts, labels, rngs) if task else None

    def __call__(self, features: jax.Array) -> tuple[jax.Array, ...]:
        """Let every expert work on its labels: f32[B,K,D] -> f32[B,K,S,O] and f32[B,K,T,O], less a part left out."""
        outputs = []
        if self.shared is not None:
            outputs.append(_apply_each(self.shared, features))
        if self.task is not None:
            of_labels = jax.vmap(_apply_each, in_axes=(0, 1), out_axes=1)
            spread = self.spread == "shard_map"
            outputs.append((partial(partition.each_label, of_labels) if spread else of_labels)(self.task, features))
        return tuple(outputs)

    def macs(self) -> int:
        """Return the multiply-adds an image, K·E·width·hidden a layer."""
        return self._macs


def _apply_each(bank: nnx.Module, features: jax.Array) -> jax.Array:
    """Let every expert of a bank work on all features: f32[...,D] -> f32[...,count,O]."""
    return jax.vmap(lambda expert, feature: expert(feature), in_axes=(0, None), out_axes=-2)(bank, features)


class Gate(nnx.Module):
    """Logits over the experts from a label's feature: linear, or with one hidden ReLU layer (DR-MoE's G).

    The logits' own layer takes and gives float32 whatever `dtype` is, for the softmax over them amplifies rounding
    (Fedus et al., Switch Transformers, 2022, sec. 2.4).
    """

    def __init__(
        self, width: int, entries: int, *, hidden: int | None = None, dtype: jnp.dtype | None = None, rngs: nnx.Rngs
    ):
        def linear(into: int, out: int, dtype: jnp.dtype | None) -> nnx.Linear:
            draw = torch_linear(into)
            return nnx.Linear(into, out, kernel_init=draw, bias_init=draw, dtype=dtype, rngs=rngs)

        self.hidden = linear(width, hidden, dtype) if hidden else None
        self.logits = linear(hidden or width, entries, jnp.float32)

    def __call__(self, feature: jax.Array) -> jax.Array:
        """f32[...,D] -> f32[...,E]."""
        if self.hidden is not None:
            feature = jax.nn.relu(self.hidden(feature))
        return self.logits(feature)


class Gates(nnx.Module):
    """Routing weights for every label, w_i = softmax(G_i(h_i)) over its E experts: [shared 1…S, task 1…T] (DR-MoE).

    kind: `mlp` (DR-MoE) and `linear` (as HSQ is described) read the label's feature. `static` are free logits, 0 at
    the start, the same for every image: the ablation that DR-MoE compares with.
    share: `per_label` has a gate for each label, as the subscript of G_i says, with a leading axis K in every
    parameter; `shared` has one for all.
    Raises ValueError for another kind or share.
    """

    def __init__(
        self,
        width: int,
        labels: int,
        entries: int,
        *,
        kind: str = "mlp",
        hidden: int = 256,
        share: str = "per_label",
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        if kind not in GATES:
            raise ValueError(f"a gate is one of {', '.join(GATES)}, not {kind!r}")
        if share not in SHARES:
            raise ValueError(f"gates are one of {', '.join(SHARES)}, not {share!r}")

        def gate(rngs: nnx.Rngs) -> Gate:
            return Gate(width, entries, hidden=hidden if kind == "mlp" else None, dtype=dtype, rngs=rngs)

        self.kind, self.per_label, self.labels = kind, share == "per_label", labels
        layers = {"static": 0, "linear": width * entries, "mlp": width * hidden + hidden * entries}
        self._macs = labels * layers[kind]
        if kind == "static":
            self.free_logits = nnx.Param(jnp.zeros((labels if self.per_label else 1, entries)))
        else:
            self.net = make_bank(gate, labels, rngs) if self.per_label else gate(rngs)

    def logits(self, features: jax.Array) -> jax.Array:
        """f32[B,K,D] -> f32[B,K,E]; static gates do not look and return f32[1,K,E]."""
        if self.kind == "static":
            return jnp.broadcast_to(self.free_logits[...], (1, self.labels, self.free_logits.shape[-1]))
        return apply_bank(self.net, features) if self.per_label else self.net(features)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Return weights that sum to 1 over the experts: f32[B,K,D] -> f32[B,K,E], of static gates f32[1,K,E]."""
        return jax.nn.softmax(self.logits(features), axis=-1)

    def macs(self) -> int:
        """Return the multiply-adds an image, 0 for static gates."""
        return self._macs


def combine(weights: jax.Array, outputs: Sequence[jax.Array]) -> jax.Array:
    """Mix the experts' outputs by routing weights, o_i = Σₑ w_ie·E_ie (DR-MoE; the o of its eq. 9).

    weights: f32[B or 1,K,E]. outputs: arrays f32[B,K,·,O] whose third axes are together the E experts in the order of
    the weights. Returns f32[B,K,O]. Raises ValueError where the experts are not E.
    """
    counts = [part.shape[2] for part in outputs]
    if sum(counts) != weights.shape[-1]:
        raise ValueError(f"{weights.shape[-1]} routing weights cannot mix {sum(counts)} experts")
    shares = jnp.split(weights, np.cumsum(counts)[:-1], axis=-1)
    return sum(jnp.sum(share[..., None] * part, axis=2) for share, part in zip(shares, outputs, strict=True))


def gate_entropy(gates: ArrayLike) -> Array:
    """Entropy −Σ w log w over the last axis, in nats.

    `gates` f32[...,E] are weights that sum to 1 (not logits). A weight of 0 counts 0 and has a finite gradient, so that
    the gradient through a softmax is right even where a weight underflows: the result is what log-softmax would give.

    Returns:
      f32[...], between 0 and log E.
    """
    gates = _as_float(gates)
    return -jnp.sum(gates * jnp.log(jnp.maximum(gates, jnp.finfo(gates.dtype).tiny)), axis=-1)
