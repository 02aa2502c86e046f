"""Metrics as the evaluators of the papers compute them.

`metric_groups.measure_entries` uses one set of definitions for all methods. Published numbers use their authors'
definitions, which differ between papers, so comparisons with a published table use this module.

| | mlvpt | q2l | mlgcn | asl | drmoe |
|---|---|---|---|---|---|
| AP | envelope | envelope | plain | plain | plain |
| predicted if | score ≥ prior-matched threshold | ≥ 0.5 | ≥ 0.5 (logit ≥ 0) | > 0.8 | ≥ 0.5 |
| class without positives | mAP is nan, left out of CR | mAP, CR, CF1 are nan | same as q2l | counts 0 | left out |
| class without predictions | left out of CP | P at least 1, also in OP | same as q2l | counts 0 | left out |
| top 3 | exactly 3 | at most 3, all ≥ 0.5 | at most 3, all ≥ 0.5 | none | none |
| difficult labels | negative | negative | left out of AP, else negative | negative | negative |

CF1 is the harmonic mean of CP and CR, CF1_mean the mean over classes of F1, for all papers. Unknown labels, which none
of these papers has, are ignored.

mlvpt: `sl_mAP_cf1_of1` of its repository (4fd40e4), which prints the numbers of the tables. A class is predicted for
  the floor(r · N) images that score highest, r its share of the training images; if that is 0, an index wraps around
  and *all* images are predicted. The thresholds depend on the evaluated scores (transductive). The top-3 metrics are
  printed, but not in the tables.
q2l: mAP is `voc_mAP` of its repository (55eb050), from SSGRL. The code of all other metrics in Q2L's tables is not
  public. They follow ML-GCN here, because Q2L extends ML-GCN's table. The top 3 must have a minimum score: the OF1 of
  78.3 printed for ResNet-101 at 576 pixels is above 76.7, the maximum for exactly three labels per image on COCO's
  val2014.
mlgcn: `AveragePrecisionMeter` of its repository (5517d6f), also ADD-GCN's. Without positives it divides by zero and
  stops. The affected metrics are nan here.
asl: `mAP` and `validate_multi` of its repository (8c9e0bd), also ML-Decoder's. The code prints CF1_mean under the name
  F_C; the CF1 of its published table equals the harmonic mean. Its AP divides by positives + 1e-8, which is omitted
  here.
drmoe: no code; its text defines CF1 as CF1_mean, while all rows quoted from other papers are harmonic means. In the
  quoted rows the table prints CF1 under OF1 and OF1 under CF1; here each has its own name. Threshold, AP and difficult
  labels are not stated. The most common choices are used.

The data set determines the images of a split (some papers drop images without labels). Equal scores are one step of a
ranking, while their order in the authors' sorts is undefined. F1 without true positives is 0, while it is nan in some
of the code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import ArrayLike, NDArray

from mlmoe_jax.data.label_codes import DIFFICULT
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import (
    average_precision,
    mean_average_precision,
    precision_recall_f1,
    top_k,
)
from mlmoe_jax.evaluation.metrics.threshold_search import prior_matched
from mlmoe_jax.runtime.array_types import Bools, Floats

_COLUMNS = {"none": "AP", "envelope": "AP_envelope"}  # interpolation -> name in `Entries.per_class`
_TABLE = ("CP", "CR", "CF1", "OP", "OR", "OF1")


@dataclass(frozen=True)
class Evaluator:
    """The definitions that one paper's evaluator uses. `preset` applies them."""

    # scores, known and frequency -> predictions
    predict: Callable[[Floats, Bools, ArrayLike | None], Bools] = lambda scores, known, frequency: scores >= 0.5
    metrics: tuple[str, ...] = _TABLE
    interpolation: str = "none"
    ap_without_positives: float | None = np.nan  # None: the class is left out of the mean
    empty: str = "skip"  # as in `precision_recall_f1`
    difficult_in_ap: str = "negative"  # as in `data.label_codes.targets`, for AP; "negative" for any other metric
    top3: tuple[str, float | None] | None = None  # suffix of the metrics, and the minimum score


def preset(
    name: str,
    scores: ArrayLike,
    codes: ArrayLike,
    *,
    frequency: ArrayLike | None,
    ap: Floats | None = None,
) -> dict[str, float]:
    """Return the metrics that a paper's evaluator prints for a split, as fractions. The module has their definitions.

    They are `mAP`, and at the paper's threshold `CP`, `CR`, `CF1`, `OP`, `OR`, `OF1`; for asl also `CF1_mean`; for
    drmoe only `CF1`, `CF1_mean` and `OF1`. For the three highest labels per image, the six metrics have the suffix
    `@top3` (exactly three labels) or `@top3_min0.5` (only labels with score ≥ 0.5), if the paper has them.

    Args:
      name: mlvpt, q2l, mlgcn, asl or drmoe.
      scores: f[N,K], probabilities.
      codes: i8[N,K]: 1 positive, 0 negative, −1 unknown, 2 difficult.
      frequency: f[K], the share of training images with each label; required by mlvpt only.
      ap: f[K], the result of `average_precisions`; None: it is computed.
    """
    evaluator = EVALUATORS[name]
    scores, codes = np.asarray(scores), np.asarray(codes)
    entries = Entries.of(scores, codes, "negative")
    positive, known = entries.positive, entries.valid
    ap = average_precisions(name, scores, codes) if ap is None else ap
    empty = evaluator.ap_without_positives
    report = {"mAP": mean_average_precision(ap) if empty is None else float(np.where(np.isnan(ap), empty, ap).mean())}
    without_positives = not (positive & known).any(axis=0).all()
    predictions = {"": evaluator.predict(scores, known, frequency)}
    if evaluator.top3:
        suffix, minimum = evaluator.top3
        predictions[suffix] = top_k(scores, 3, minimum=minimum, mask=known)
    for suffix, predicted in predictions.items():
        values = precision_recall_f1(predicted, positive, mask=known, empty=evaluator.empty)
        if evaluator.empty == "one" and without_positives:
            values |= {"CR": np.nan, "CF1": np.nan}
        report |= {metric + suffix: values[metric] for metric in evaluator.metrics}
    return report


def average_precisions(name: str, scores: ArrayLike, codes: ArrayLike) -> Floats:
    """Return the AP of each label, f64[K], as the evaluator `name` of `preset` defines it; nan without positives."""
    evaluator = EVALUATORS[name]
    entries = Entries.of(scores, np.asarray(codes), evaluator.difficult_in_ap)
    scores, positive, known = entries.scores, entries.positive, entries.valid
    return average_precision(scores, positive, mask=known, interpolation=evaluator.interpolation)


def measure_preset(
    name: str, entries: Entries, codes: NDArray[np.int8], difficult: str, frequency: ArrayLike
) -> dict[str, float]:
    """Return the metrics of `preset` under names such as `mlvpt/mAP`; {} if `name` is "none".

    The cached average precision of `entries` is used if the paper defines it in the same way. `difficult` is the
    treatment of difficult labels in `entries`, and `codes` i8[N,K] are the label codes of their images.
    """
    if name == "none":
        return {}
    evaluator = EVALUATORS[name]
    same_labels = difficult == evaluator.difficult_in_ap or not (codes == DIFFICULT).any()
    ap = entries.per_class[_COLUMNS[evaluator.interpolation]] if same_labels else None
    metrics = preset(name, entries.scores, codes, frequency=frequency, ap=ap)
    return {f"{name}/{metric}": value for metric, value in metrics.items()}


def _as_often_as_in_training(scores: Floats, known: Bools, frequency: ArrayLike | None) -> Bools:
    return scores >= prior_matched(scores, frequency, mask=known, when_zero="all")


_MINIMUM = ("@top3_min0.5", 0.5)

EVALUATORS: Mapping[str, Evaluator] = MappingProxyType(
    {
        "mlvpt": Evaluator(_as_often_as_in_training, interpolation="envelope", top3=("@top3", None)),
        "q2l": Evaluator(interpolation="envelope", empty="one", top3=_MINIMUM),
        "mlgcn": Evaluator(empty="one", difficult_in_ap="ignore", top3=_MINIMUM),
        "asl": Evaluator(
            lambda scores, known, frequency: scores > 0.8,
            metrics=(*_TABLE[:3], "CF1_mean", *_TABLE[3:]),
            ap_without_positives=0.0,
            empty="zero",
        ),
        "drmoe": Evaluator(metrics=("CF1", "CF1_mean", "OF1"), ap_without_positives=None),
    }
)


def _selectable(config: ConfigDict) -> list[str]:
    if (name := config.metrics.preset) == "none":
        return []
    evaluator = EVALUATORS[name]
    suffixes = ("", evaluator.top3[0]) if evaluator.top3 else ("",)
    return [f"{name}/mAP", *(f"{name}/{metric}{suffix}" for suffix in suffixes for metric in evaluator.metrics)]


PUBLISHED_METRICS = MetricGroup(
    "As a paper's own evaluator prints it",
    {rf"({'|'.join(EVALUATORS)})/(.+)": "{1} as {0}'s own evaluator prints it"},
    selectable=_selectable,
)
