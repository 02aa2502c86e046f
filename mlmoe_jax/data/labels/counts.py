"""The labels of a training split, as losses use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Float32, Float64, Integer

from mlmoe_jax.data.label_codes import targets


@dataclass(frozen=True)
class TrainingLabels:
    """The labels of the N training images, with statistics that losses use. A statistic is computed on access.

    Attributes:
      codes: label codes i8[N,K].
      difficult: `data.difficult_train`, the treatment of the code DIFFICULT.
      seed: the seed of random values that a loss draws per image.
      prior: f[K], the estimated fraction of images with each label; None if there is no estimate.
    """

    codes: Integer[np.ndarray, "n k"]
    difficult: str
    steps_per_epoch: int = 1
    seed: int = 0
    prior: Float[np.ndarray, " k"] | None = None

    @cached_property
    def positives(self) -> Float64[np.ndarray, " k"]:
        """The number of positive images of each label, f64[K]."""
        return self._counts[0]

    @cached_property
    def unknown_share(self) -> float:
        """The fraction of the N × K labels that are unknown."""
        return 1 - self._counts[1].sum() / max(1, self.codes.size)

    def has_negatives(self) -> bool:
        """Whether at least one label of an image is known to be negative."""
        return any((~positive & known).any() for positive, known in self._parts())

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
        positives, known = (np.zeros(self.codes.shape[1]) for _ in range(2))
        for positive, valid in self._parts():
            positives += (positive & valid).sum(axis=0)
            known += valid.sum(axis=0)
        return positives, known

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for codes in np.array_split(self.codes, max(1, len(self.codes) // 10_000)):
            yield targets(codes, self.difficult)
