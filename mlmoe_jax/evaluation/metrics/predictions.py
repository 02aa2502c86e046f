"""Precision, recall and F1 of a split at named cuts; a metric is called FIGURE@CUT, such as CF1@0.5."""

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.evaluation.metrics.groups import Entries, MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1

FIGURES = {
    "CP": "mean of the precision of the labels that are predicted at least once",
    "CR": "mean of the recall of the labels that are present at least once",
    "CF1": "harmonic mean of CP and CR, as in nearly all published tables",
    "CF1_mean": "mean of the F1 of the labels that are predicted or present at least once",
    "OP": "precision of all predictions together",
    "OR": "recall of all positives together",
    "OF1": "harmonic mean of OP and OR",
    "precision_macro": "mean over all labels of precision, 0 for one that is never predicted (scikit-learn's macro)",
    "recall_macro": "mean over all labels of recall, 0 for one that is never present (scikit-learn's macro)",
    "F1_macro": "mean over all labels of F1, 0 for one that is never predicted (scikit-learn's macro)",
}
CUTS = {
    r"([\d.]+)": "a label is predicted if its score is at least {0}",
    r"fitted": "a label is predicted if its score is at least its own threshold, fitted on another split "
    "(see Thresholds)",
    r"prior_matched_transductive": "each label is predicted as often as it was positive in training; these cuts are "
    "computed from the scores of the evaluated images themselves (transductive), so they are for comparison with "
    "published tables, never for prediction",
    r"top(\d+)": "the {0} highest labels of each image are predicted",
    r"top(\d+)_min([\d.]+)": "the {0} highest labels of each image are predicted if their score is at least {1}",
}


def measure(entries: Entries) -> dict[str, float]:
    """Return FIGURES of `precision_recall_f1` with empty="skip" at each threshold and for the k highest labels.

    The latter are exactly k per image (@top3), and those of the k that reach the minimum (@top3_min0.5).
    """
    scores, top, k, minimum = entries.scores, entries.top, entries.k, entries.minimum
    cuts = {name: scores >= np.asarray(threshold, np.float64) for name, threshold in entries.thresholds.items()}
    cuts |= {f"top{k}": top, f"top{k}_min{minimum:g}": top & (scores >= minimum)}
    found = {}
    for name, predicted in cuts.items():
        values = precision_recall_f1(predicted, entries.positive, mask=entries.valid)
        found |= {f"{figure}@{name}": value for figure, value in values.items()}
    return found


def _selectable(config: ConfigDict) -> list[str]:
    k, minimum = config.metrics.top_k, Entries.minimum
    cuts = (f"{config.eval.threshold:g}", "prior_matched_transductive", f"top{k}", f"top{k}_min{minimum:g}")
    return [f"{figure}@{cut}" for cut in cuts for figure in FIGURES]


# The report shows these by cut and figure instead of one line per name.
PREDICTIONS = MetricGroup("Precision, recall and F1 of predictions", {}, measure, _selectable)
