"""Label codes: whether an image has a label, as every source, file and metric states it.

A code is NEGATIVE or POSITIVE, UNKNOWN if nobody has looked for the label, or DIFFICULT if the label is present but
hard to see. Codes are stored as i8[N,K] for N images and K labels.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Integer

NEGATIVE, POSITIVE, UNKNOWN, DIFFICULT = 0, 1, -1, 2
FEW_POSITIVES = 10  # with fewer, the metrics of a label are rough
CODE_OF_CELL = {
    **{"1": POSITIVE, "0": NEGATIVE, "": UNKNOWN, "1.0": POSITIVE, "0.0": NEGATIVE},
    **dict.fromkeys(("True", "true", "TRUE"), POSITIVE),
    **dict.fromkeys(("False", "false", "FALSE"), NEGATIVE),
}


def present_codes(difficult: str) -> tuple[int, ...]:
    """Return the codes of labels that an image has, by the treatment of the code DIFFICULT, as in `targets`."""
    return (POSITIVE,) if difficult == "negative" else (POSITIVE, DIFFICULT)


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
