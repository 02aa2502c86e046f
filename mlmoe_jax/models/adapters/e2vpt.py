"""E2VPT (Han et al., ICCV 2023): deep prompts, additional keys and values, and masks by which prompts are pruned."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.adapters.prompts import DeepPrompts
from mlmoe_jax.models.contracts import BackboneShape, Prompts
from mlmoe_jax.models.layers.initializers import uniform

SEGMENTS = 16  # of a prompt that can be pruned, interleaved, as in the authors' code
PRUNING_MASKS = (r"^prompts/(token|segment)_mask$", False)  # the rule that freezes the masks


class PrunablePrompts(DeepPrompts):
    """The prompts of E2VPT: deep prompts, additional keys and values, and pruning masks.

    key_values: m tokens per block that are appended to the keys and values after the projection (E2VPT, sec. 3.2),
    with the heads concatenated. shared: keys and values are one tensor, the default of its code.
    segments: 0 = no masks. Otherwise each projected prompt is multiplied by its token mask, and its channel c by its
    segment mask c mod `segments`; all blocks share the masks (E2VPT, sec. 3.3; segments are contiguous channels in
    the paper and interleaved in its code).
    token_mask, segment_mask: f32[P], f32[P,segments], initial values; None = ones.
    absent: prompts whose token mask is 0 are masked out for all tokens. Otherwise they remain as zero vectors that are
    attended to, as in its code.
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
        project: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        super().__init__(depth, width, patch, count=count, project=project, dropout=dropout, rngs=rngs)
        if segments and width % segments:
            raise UserError(
                f"prompts of width {width} do not divide into {segments} segments, so they cannot be pruned"
            )
        self.key_values, self.segments, self.absent = key_values, segments, absent
        if key_values:
            # the fan-in of torch's kaiming_uniform for [heads, m, D/heads] is m·D/heads
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
        wrong, rows = super().mistakes(settings), [str(row) for row in settings.kept_segments]
        if any(set(row) - {"0", "1"} for row in (settings.kept_tokens, *rows)):
            wrong.append("model.prompts.kept_tokens and kept_segments are made of the digits 0 and 1")
        expected_rows = [SEGMENTS] * settings.count
        if (settings.kept_tokens and len(settings.kept_tokens) != settings.count) or (
            rows and [len(row) for row in rows] != expected_rows
        ):
            wrong.append(
                f"model.prompts.kept_tokens must have {settings.count} digits, and kept_segments {settings.count} "
                f"rows of {SEGMENTS}"
            )
        return wrong

    def __call__(self, batch: int, *, rngs: nnx.Rngs | None = None) -> Prompts:
        tokens, present = self.prepare(self.deep[...], batch, rngs), None
        if self.segments:
            segments = jnp.tile(self.segment_mask[...], (1, tokens.shape[-1] // self.segments))
            tokens = tokens * self.token_mask[...][:, None] * segments
            present = self.token_mask[...] != 0 if self.absent else None
        key_value = self.key_value[...] if self.key_values else None
        return Prompts(tokens, present=present, key_value=key_value)


def _bits(text: str) -> np.ndarray:
    """Convert "1101" to f32[4]."""
    return np.array([float(digit) for digit in text], np.float32)
