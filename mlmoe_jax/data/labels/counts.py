"""The labels of a training split, as losses use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Float64, Integer

from mlmoe_jax.data.label_codes import targets


@dataclass(frozen=True)
class TrainingLabels:
    """The labels of N training images and K labels. They are counted only if a loss depends on the counts.

    Attributes:
      codes: label codes i8[N,K].
      difficult: `data.difficult_train`.
      steps_per_epoch: the number of steps per pass over the images.
      seed: seed of values that a loss draws per image.
    """

    codes: Integer[np.ndarray, "n k"]
    difficult: str
    steps_per_epoch: int = 1
    seed: int = 0

    @cached_property
    def positives(self) -> Float64[np.ndarray, " k"]:
        """The number of images with each label."""
        return self._counts[0]

    @cached_property
    def unknown_share(self) -> float:
        """The share of unknown labels."""
        return 1 - self._counts[1].sum() / max(1, self.codes.size)

    def has_negatives(self) -> bool:
        """Return whether a label is known to be absent."""
        return any((~positive & known).any() for positive, known in self._parts())

    def negatives_over_positives(self, unknown_negative: bool) -> Float32[np.ndarray, " k"]:
        """Return known negatives / positives per label; 1 for labels without positives.

        With `unknown_negative`, unknown labels count as negatives.
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
