"""Which of the given labels are doubtful, by out-of-fold probabilities. N images, K labels.

The score of a label of an image is its self-confidence, and the score of an image is an exponential moving average over
its labels (A. Thyagarajan, E. Snorrason, C. Northcutt and J. Mueller, "Identifying Incorrect Annotations in Multi-Label
Classification Data", arXiv 2211.13895): the lower the score, the more doubtful the label. A label is wrong by confident
learning (C. Northcutt, L. Jiang and I. Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 70,
2021): its probability is beyond a limit, the mean probability of the images that are labeled with the opposite value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE

WEIGHT = 0.8  # of the lower scores in the average, as published
HALF = 0.5  # probability at which a label and its absence are equally probable
LEAST_GAP = 0.2  # between the limits of a label; with less, the fit hardly finds it (docs/labels.md)


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


class Limits(NamedTuple):
    """The limits of the probability p of each label, f64[K]: nan for labels without negative or positive images.

    Attributes:
      absent: the mean p of the negative images. A given label with at most this p is superfluous.
      present: the mean p of the positive images. A label that is not given, with at least this p, is missing.
    """

    absent: Float[np.ndarray, " k"]
    present: Float[np.ndarray, " k"]

    @classmethod
    def of(cls, codes: Int[np.ndarray, "n k"], scores: Float[np.ndarray, "n k"]) -> Limits:
        """Return the limits by the images whose label is known. `scores` are as in `self_confidence`."""
        parts = (np.ma.masked_where(codes != code, scores) for code in (NEGATIVE, POSITIVE))
        return cls(*(part.mean(axis=0).filled(np.nan) for part in parts))

    @property
    def found(self) -> Bool[np.ndarray, " k"]:
        """The labels that the fit finds: `present` exceeds `absent` by LEAST_GAP.

        The difference is the coefficient of discrimination (T. Tjur, "Coefficients of determination in logistic
        regression models", The American Statistician 63, 2009).
        """
        return self.present - self.absent >= LEAST_GAP

    def issues(self, codes: Int[np.ndarray, "n k"], scores: Float[np.ndarray, "n k"]) -> Bool[np.ndarray, "n k"]:
        """Return the labels of images that are superfluous or missing, if the opposite value is also more probable."""
        superfluous = (scores <= self.absent) & (scores < HALF)
        missing = (scores >= self.present) & (scores > HALF)
        return np.where(codes == POSITIVE, superfluous, missing) & (codes != DIFFICULT)
