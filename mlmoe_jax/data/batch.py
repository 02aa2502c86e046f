"""The arrays of a batch, and its labels from a split's label codes.

A batch is `image u8[B,H,W,3]`, `mask f32[B]` (0 = padding) and `id i32[B]`, the row of the split; in training
also `label f32[B,K]` in {0,1} and `label_mask f32[B,K]` (0 = unknown or ignored). If the features of the images are
cached, `cls f32[B,D]` and `patches f32[B,h,w,D]`, as far as the head reads them, replace `image`.
"""

import numpy as np
from jaxtyping import Float32, Integer

from mlmoe_jax.data.split import DIFFICULT, POSITIVE, UNKNOWN


def targets(
    labels: Integer[np.ndarray, "*rows"], difficult: str
) -> tuple[Float32[np.ndarray, "*rows"], Float32[np.ndarray, "*rows"]]:
    """Convert label codes to (label, label_mask).

    difficult: the treatment of DIFFICULT: `negative`, `ignore` or `positive`.
    """
    positive = labels == POSITIVE
    known = labels != UNKNOWN
    if difficult == "positive":
        positive |= labels == DIFFICULT
    elif difficult == "ignore":
        known &= labels != DIFFICULT
    return positive.astype(np.float32), known.astype(np.float32)
