"""The labels of a training split, as losses use them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32, Float64

from mlmoe_jax.data.label_codes import DIFFICULT, POSITIVE, UNKNOWN
from mlmoe_jax.data.label_matrix import LabelCodes, LabelMatrix
from mlmoe_jax.runtime.array_types import Ints


@dataclass(frozen=True)
class TrainingLabels:
    """The labels of the N training images, with statistics that losses use. A statistic is computed on access.

    Attributes:
      codes: label codes i8[N,K]. A dense array is converted.
      difficult: `data.difficult_train`, the treatment of the code DIFFICULT.
      seed: the seed of random values that a loss draws per image.
      prior: f[K], the estimated fraction of images with each label; None if there is no estimate.
      tags: the indices of the K labels among all labels of the model, which are all but values of attributes.
    """

    codes: LabelCodes
    difficult: str
    steps_per_epoch: int = 1
    seed: int = 0
    prior: Float[np.ndarray, " k"] | None = None
    tags: Ints | slice = field(default_factory=lambda: slice(None))

    def __post_init__(self):
        object.__setattr__(self, "codes", LabelMatrix.of(self.codes))

    @cached_property
    def positives(self) -> Float64[np.ndarray, " k"]:
        """The number of positive images of each label, f64[K]."""
        return self._counts[0]

    @cached_property
    def unknown_share(self) -> float:
        """The fraction of the N × K labels that are unknown."""
        size = math.prod(self.codes.shape)
        return 1 - self._counts[1].sum() / size if size else 0.0

    def has_negatives(self) -> bool:
        """Whether at least one label of an image is known to be negative."""
        positives, known = self._counts
        return bool((positives < known).any())

    def negatives_over_positives(self, unknown_negative: bool) -> Float32[np.ndarray, " k"]:
        """Return f32[K], the number of negatives divided by the number of positives, at least 0.001.

        The value is 1 for labels without positives. `unknown_negative`: whether unknown labels count as negatives.
        """
        positives, known = self._counts
        negatives = (len(self.codes) if unknown_negative else known) - positives
        weight = np.where(positives > 0, negatives / np.maximum(positives, 1), 1.0)
        return np.maximum(weight, 1e-3).astype(np.float32)

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        positive, unknown, difficult = map(self.codes.count, (POSITIVE, UNKNOWN, DIFFICULT))
        known = len(self.codes) - unknown
        if self.difficult == "positive":
            positive = positive + difficult
        elif self.difficult == "ignore":
            known = known - difficult
        return positive.astype(np.float64), known.astype(np.float64)
