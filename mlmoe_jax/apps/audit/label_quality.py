"""Scores of the given labels by out-of-fold probabilities: the lower the score, the more doubtful the label.

The score of a label of an image is its self-confidence, and the score of an image is an exponential moving average over
its labels (A. Thyagarajan, E. Snorrason, C. Northcutt and J. Mueller, "Identifying Incorrect Annotations in Multi-Label
Classification Data", arXiv 2211.13895). N images, K labels.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE

WEIGHT = 0.8  # of the lower scores in the average, as published


def self_confidence(codes: Int[np.ndarray, "n k"], scores: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Return the probability of each given label: p if it is positive, otherwise 1 − p; nan if it is difficult.

    `scores` are p, the probabilities that the labels are present, from a model that was not trained on the image. An
    unknown label is scored as a negative label: its only useful correction is to make it positive.
    """
    confidence = np.where(codes == POSITIVE, scores, 1 - scores)
    return np.where(codes == DIFFICULT, np.nan, confidence)


def image_quality(confidence: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Return the label quality of each image, an exponential moving average of its `self_confidence`.

    With the scores in decreasing order s_1 ≥ s_2 ≥ …, the average is e_1 = s_1, e_t = a·s_t + (1 − a)·e_{t−1}, where a
    = WEIGHT. The quality is the last e_t, so the lowest score has the weight a. Scores of nan are left out. If all
    scores of an image are nan, its quality is nan.
    """
    descending = -np.sort(-confidence, axis=1)  # nan is last
    quality = descending[:, 0]
    for column in descending.T[1:]:
        quality = np.where(np.isnan(column), quality, WEIGHT * column + (1 - WEIGHT) * quality)
    return quality
