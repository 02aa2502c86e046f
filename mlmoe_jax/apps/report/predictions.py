"""The predictions of a run on scored images with their mistakes, and thumbnails of images.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.explain import thumbnail

SIDE = 160  # maximum side of a thumbnail in pixels
MOST_MISTAKES = 24  # per kind
# (name, property of Predictions, sign that makes the worst score the highest) of each kind of mistake.
KINDS = (("Wrongly predicted", "false", 1), ("Missed", "missed", -1))


@dataclass(frozen=True)
class Predictions:
    """Scored images with the thresholds of predictions.

    Attributes:
      scored: the images with their reported scores.
      labels: the names of the labels.
      thresholds: f64[K].
      origin: the origin of the thresholds, as the end of a sentence.
    """

    scored: SplitScores
    labels: Sequence[str]
    thresholds: np.ndarray
    origin: str

    @cached_property
    def predicted(self) -> np.ndarray:
        """bool[N,K], the labels that are predicted."""
        return self.scored.scores >= self.thresholds

    @cached_property
    def missed(self) -> np.ndarray:
        """bool[N,K], present labels below their threshold."""
        return (self.scored.codes == POSITIVE) & ~self.predicted

    @cached_property
    def false(self) -> np.ndarray:
        """bool[N,K], absent labels that are predicted."""
        return (self.scored.codes == NEGATIVE) & self.predicted

    @cached_property
    def mistakes(self) -> np.ndarray:
        """i64[N], the number of mistakes of each image."""
        return self.missed.sum(axis=1) + self.false.sum(axis=1)

    def worst(self, kind: str, sign: int) -> list[tuple[int, int]]:
        """Return (image, label) of the most confident mistakes of a kind of KINDS, the worst first."""
        images, labels = np.nonzero(getattr(self, kind))
        order = np.argsort(-sign * self.scored.scores[images, labels], kind="stable")[:MOST_MISTAKES]
        return list(zip(images[order].tolist(), labels[order].tolist(), strict=True))

    @cached_property
    def mistaken(self) -> list[str]:
        """The names of the images with the most confident mistakes."""
        names = (str(self.scored.ids[n]) for _, kind, sign in KINDS for n, _ in self.worst(kind, sign))
        return list(dict.fromkeys(names))


def read_thumbnails(split: Split, data: ConfigDict, rows: Iterable[int]) -> dict[str, bytes]:
    """Return JPEG files of the images of some rows by name, without those that cannot be read.

    Args:
      split: the images.
      data: `config.data`, with the settings of decoding.
      rows: the rows of the images.
    """
    decoding, images = Decoding.from_config(data, SIDE), {}
    for row in rows:
        with contextlib.suppress(BadImage):
            images[str(split.ids[row])] = thumbnail(split.images.read(row, decoding), SIDE)
    return images
