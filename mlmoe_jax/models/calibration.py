"""Corrected probabilities: an increasing function of the logit of each label, on the host and inside jit.

Shape letters: K labels, J knots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

if TYPE_CHECKING:
    import jax

Floats = NDArray[np.float64]
_LIMITS = -104.0, 25 * np.log(2)  # logits of the numbers that float32 rounds to 0 and to 1
_SMALLEST = 1e-30  # in place of a zero in a denominator


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return σ(logits) in float64, f64[...], without overflow."""
    logits = np.asarray(logits, np.float64)
    return np.exp(-np.logaddexp(0, -logits))


def logits_of(scores: np.ndarray) -> Floats:
    """Return the logits f64[...] of stored probabilities, which float32 may have rounded to 0 or 1."""
    return np.clip(logit(np.asarray(scores, np.float64)), *_LIMITS)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A function from logits to probabilities that increases strictly for each label; by default the sigmoid.

    The probability of a logit z is q = w·r(σ(z)) + (1 − w)·σ(a·z + b), where r interpolates linearly between knots. If
    thresholds c of q are given, it is q/2c below c, and 1/2 + (q − c)/2(1 − c) from c on.

    Attributes:
      scale, offset: a > 0 and b, f64[K].
      weight: w in [0, 1), f64[K].
      knots: the scores and values of r for each label, f64[2,J]; empty: w is 0.
      middle: c, f64[K], above 1 for a label that is never predicted; None: q is returned.
      fitted_on: the split of the fit, "" for the sigmoid.
    """

    scale: Floats | float = 1.0
    offset: Floats | float = 0.0
    weight: Floats | float = 0.0
    knots: Sequence[Floats] = ()
    middle: Floats | None = None
    fitted_on: str = ""

    def __call__(self, logits: Any) -> Any:
        """Return the probabilities of logits [...,K]: float64 for an array of NumPy, else for use inside jit."""
        host = isinstance(logits, np.ndarray)
        if host:
            sigmoid, where = probabilities, np.where
        else:
            import jax  # which a correction on the host does not need

            sigmoid, where = jax.nn.sigmoid, jax.numpy.where
        scores = sigmoid(self.scale * logits + self.offset)
        if self.knots:
            interpolated = self._on_host(sigmoid(logits)) if host else self._in_program(sigmoid(logits))
            scores = self.weight * interpolated + (1 - self.weight) * scores
        if self.middle is None:
            return scores
        above = (scores - self.middle) / np.maximum(1 - self.middle, _SMALLEST)
        return where(scores < self.middle, scores / np.maximum(self.middle, _SMALLEST), 1 + above) / 2

    def _on_host(self, scores: Floats) -> Floats:
        return np.stack([np.interp(scores[..., k], *knots) for k, knots in enumerate(self.knots)], axis=-1)

    def _in_program(self, scores: jax.Array) -> jax.Array:
        """Interpolate by a sum of one ramp per interval, because a search is a loop that export formats lack."""
        most = max(2, *(knots.shape[1] for knots in self.knots))
        padded = np.stack([np.pad(knots, ((0, 0), (0, most - knots.shape[1])), "edge") for knots in self.knots])
        places, values = padded[:, 0], padded[:, 1]
        widths = np.diff(places)
        ramps = ((scores[..., None] - places[:, :-1]) / np.where(widths > 0, widths, 1)).clip(0, 1)
        return values[:, 0] + (np.diff(values) * ramps).sum(axis=-1)
