"""The scores and the true labels of a split, and intermediate results that several metrics share, computed once."""

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
from mlmoe_jax.models.attributes import assign
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.array_types import Bools, Ints, Reals

TOP_COUNT = 3  # labels of an image in mAP@k and @topk, as in published tables
TOP_MINIMUM = 0.5  # lowest score of a predicted label in @topk_min


@dataclass(frozen=True)
class Entries:
    """The scores and the true labels of a split, with cached values that several metrics use; B images, K labels.

    Attributes:
      scores: f[B,K], probabilities.
      positive: bool[B,K], whether a label is present.
      valid: bool[B,K], whether an entry is used by metrics. Unknown labels are not valid.
      thresholds: name -> a number or f64[K]. A label is predicted if score ≥ threshold.
      predicted: name -> bool[B,K], further predictions.
      k: number of predicted labels per image in mAP@k and @topk.
      raw: f[B,K], the scores before `models.consistency` adjusted them to the tree; None if they were not adjusted. If
        given, the predictions at each threshold use `raw`, adjusted to the tree at that threshold.
      categories: name of a category -> the indices of its labels.
    """

    scores: Reals
    positive: Bools
    valid: Bools
    thresholds: Mapping[str, float | ArrayLike] = field(default_factory=dict)
    predicted: Mapping[str, Bools] = field(default_factory=dict)
    k: int = TOP_COUNT
    tree: LabelTree = INDEPENDENT
    raw: Reals | None = None
    categories: Mapping[str, Ints] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: ArrayLike, codes: Integer[np.ndarray, "b k"], difficult: str) -> Entries:
        """Return the entries for probabilities f[B,K] and label codes; ValueError if a valid score is NaN.

        `difficult` is the treatment of difficult labels, as in `data.label_codes.targets`.
        """
        return cls(*check_inputs(scores, *targets(codes, difficult)))

    @cached_property
    def per_class(self) -> dict[str, NDArray]:
        """Ranking metrics per class: name -> [K], as returned by `multilabel.per_class`."""
        return multilabel.per_class(self.scores, self.positive, mask=self.valid)

    @cached_property
    def top(self) -> Bools:
        """Whether a class is one of the k valid classes with the highest scores of its image, bool[B,K]."""
        return multilabel.top_k(self.scores, self.k, mask=self.valid)

    @cached_property
    def predictions(self) -> dict[str, Bools]:
        """Predictions by name: name -> bool[B,K].

        The names are the keys of `thresholds` and `predicted`, `top{k}` (the k highest labels of each image), and
        `top{k}_min0.5` (the labels among them with score ≥ 0.5).
        """
        predicted = {name: self._predict(limits) for name, limits in self.thresholds.items()}
        predicted |= self.predicted
        predicted[f"top{self.k}"] = self.top
        predicted[f"top{self.k}_min{TOP_MINIMUM:g}"] = self.top & (self.scores >= TOP_MINIMUM)
        return predicted

    def _predict(self, thresholds: float | ArrayLike) -> Bools:
        limits = np.asarray(thresholds, np.float64)
        if self.raw is None:
            return assign(self.scores, limits, self.tree.attributes)
        consistency = Consistency.of(self.tree, limits, self.scores.shape[1])
        return consistency.assign(consistency(self.raw))
