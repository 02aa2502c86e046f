"""The scores of a split with the truth, and what several metrics compute from them, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Integer
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.label_codes import targets
from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.metrics.ranking import check_inputs
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.array_types import Bools, Reals

TOP_COUNT = 3  # labels of an image in mAP@k and @topk, as in published tables
TOP_MINIMUM = 0.5  # lowest score of a predicted label in @topk_min


@dataclass(frozen=True)
class Entries:
    """The scores of a split with the truth, and cached values that several metrics use.

    Attributes:
      scores: f[B,K], probabilities.
      positive, valid: bool[B,K], the present and the valid labels.
      thresholds: name -> a number or f64[K]. A label is predicted if score ≥ threshold.
      predicted: name -> further predictions bool[B,K].
      k: number of labels per image in mAP@k and @topk.
      tree: what the labels imply and exclude.
      raw: f[B,K], the scores before they were brought into agreement with the tree, if they were: predictions at each
        threshold then agree with it too.
    """

    scores: Reals
    positive: Bools
    valid: Bools
    thresholds: Mapping[str, float | ArrayLike] = field(default_factory=dict)
    predicted: Mapping[str, Bools] = field(default_factory=dict)
    k: int = TOP_COUNT
    tree: LabelTree = INDEPENDENT
    raw: Reals | None = None

    @classmethod
    def of(cls, scores: ArrayLike, codes: Integer[np.ndarray, "b k"], difficult: str) -> Entries:
        """Return the entries of scores f[B,K] and codes, with difficult labels as in `data.label_codes.targets`.

        Raises ValueError if a valid score is NaN.
        """
        return cls(*check_inputs(scores, *targets(codes, difficult)))

    @cached_property
    def per_class(self) -> dict[str, NDArray]:
        """The ranking metrics per class, see `multilabel.per_class`."""
        return multilabel.per_class(self.scores, self.positive, mask=self.valid)

    @cached_property
    def top(self) -> Bools:
        """The k highest valid classes per image, bool[B,K]."""
        return multilabel.top_k(self.scores, self.k, mask=self.valid)

    @cached_property
    def predictions(self) -> dict[str, Bools]:
        """Name of a threshold, or of a number of labels per image -> the predicted labels bool[B,K]."""
        predicted = {name: self._predict(limits) for name, limits in self.thresholds.items()}
        predicted |= self.predicted
        predicted[f"top{self.k}"] = self.top
        predicted[f"top{self.k}_min{TOP_MINIMUM:g}"] = self.top & (self.scores >= TOP_MINIMUM)
        return predicted

    def _predict(self, thresholds: float | ArrayLike) -> Bools:
        limits = np.asarray(thresholds, np.float64)
        if self.raw is None:
            return self.scores >= limits
        consistency = Consistency.of(self.tree, limits, self.scores.shape[1])
        return consistency(self.raw) >= consistency.limits
