"""Label codes: whether an image has a label, as every source, file and metric states it.

A code is NEGATIVE or POSITIVE, UNKNOWN if nobody has looked for the label, or DIFFICULT if the label is present but
hard to see. Codes are stored as i8[N,K] for N images and K labels.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Integer

NEGATIVE, POSITIVE, UNKNOWN, DIFFICULT = 0, 1, -1, 2
FEW_POSITIVES = 10  # with fewer, the metrics of a label are rough


def has_positive(labels: Integer[np.ndarray, "n k"], difficult: str = "negative") -> Bool[np.ndarray, " n"]:
    """Return whether each image has a positive label.

    `difficult` is the treatment of the code DIFFICULT, as in `targets`. With `positive` and `ignore`, a label with this
    code counts as positive. With `negative`, it does not.
    """
    enough = (POSITIVE,) if difficult == "negative" else (POSITIVE, DIFFICULT)
    return np.any(np.isin(labels, enough), axis=1)


def targets(
    codes: Integer[np.ndarray, "*rows"], difficult: str
) -> tuple[Bool[np.ndarray, "*rows"], Bool[np.ndarray, "*rows"]]:
    """Return which labels are positive, and which are known and not ignored, for losses and metrics.

    `difficult` is the treatment of the code DIFFICULT: `negative`, `ignore` or `positive`.
    """
    positive = codes == POSITIVE
    valid = codes != UNKNOWN
    if difficult == "positive":
        positive |= codes == DIFFICULT
    elif difficult == "ignore":
        valid &= codes != DIFFICULT
    return positive, valid


def few_positives(labels: Integer[np.ndarray, "n k"]) -> str:
    """Return "a median of N positives per label" if N is less than FEW_POSITIVES, otherwise "".

    The AP of a label with one positive image is 1/rank of this image. A mean over such labels is therefore noisy.
    """
    counts = (labels == POSITIVE).sum(axis=0)
    if not len(counts) or (median := np.median(counts)) >= FEW_POSITIVES:
        return ""
    return f"a median of {median:g} positives per label"
