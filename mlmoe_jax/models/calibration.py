"""Calibrated probabilities: an increasing function of the logit of each label, on the host and inside jit.

Shape letters: K labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlmoe_jax.models.attributes import NO_SOFTMAX, AttributeSoftmax
from mlmoe_jax.runtime.array_types import Floats


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of logits [...] as f64[...], without overflow."""
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits))


@dataclass(frozen=True, eq=False)
class Calibration:
    """The function σ(a·z + b) from a logit z to the probability of each label; by default the sigmoid."""

    scale: Floats | float = 1.0  # a > 0, f64[K] or one number for all labels
    offset: Floats | float = 0.0  # b, f64[K] or one number for all labels
    fitted_on: str = ""  # the name of the split on which a and b were fitted; "" for the plain sigmoid
    softmax: AttributeSoftmax = NO_SOFTMAX  # of a·log p + b for values of attributes

    def __call__(self, logits: Any) -> Any:
        """Return the probabilities of logits [...,K]: float64 for a NumPy array, else a JAX array inside jit."""
        corrected = self.softmax(self.scale * self.softmax.logarithms(logits) + self.offset)
        if isinstance(logits, np.ndarray):
            return probabilities(corrected)
        import jax  # which a correction on the host does not need

        return jax.nn.sigmoid(corrected)
