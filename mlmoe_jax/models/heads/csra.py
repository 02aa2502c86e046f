"""Class-specific residual attention over a feature map (CSRA)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float
from ml_collections import ConfigDict

from mlmoe_jax.models import partition
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.layers.initializers import Dtype, torch_uniform
from mlmoe_jax.models.outputs import LABELS, PATCHES, Features, Prediction
from mlmoe_jax.models.partition import LABEL, axes

TEMPERATURES = {1: (1,), 4: (1, 2, 4, math.inf)} | {heads: (*range(1, heads), math.inf) for heads in (2, 6, 8)}


class CSRAHead(Head):
    """For each label, the mean score of the cells plus λ times an attended score, summed over heads (CSRA, eq. 8).

    The score of cell n is s_n = v·x_n / ‖v‖, for the feature x_n of the cell and the vector v of label and head. The
    attended score is Σ_n a_n s_n, with a = softmax over n of T·s. If there are several heads, the last has T = ∞, so
    its attended score is the largest score. As in the authors' code, v is normalized, there is no bias, and the number
    of heads (1, 2, 4, 6 or 8) determines the temperatures T. λ is `weight`.
    """

    read = (PATCHES,)
    by_label = True

    def __init__(self, width: int, labels: int, *, heads: int = 1, weight: float = 0.1, rngs: nnx.Rngs):
        self.temperatures, self.weight = TEMPERATURES[heads], weight
        draw = torch_uniform(width)
        self.kernel = nnx.Param(draw(rngs.params(), (heads, width, labels)), **axes(None, None, LABEL))

    @classmethod
    def options(cls, head: ConfigDict, dtype: Dtype) -> dict[str, Any]:
        return dict(head.csra)

    @classmethod
    def mistakes(cls, config: ConfigDict) -> list[str]:
        heads = config.model.head.csra.heads
        return [] if heads in TEMPERATURES else [f"model.head.csra.heads is {heads} and must be 1, 2, 4, 6 or 8"]

    def attend(self, features: Features) -> tuple[Float[Array, "h b n k"], Float[Array, "h b n k"]]:
        """Return the scores s and the attention weights a of all cells, f32[H,B,N,K]."""
        patches = partition.shard_images(features.patches).astype(jnp.float32)
        kernel = self.kernel[...]
        scores = jnp.einsum("bnd,hdk->hbnk", patches, kernel / jnp.linalg.norm(kernel, axis=1, keepdims=True))
        weights = [
            jax.nn.one_hot(jnp.argmax(score, axis=1), score.shape[1], axis=1)
            if temperature == math.inf
            else jax.nn.softmax(temperature * score, axis=1)
            for temperature, score in zip(self.temperatures, scores, strict=True)
        ]
        return scores, jnp.stack(weights)

    def attention(self, features: Features) -> dict[str, Array]:
        return {LABELS: self.attend(features)[1].mean(axis=0).swapaxes(1, 2)}

    def __call__(self, features: Features, *, labels: Array | None = None, rngs: nnx.Rngs | None = None) -> Prediction:
        scores, weights = self.attend(features)
        return Prediction(jnp.sum(scores.mean(axis=2) + self.weight * jnp.sum(weights * scores, axis=2), axis=0))
