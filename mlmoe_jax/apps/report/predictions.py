"""The predicted labels of a run on evaluated images, the mistakes among them, and thumbnails of images.

Shape letters: N images, K labels.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.decoding import BadImage, Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.data.split import Split
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.explain import thumbnail
from mlmoe_jax.models.attributes import assign

SIDE = 160  # maximum side of a thumbnail in pixels
VALUE_RULE = "Of an attribute, the most probable value is predicted, whatever its threshold."
MOST_MISTAKES = 24  # per kind
# (name, property of Predictions, sign that makes the worst score the highest) of each kind of mistake.
KINDS = (("Wrongly predicted", "false", 1), ("Missed", "missed", -1))


@dataclass(frozen=True)
class Predictions:
    """Evaluated images with the labels that are predicted at given thresholds.

    Attributes:
      scored: the images with their true labels, and with the probabilities that the run reports.
      thresholds: f64[K], a label is predicted if its probability is at least its threshold.
      origin: the origin of the thresholds, as the end of a sentence.
    """

    scored: SplitScores
    labels: Sequence[str]
    thresholds: np.ndarray
    origin: str
    attributes: Sequence[Attribute] = ()

    @cached_property
    def predicted(self) -> np.ndarray:
        """bool[N,K], whether each label is predicted for each image."""
        return assign(self.scored.scores, self.thresholds, self.attributes)

    @cached_property
    def missed(self) -> np.ndarray:
        """bool[N,K], the false negatives: present labels that are not predicted."""
        return (self.scored.codes == POSITIVE) & ~self.predicted

    @cached_property
    def false(self) -> np.ndarray:
        """bool[N,K], the false positives: absent labels that are predicted."""
        return (self.scored.codes == NEGATIVE) & self.predicted

    @cached_property
    def mistakes(self) -> np.ndarray:
        """i64[N], the number of mistakes of each image."""
        return self.missed.sum(axis=1) + self.false.sum(axis=1)

    def worst(self, kind: str, sign: int) -> list[tuple[int, int]]:
        """Return the indices (image, label) of at most MOST_MISTAKES mistakes of one kind, the most confident first.

        The kind is "false" or "missed". `sign` is 1 if a high score makes the mistake worse, -1 if a low score does;
        see KINDS.
        """
        images, labels = np.nonzero(getattr(self, kind))
        order = np.argsort(-sign * self.scored.scores[images, labels], kind="stable")[:MOST_MISTAKES]
        return list(zip(images[order].tolist(), labels[order].tolist(), strict=True))

    @cached_property
    def mistaken(self) -> list[str]:
        """The ids of the images with the most confident mistakes of both kinds, without repetitions."""
        names = (str(self.scored.ids[n]) for _, kind, sign in KINDS for n, _ in self.worst(kind, sign))
        return list(dict.fromkeys(names))


def read_thumbnails(split: Split, data: ConfigDict, rows: Iterable[int]) -> dict[str, bytes]:
    """Return id -> thumbnail (JPEG file) of the readable images in `rows` of a split; `data` is `config.data`."""
    decoding, images = Decoding.from_config(data, SIDE), {}
    for row in rows:
        with contextlib.suppress(BadImage):
            images[str(split.ids[row])] = thumbnail(split.images.read(row, decoding), SIDE)
    return images
