"""Learned prompt tokens of a ViT: VPT-deep, VPT-shallow, GateVPT and E2VPT."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.models.contracts import Adapter, BackboneShape
from mlmoe_jax.models.layers.dropout import drops
from mlmoe_jax.models.layers.initializers import Constant, Dtype, torch_linear, uniform
from mlmoe_jax.models.outputs import Prompts
from mlmoe_jax.models.params import Params

TEMPERATURES = (0.01, 10.0)
SEGMENTS = 16  # interleaved segments per prompt, as in the authors' code
PRUNING_MASKS = (r"^prompts/(token|segment)_mask$", False)  # the rule that freezes the masks


class NoPrompts(Adapter):
    """The prompts of a model without prompts."""

    changes_features = False


class _PromptTokens(Adapter):
    """The base class of all prompt methods: an optional projection from a narrower width, and dropout (VPT's code).

    The prompts have the width `project`, and a linear layer projects them to the width of the backbone. If `project` is
    0, they have the width of the backbone and are not projected. Dropout then applies to their entries, independently
    per image. `learned` is the number of prompts in all blocks together.
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, learned: int, rngs: nnx.Rngs):
        self.learned = learned
        self.learned_width = settings.project or shape.width
        draw = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        projects = {"kernel_init": draw, "rngs": rngs}
        self.projection = torch_linear(settings.project, shape.width, **projects) if settings.project else None
        self.dropout = nnx.Dropout(settings.dropout, deterministic=True)

    def draw(self, sets: int, count: int, patch: int, rngs: nnx.Rngs) -> nnx.Param:
        """Draw `sets` sets of prompts from U(±√(6/(3·patch² + D))), as in the visual-prompt-tuning code."""
        bound = math.sqrt(6 / (3 * patch**2 + self.learned_width))
        return nnx.Param(uniform(bound)(rngs.params(), (sets, 1, count, self.learned_width)))

    def macs(self, tokens: int) -> int:
        """Return the multiply-adds of the projection of all prompts, which is computed once per batch."""
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
        if not drops(self.dropout):
            return tokens
        tokens = jnp.broadcast_to(tokens, (tokens.shape[0], batch, *tokens.shape[2:]))
        return self.dropout(tokens, rngs=rngs)


class DeepPrompts(_PromptTokens):
    """One set of P prompt tokens per block, f32[L,1,P,D] (VPT, sec. 3.2; ML-VPT, eq. 8).

    Each prompt attends to all prompts of its block, unless `prompt_mask` returns a mask.
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        self.count = self.prompts_per_block(settings)
        super().__init__(settings, shape, learned=shape.depth * self.count, rngs=rngs)
        self.deep = self.draw(shape.depth, self.count, shape.patch, rngs)
        mask = self.prompt_mask(settings)
        self.mask = None if mask is None else Constant(mask)

    @classmethod
    def prompts_per_block(cls, settings: ConfigDict) -> int:
        """Return P."""
        return settings.count

    @classmethod
    def prompt_mask(cls, settings: ConfigDict) -> np.ndarray | None:
        """Return bool[P,P], True if a prompt (row) may attend to a prompt (column); None = all True."""
        return None

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(self.prepare(self.deep[...], batch, rngs), mask=None if self.mask is None else self.mask.value)


class ShallowPrompts(_PromptTokens):
    """P prompts that are carried from the first block through all blocks (VPT, sec. 3.2), or gated (GateVPT).

    GateVPT is "Improving visual prompt tuning for self-supervised vision transformers" (Yoo et al., ICML 2023). If
    `gated`, the prompts entering block i+1 are g·(prompts leaving block i) + (1 − g)·(prompts entering block i) with
    g = σ(θᵢ), for all blocks but the last; θ starts at −`gate_init`, as in GateVPT's code. `learn_temperature` divides
    the attention logits of each block by a learned number, clamped to 0.01 … 10, initially 1, as in GateVPT (see
    `clamp` and `clip_to_bounds`).
    """

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        super().__init__(settings, shape, learned=settings.count, rngs=rngs)
        self.count = settings.count
        self.depth = shape.depth
        self.shallow = self.draw(1, self.count, shape.patch, rngs)
        self.gate = nnx.Param(jnp.full(self.depth - 1, -float(settings.gate_init))) if settings.gated else None
        self.temperature = nnx.Param(jnp.ones(self.depth)) if settings.learn_temperature else None

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        return Prompts(
            self.prepare(self.shallow[...], batch, rngs),
            carry=jnp.ones(self.depth - 1) if self.gate is None else jax.nn.sigmoid(self.gate[...]),
            temperature=None if self.temperature is None else clamp(self.temperature[...], *TEMPERATURES),
        )


class PrunablePrompts(DeepPrompts):
    """The prompts of E2VPT (Han et al., ICCV 2023): deep prompts, additional keys and values, and pruning masks.

    `key_values` tokens per block are appended to the keys and values after the projection (E2VPT, sec. 3.2), with the
    heads concatenated. With `share_key_values`, the default of the authors' code, the keys are also the values.

    With `pruning`, each projected prompt is multiplied by its token mask, and its channel c by its segment mask c mod
    SEGMENTS; all blocks share the masks (E2VPT, sec. 3.3; segments are contiguous channels in the paper and interleaved
    in the authors' code). The masks start with `kept_tokens` and `kept_segments`; if these are empty, with ones. With
    `pruning=fixed` and `pruned=absent`, no token attends to prompts whose token mask is 0. Otherwise tokens attend to
    the zero vectors of these prompts, as in the authors' code.
    """

    prunable = True

    def __init__(self, settings: ConfigDict, shape: BackboneShape, *, dtype: Dtype = None, rngs: nnx.Rngs):
        super().__init__(settings, shape, dtype=dtype, rngs=rngs)
        self.key_values = settings.key_values
        self.pruned = settings.pruning != "none"
        self.absent = settings.pruning == "fixed" and settings.pruned == "absent"
        if self.key_values:
            # torch's kaiming_uniform has the fan-in m·D/heads for [heads, m, D/heads].
            draw = uniform(math.sqrt(6 / (self.key_values * shape.width // shape.heads)))
            size = (shape.depth, 1 if settings.share_key_values else 2, self.key_values, shape.width)
            self.key_value = nnx.Param(draw(rngs.params(), size))
        if self.pruned:
            tokens = settings.kept_tokens or "1" * self.count
            rows = settings.kept_segments or ["1" * SEGMENTS] * self.count
            self.token_mask = nnx.Param(_bits(tokens))
            self.segment_mask = nnx.Param(jnp.stack([_bits(row) for row in rows]))

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
        if not self.pruned:
            return Prompts(tokens, key_value=key_value)
        token_mask = self.token_mask[...]
        segments = jnp.tile(self.segment_mask[...], (1, tokens.shape[-1] // SEGMENTS))
        tokens = tokens * token_mask[:, None] * segments
        return Prompts(tokens, present=token_mask != 0 if self.absent else None, key_value=key_value)


def _bits(text: str) -> jax.Array:
    """Convert "1101" to f32[4]."""
    return jnp.array([float(digit) for digit in text], jnp.float32)


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
    """Return parameters with temperatures in TEMPERATURES, with which a training step begins.

    GateVPT's code clamps the stored temperatures before each forward pass, and its optimizer updates and decays the
    clamped values.
    """
    path = "prompts/temperature"
    return {**params, path: jnp.clip(params[path], *TEMPERATURES)} if path in params else params
