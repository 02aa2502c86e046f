"""Learned prompt tokens of a ViT: VPT-deep, VPT-shallow, GateVPT and E2VPT."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models import rules
from mlmoe_jax.models.contracts import Adapter, BackboneShape
from mlmoe_jax.models.layers.initializers import Constant, Dtype, torch_linear, uniform
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.models.params import Params

TEMPERATURES = (0.01, 10.0)
BOUNDS = ((r"^prompts/temperature$", TEMPERATURES),)  # bounds of parameters, as rules: (regex of paths, (low, high))
SEGMENTS = 16  # interleaved segments per prompt, as in the authors' code
PRUNING_MASKS = (r"^prompts/(token|segment)_mask$", False)  # the rule that freezes the masks


class NoPrompts(Adapter):
    """The prompts of a model without prompts: `from_config` returns None."""

    changes_features = False

    @classmethod
    def from_config(cls, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs) -> None:
        return None


class _PromptTokens(Adapter):
    """The base class of all prompt methods: an optional projection from a narrower width, and dropout (VPT's code).

    Args:
      learned: the number of prompts in all blocks.
      project: the width of the learned prompts, which one linear layer projects to the width of the backbone; 0 = the
        width of the backbone, without projection.
      dropout: dropout rate of the entries of the projected prompts, independent per image.
    """

    key_values = 0

    def __init__(self, width: int, *, learned: int, project: int = 0, dropout: float = 0.0, rngs: nnx.Rngs):
        self.learned = learned
        self.learned_width = project or width
        draw = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.projection = torch_linear(project, width, kernel_init=draw, rngs=rngs) if project else None
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    @classmethod
    def from_config(cls, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype, rngs: nnx.Rngs) -> Self:
        return cls(shape.depth, shape.width, shape.patch, **cls.options(settings, shape), rngs=rngs)

    def draw(self, sets: int, count: int, patch: int, rngs: nnx.Rngs) -> nnx.Param:
        """Draw `sets` sets of prompts from U(±√(6/(3·patch² + D))), as in the visual-prompt-tuning code."""
        bound = math.sqrt(6 / (3 * patch**2 + self.learned_width))
        return nnx.Param(uniform(bound)(rngs.params(), (sets, 1, count, self.learned_width)))

    @classmethod
    def options(cls, settings: ConfigDict, shape: BackboneShape) -> dict[str, Any]:
        """Return the keyword arguments of the constructor, without depth, width and patch of the backbone."""
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
        return ["model.prompts.count is 0; for a model without prompts, set model.prompts.kind=none"]

    def prepare(self, tokens: jax.Array, batch: int, rngs: nnx.Rngs | None) -> jax.Array:
        """Return prompts f32[L,1,P,d], projected to width D and, in training, with dropout: f32[L, 1 or B, P, D]."""
        if self.projection is not None:
            tokens = self.projection(tokens)
        if self.dropout.deterministic or not self.dropout.rate:
            return tokens
        tokens = jnp.broadcast_to(tokens, (tokens.shape[0], batch, *tokens.shape[2:]))
        return self.dropout(tokens, rngs=rngs)


class DeepPrompts(_PromptTokens):
    """One set of P prompt tokens per block, f32[L,1,P,D] (VPT, sec. 3.2; ML-VPT, eq. 8).

    `mask` is bool[P,P], True if a prompt (row) may attend to a prompt (column); None = all True. `settings` are those
    of `_PromptTokens`.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        mask: np.ndarray | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(width, learned=depth * count, rngs=rngs, **settings)
        self.deep = self.draw(depth, count, patch, rngs)
        self.count = count
        self.mask = None if mask is None else Constant(mask)

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(self.prepare(self.deep[...], batch, rngs), mask=None if self.mask is None else self.mask.value)


class ShallowPrompts(_PromptTokens):
    """P prompts that are carried from the first block through all blocks (VPT, sec. 3.2), or gated (GateVPT).

    GateVPT is "Improving visual prompt tuning for self-supervised vision transformers" (Yoo et al., ICML 2023).

    Args:
      gate_init: None for VPT-shallow. With a number θ₀, the prompts entering block i+1 are g·(prompts leaving block i)
        + (1 − g)·(prompts entering block i) with g = σ(θᵢ), for all blocks but the last; θ starts at −θ₀, as in
        GateVPT's code.
      learn_temperature: divide the attention logits of each block by a learned number, clamped to 0.01 … 10, initially
        1, as in GateVPT (see `clamp` and `clip_to_bounds`).
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
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(width, learned=count, rngs=rngs, **settings)
        self.shallow = self.draw(1, count, patch, rngs)
        self.gate = None if gate_init is None else nnx.Param(jnp.full(depth - 1, -float(gate_init)))
        self.temperature = nnx.Param(jnp.ones(depth)) if learn_temperature else None
        self.count = count
        self.depth = depth

    @classmethod
    def options(cls, settings: ConfigDict, shape: BackboneShape) -> dict[str, Any]:
        gate_init = settings.gate_init if settings.gated else None
        gates = {"gate_init": gate_init, "learn_temperature": settings.learn_temperature}
        return super().options(settings, shape) | gates

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(
            self.prepare(self.shallow[...], batch, rngs),
            carry=jnp.ones(self.depth - 1) if self.gate is None else jax.nn.sigmoid(self.gate[...]),
            temperature=None if self.temperature is None else clamp(self.temperature[...], *TEMPERATURES),
        )


class PrunablePrompts(DeepPrompts):
    """The prompts of E2VPT (Han et al., ICCV 2023): deep prompts, additional keys and values, and pruning masks.

    Args:
      key_values: m tokens per block that are appended to the keys and values after the projection (E2VPT, sec. 3.2),
        with the heads concatenated.
      shared: use one tensor for keys and values, the default of the authors' code.
      heads: number of attention heads.
      segments: 0 = no masks. Otherwise each projected prompt is multiplied by its token mask, and its channel c by its
        segment mask c mod `segments`; all blocks share the masks (E2VPT, sec. 3.3; segments are contiguous channels in
        the paper and interleaved in the authors' code).
      token_mask: initial values f32[P]; None = ones.
      segment_mask: initial values f32[P,segments]; None = ones.
      absent: prompts whose token mask is 0 are masked out for all tokens. Otherwise tokens attend to their zero
        vectors, as in the authors' code.
    """

    prunable = True

    def __init__(
        self,
        depth: int,
        width: int,
        patch: int,
        *,
        count: int,
        key_values: int,
        shared: bool = True,
        heads: int,
        segments: int = 0,
        token_mask: np.ndarray | None = None,
        segment_mask: np.ndarray | None = None,
        absent: bool = False,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        super().__init__(depth, width, patch, count=count, rngs=rngs, **settings)
        self.key_values = key_values
        self.segments = segments
        self.absent = absent
        if key_values:
            # torch's kaiming_uniform has the fan-in m·D/heads for [heads, m, D/heads].
            draw = uniform(math.sqrt(6 / (key_values * width // heads)))
            self.key_value = nnx.Param(draw(rngs.params(), (depth, 1 if shared else 2, key_values, width)))
        if segments:
            ones = np.ones((count, segments), np.float32)
            self.token_mask = nnx.Param(jnp.asarray(ones[:, 0] if token_mask is None else token_mask, jnp.float32))
            self.segment_mask = nnx.Param(jnp.asarray(ones if segment_mask is None else segment_mask, jnp.float32))

    @classmethod
    def options(cls, settings: ConfigDict, shape: BackboneShape) -> dict[str, Any]:
        rows = [_bits(row) for row in settings.kept_segments]
        return super().options(settings, shape) | {
            "key_values": settings.key_values,
            "shared": settings.share_key_values,
            "heads": shape.heads,
            "segments": 0 if settings.pruning == "none" else SEGMENTS,
            "token_mask": _bits(settings.kept_tokens) if settings.kept_tokens else None,
            "segment_mask": np.stack(rows) if rows else None,
            "absent": settings.pruning == "fixed" and settings.pruned == "absent",
        }

    @classmethod
    def frozen_rules(cls, settings: ConfigDict) -> tuple[tuple[str, bool], ...]:
        return (PRUNING_MASKS,) if settings.pruning == "fixed" else ()

    @classmethod
    def mistakes(cls, settings: ConfigDict) -> list[str]:
        wrong = super().mistakes(settings)
        tokens = settings.kept_tokens
        rows = [str(row) for row in settings.kept_segments]
        if any(set(row) - {"0", "1"} for row in (tokens, *rows)):
            wrong.append("model.prompts.kept_tokens and kept_segments must consist of the digits 0 and 1")
        wrong_rows = rows and [len(row) for row in rows] != [SEGMENTS] * settings.count
        if (tokens and len(tokens) != settings.count) or wrong_rows:
            wrong.append(
                f"model.prompts.kept_tokens must have {settings.count} digits, and kept_segments {settings.count} "
                f"rows of {SEGMENTS}"
            )
        return wrong

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        tokens = self.prepare(self.deep[...], batch, rngs)
        key_value = self.key_value[...] if self.key_values else None
        if not self.segments:
            return Prompts(tokens, key_value=key_value)
        token_mask = self.token_mask[...]
        segments = jnp.tile(self.segment_mask[...], (1, tokens.shape[-1] // self.segments))
        tokens = tokens * token_mask[:, None] * segments
        return Prompts(tokens, present=token_mask != 0 if self.absent else None, key_value=key_value)


def _bits(text: str) -> np.ndarray:
    """Convert "1101" to f32[4]."""
    return np.array([float(digit) for digit in text], np.float32)


@jax.custom_jvp
def clamp(value: jax.Array, low: float, high: float) -> jax.Array:
    """Return `value` clamped to low … high, with a derivative of 1 everywhere, even outside the bounds.

    GateVPT's code clamps a parameter in place, which has this derivative. The derivative of `jnp.clip` is 0 beyond the
    bounds, so a parameter beyond the bounds would never return.
    """
    return jnp.clip(value, low, high)


@clamp.defjvp
def _clamp_derivative(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return clamp(*primals), tangents[0]


def clip_to_bounds(params: Params) -> Params:
    """Return parameters clamped to their `BOUNDS`, with which a training step begins.

    GateVPT's code clamps the stored temperatures before each forward pass, and its optimizer updates and decays the
    clamped values.
    """
    bounds = {path: rules.first_match(BOUNDS, path, None) for path in params}
    return {path: jnp.clip(value, *bounds[path]) if bounds[path] else value for path, value in params.items()}
