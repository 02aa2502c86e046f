"""Ranks: the scores of a label, compared over the images of a prediction.

The scores of an image-text model are comparable between images, but not between labels: all scores of one label may be
below 0.001, and all of another above 0.1. The rank of a label for an image is the logit, standardized over the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float

LEAST_IMAGES = 8  # for a mean and a standard deviation
LEAST_RANK = 1.5  # of an assigned label, by default


@dataclass(frozen=True)
class Ranks:
    """The mean f64[K] of the logits of K labels over images, and their standard deviation f64[K], 1 where it is 0."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, outputs: Sequence[dict[str, Any]]) -> Self | None:
        """Return the distribution over all readable images of `make_eval_step`; None for fewer than LEAST_IMAGES."""
        logits = [output["logits"][(output["id"] >= 0) & (output["mask"] > 0)] for output in outputs]
        values = np.concatenate(logits).astype(np.float64)
        if len(values) < LEAST_IMAGES:
            return None
        deviation = values.std(axis=0)
        return cls(values.mean(axis=0), np.where(deviation > 0, deviation, 1.0))

    def __call__(self, logits: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
        """Return the ranks of the labels of an image, in standard deviations above the mean of all images."""
        return (logits - self.mean) / self.deviation


def best_ranked(ranks: Float[np.ndarray, " k"], top_k: int | None) -> np.ndarray:
    """Return the indices of the `top_k` highest ranks, in order; None = the first, and all of at least LEAST_RANK."""
    order = np.argsort(-ranks, kind="stable")
    return order[: top_k or max(1, np.count_nonzero(ranks >= LEAST_RANK))]
