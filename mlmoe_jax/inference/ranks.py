"""Ranks: the scores of a label, compared over the images of a prediction.

The scores of an image-text model are comparable between images, but not between labels: all scores of one label may be
below 0.001, and all scores of another label above 0.1. The rank of a label for an image is a real number: its logit,
standardized by the mean and the standard deviation of the label's logits over all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from jaxtyping import Float

LEAST_IMAGES = 8  # for a mean and a standard deviation
LEAST_RANK = 1.5  # of an assigned label, by default
LEAST_LABELS = 3  # of which ranks say more than the order of the images


@dataclass(frozen=True)
class Ranks:
    """The mean f64[K] and the standard deviation f64[K] of the logits of K labels over images.

    A deviation of 0 is replaced by 1.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, outputs: Sequence[dict[str, Any]]) -> Self | None:
        """Return the mean and deviation over all readable images; None for fewer than LEAST_IMAGES images.

        `outputs` are results of the function that `make_eval_step` returns, one per batch.
        """
        logits = [output["logits"][(output["id"] >= 0) & (output["mask"] > 0)] for output in outputs]
        values = np.concatenate(logits).astype(np.float64)
        if len(values) < LEAST_IMAGES:
            return None
        deviation = values.std(axis=0)
        return cls(values.mean(axis=0), np.where(deviation > 0, deviation, 1.0))

    def __call__(self, logits: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
        """Return the ranks f64[K] for the logits of one image, in standard deviations above the mean."""
        return (logits - self.mean) / self.deviation


def best_ranked(ranks: Float[np.ndarray, " k"], top_k: int | None) -> np.ndarray:
    """Return the indices of the `top_k` labels with the highest ranks, highest first.

    If `top_k` is None, return all labels with a rank of at least LEAST_RANK.
    """
    order = np.argsort(-ranks, kind="stable")
    return order[: top_k or np.count_nonzero(ranks >= LEAST_RANK)]
