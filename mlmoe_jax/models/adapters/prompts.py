"""Learned prompt tokens of a ViT: VPT-deep, VPT-shallow and GateVPT."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models import rules
from mlmoe_jax.models.contracts import Adapter, BackboneShape, Prompts
from mlmoe_jax.models.layers.constants import Constant
from mlmoe_jax.models.layers.initializers import torch_linear, uniform
from mlmoe_jax.models.params import Params

TEMPERATURES = (0.01, 10.0)
BOUNDS = ((r"^prompts/temperature$", TEMPERATURES),)  # of parameters, as rules: (pattern of paths, (low, high))


class NoPrompts(Adapter):
    """No prompts: the features are the backbone's own."""

    changes_features = False

    @classmethod
    def from_config(
        cls, settings: ConfigDict, shape: BackboneShape, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> None:
        return None


def _prompt_bound(patch: int, width: int) -> float:
    """Return √(6/(3·patch² + D)), the bound of the uniform initial values in the visual-prompt-tuning code."""
    return math.sqrt(6 / (3 * patch**2 + width))


class _PromptTokens(Adapter):
    """The base class of all prompt methods: a projection from a narrower width, if any, and dropout (as in VPT's code).

    learned: the number of prompts in all blocks.
    project: the width of the learned prompts, which one linear layer projects to the width of the backbone; 0 = the
    width of the backbone, without projection.
    dropout: the rate at which entries of the projected prompts are dropped, independently per image.
    """

    def __init__(self, width: int, *, learned: int, project: int, dropout: float, rngs: nnx.Rngs):
        self.learned, self.learned_width = learned, project or width
        kernel, bias = nnx.initializers.variance_scaling(2.0, "fan_out", "normal"), torch_linear(self.learned_width)
        layer = nnx.Linear(project, width, kernel_init=kernel, bias_init=bias, rngs=rngs) if project else None
        self.projection = layer
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    @classmethod
    def from_config(
        cls, settings: ConfigDict, shape: BackboneShape, *, dtype: jnp.dtype | None, rngs: nnx.Rngs
    ) -> Self:
        place = (shape.depth, shape.width, shape.patch)
        return cls(*place, **cls.options(settings, shape), rngs=rngs)

    @classmethod
    def options(cls, settings: ConfigDict, shape: BackboneShape) -> dict[str, Any]:
        """Return the arguments of the constructor beside the sizes of the backbone."""
        return {"count": settings.count, "project": settings.project, "dropout": settings.dropout}

    @property
    def projection_macs(self) -> int:
        """The multiply-adds of the projection of all prompts, which is computed once per batch."""
        return 0 if self.projection is None else self.learned * self.projection.kernel.size

    @classmethod
    def describe(cls, settings: ConfigDict) -> str:
        return f"{settings.kind} prompts"

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        if settings.count:
            return []
        return [f"model.prompts.count is 0: for no prompts at all set model.prompts.kind=none, not {settings.kind}"]

    def prepare(self, tokens: jax.Array, batch: int, rngs: nnx.Rngs | None) -> jax.Array:
        """Project f32[L,1,P,d] and, in training, apply dropout: f32[L, 1 or B, P, D]."""
        if self.projection is not None:
            tokens = self.projection(tokens)
        if self.dropout.deterministic or not self.dropout.rate:
            return tokens
        tokens = jnp.broadcast_to(tokens, (tokens.shape[0], batch, *tokens.shape[2:]))
        return self.dropout(tokens, rngs=rngs)


class DeepPrompts(_PromptTokens):
    """One set of P prompt tokens per block, f32[L,1,P,D] (VPT, sec. 3.2; ML-VPT, eq. 8).

    mask: bool[P,P], True if a prompt (row) may attend to a prompt (column), or None. Initial values are drawn from
    U(±√(6/(3·patch² + D))) as in the visual-prompt-tuning code.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        mask: np.ndarray | None = None,
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, learned=depth * count, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.deep = nnx.Param(draw(rngs.params(), (depth, 1, count, self.learned_width)))
        self.count, self.key_values, self.mask = count, 0, None if mask is None else Constant(mask)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(self.prepare(self.deep[...], batch, rngs), mask=None if self.mask is None else self.mask.value)


class ShallowPrompts(_PromptTokens):
    """P prompts that are carried from the first block through all blocks (VPT, sec. 3.2), or gated (GateVPT).

    gate_init: None for VPT-shallow. With a number θ₀, the prompts entering block i+1 are g·(prompts leaving block i) +
    (1 − g)·(prompts entering block i) with g = σ(θᵢ), for all blocks but the last; θ is initially −θ₀ (Yoo et al.,
    "Improving visual prompt tuning for self-supervised vision transformers", ICML 2023; initial value from its code).
    learn_temperature: divide the attention logits of each block by a learned number, clamped to 0.01 … 10, initially 1
    (same source; see `clamped` and `within_bounds`).
    """

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        gate_init: float | None = None,
        learn_temperature: bool = False,
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, learned=count, project=project, dropout=dropout, rngs=rngs)
        draw = uniform(_prompt_bound(patch, self.learned_width))
        self.shallow = nnx.Param(draw(rngs.params(), (1, 1, count, self.learned_width)))
        self.gate = None if gate_init is None else nnx.Param(jnp.full(depth - 1, -float(gate_init)))
        self.temperature = nnx.Param(jnp.ones(depth)) if learn_temperature else None
        self.count, self.key_values, self.depth = count, 0, depth

    @classmethod
    def options(cls, settings: ConfigDict, shape: BackboneShape) -> dict[str, Any]:
        gate_init = settings.gate_init if settings.gated else None
        gates = {"gate_init": gate_init, "learn_temperature": settings.learn_temperature}
        return super().options(settings, shape) | gates

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(
            self.prepare(self.shallow[...], batch, rngs),
            carry=jnp.ones(self.depth - 1) if self.gate is None else jax.nn.sigmoid(self.gate[...]),
            temperature=None if self.temperature is None else clamped(self.temperature[...], *TEMPERATURES),
        )


@jax.custom_jvp
def clamped(value: jax.Array, low: float, high: float) -> jax.Array:
    """Return `value` clamped to low … high, with the derivative 1 everywhere, also at the bounds and beyond them.

    The derivative of a parameter that was clamped in place, as in GateVPT's code: that of `jnp.clip` is 0 beyond the
    bounds, so that a parameter which left them would never return.
    """
    return jnp.clip(value, low, high)


@clamped.defjvp
def _derivative_of_clamped(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return clamped(*primals), tangents[0]


def within_bounds(params: Params) -> Params:
    """Return parameters with those in `BOUNDS` clamped.

    A training step begins with it: GateVPT's code clamps the stored temperatures before each forward pass, and its
    optimizer updates and decays the clamped values.
    """
    found = {path: rules.first_match(BOUNDS, path, None) for path in params}
    return {path: jnp.clip(value, *found[path]) if found[path] else value for path, value in params.items()}
