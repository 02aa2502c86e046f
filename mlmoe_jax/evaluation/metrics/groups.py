"""All metrics of a split by group. A new group needs one file and one line of `GROUPS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.label_tree import INDEPENDENT, LabelTree
from mlmoe_jax.evaluation.metrics import multilabel
from mlmoe_jax.evaluation.metrics.ranking import Bools, Floats, check_inputs
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runtime.registry import Registry


@dataclass(frozen=True)
class MetricGroup:
    """Related metrics: one table of the report.

    Attributes:
      caption: the heading of the table.
      meanings: regular expression for names -> definition in one sentence, with {0} for the first group of the
        expression.
      measure: `Entries` -> name -> fraction, nan if undefined; None if the metrics need more than the scores of one
        split (`evaluation.evaluate` then adds them).
      selectable: config -> names of metrics by which a training can select values: computed for every split, and better
        if higher.
    """

    caption: str
    meanings: Mapping[str, str]
    measure: Callable[[Entries], dict[str, float]] | None = None
    selectable: Callable[[ConfigDict], Iterable[str]] = lambda config: ()


TOP_COUNT = 3  # labels of an image in mAP@k and @topk, as in published tables
TOP_MINIMUM = 0.5  # lowest score of a predicted label in @topk_min

# In the order of results.json; the report shows a table for each.
GROUPS: Registry[MetricGroup] = Registry(
    "group of metrics",
    {
        "ranking": "mlmoe_jax.evaluation.metrics.standard:RANKING",
        "predictions": "mlmoe_jax.evaluation.metrics.standard:PREDICTIONS",
        "hierarchical": "mlmoe_jax.evaluation.metrics.hierarchical:HIERARCHICAL",
        "calibration": "mlmoe_jax.evaluation.metrics.calibration:CALIBRATION",
        "cooccurrence": "mlmoe_jax.evaluation.metrics.cooccurrence:COOCCURRENCE",
        "published": "mlmoe_jax.evaluation.metrics.published:PUBLISHED",
    },
)


@dataclass(frozen=True)
class Entries:
    """The scores of a split with the truth, and cached values that several groups use.

    Attributes:
      scores: f[B,K], probabilities.
      positive, valid: bool[B,K], the present and the valid labels.
      thresholds, k, tree, raw: as in `evaluate_scores`.
    """

    scores: Floats
    positive: Bools
    valid: Bools
    thresholds: Mapping[str, float | ArrayLike] = field(default_factory=dict)
    k: int = TOP_COUNT
    tree: LabelTree = INDEPENDENT
    raw: Floats | None = None

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
        predicted = {name: self._predicted(np.asarray(limits, np.float64)) for name, limits in self.thresholds.items()}
        top, name = self.top, f"top{self.k}"
        return {**predicted, name: top, f"{name}_min{TOP_MINIMUM:g}": top & (self.scores >= TOP_MINIMUM)}

    def _predicted(self, limits: NDArray) -> Bools:
        if self.raw is None:
            return self.scores >= limits
        consistency = Consistency.of(self.tree, limits, self.scores.shape[1])
        return consistency(self.raw) >= consistency.limits


def evaluate_scores(
    scores: ArrayLike,
    labels: ArrayLike,
    mask: ArrayLike | None,
    thresholds: Mapping[str, float | ArrayLike],
    *,
    k: int = TOP_COUNT,
    tree: LabelTree = INDEPENDENT,
    raw: Floats | None = None,
) -> dict[str, float]:
    """Return all metrics of a split, each under a name that states its definition.

    Args:
      scores: f[B,K], probabilities.
      labels: [B,K], positive if equal to 1.
      mask: [B,K], 0 for entries to ignore; None: none.
      thresholds: name -> a number or f64[K]. A class is predicted if score ≥ threshold.
      k: number of classes per image in mAP@k and @topk.
      tree: what the classes imply and exclude, for the hierarchical metrics.
      raw: f[B,K], the scores before they were brought into agreement with the tree, if they were: predictions at each
        threshold then agree with it too.

    Raises:
      ValueError: wrong shapes, or a valid score that is NaN or outside [0, 1].
    """
    entries = Entries(*check_inputs(scores, labels, mask), thresholds, k, tree, raw)
    metrics: dict[str, float] = {}
    for group in map(GROUPS.__getitem__, GROUPS):
        metrics |= group.measure(entries) if group.measure else {}
    return metrics


def selectable_metrics(config: ConfigDict) -> list[str]:
    """Return the valid values of `eval.select_metric`."""
    return [name for group in map(GROUPS.__getitem__, GROUPS) for name in group.selectable(config)]
