"""The metrics of every split: rankings, and predictions at named thresholds, such as CF1@0.5."""

from ml_collections import ConfigDict

from mlmoe_jax.evaluation.metrics.entries import TOP_COUNT, TOP_MINIMUM, Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import (
    map_of_returned,
    mean_average_precision,
    mean_defined,
    precision_recall_f1,
    ratio,
    top_k,
)
from mlmoe_jax.evaluation.metrics.ranking import rank_all

# ------------------------------------------------------------------------------------------------------------- ranking
_RANKING_MEANINGS = {
    r"mAP": "mean of average precision, the mean precision at each positive, over the labels with a positive",
    r"mAP_envelope": "mAP with the largest precision at this or any higher recall (VOC 2010+, Q2L, ML-VPT)",
    r"mAP_11point": "mAP with the largest precision at recall 0, 0.1 … 1 or higher (VOC 2007)",
    r"mAP_weighted": "mean of average precision weighted by the positives of each label",
    r"mAP_micro": "average precision of the scores of all labels in one list",
    r"mAP@(\d+)": "mAP if each image returns only its {0} highest labels",
    r"AUC_macro": "mean over labels of the chance that a positive scores higher than a negative",
    r"precision@1": "share of the images whose highest label is right",
}


def _measure_ranking(entries: Entries) -> dict[str, float]:
    """Return the ranking metrics, name -> fraction; _RANKING_MEANINGS has their definitions.

    `precision@1` is the share of images, among images with a valid entry, whose highest label is positive. An image
    without positives counts as an error.
    """
    per_class, positive, valid = entries.per_class, entries.positive, entries.valid
    best = top_k(entries.scores, 1, mask=valid)
    return {
        "mAP": mean_average_precision(per_class["AP"]),
        "mAP_envelope": mean_average_precision(per_class["AP_envelope"]),
        "mAP_11point": mean_average_precision(per_class["AP_11point"]),
        "mAP_weighted": mean_average_precision(per_class["AP"], weights=per_class["positives"]),
        "mAP_micro": rank_all(entries.scores, positive, valid).average_precision(),
        "AUC_macro": float(mean_defined(per_class["AUC"])),
        "precision@1": float(ratio((best & positive).sum(), valid.any(axis=1).sum())),
        f"mAP@{entries.k}": map_of_returned(entries.scores, positive, valid, entries.top),
    }


RANKING = MetricGroup(
    "Ranking, without thresholds",
    _RANKING_MEANINGS,
    _measure_ranking,
    lambda config: (name.replace(r"(\d+)", str(TOP_COUNT)) for name in _RANKING_MEANINGS),
)

# --------------------------------------------------------------------------------------------------------- predictions
PREDICTION_METRICS = {
    "CP": "mean of the precision of the labels that are predicted at least once",
    "CR": "mean of the recall of the labels that are present at least once",
    "CF1": "harmonic mean of CP and CR, as in nearly all published tables",
    "CF1_mean": "mean of the F1 of the labels that are predicted or present at least once",
    "OP": "precision of all predictions together",
    "OR": "recall of all positives together",
    "OF1": "harmonic mean of OP and OR",
    "precision_macro": "mean over all labels of precision, 0 for labels never predicted (scikit-learn's macro)",
    "recall_macro": "mean over all labels of recall, 0 for labels never present (scikit-learn's macro)",
    "F1_macro": "mean over all labels of F1, 0 for labels never predicted (scikit-learn's macro)",
}
THRESHOLD_MEANINGS = {
    r"([\d.]+)": "a label is predicted if its score is at least {0}",
    r"fitted": "a label is predicted if its score is at least its own threshold, fitted on another split "
    "(see Thresholds)",
    r"prior_matched_transductive": "each label is predicted as often as it was positive in training; the thresholds "
    "are computed from the scores of the evaluated images themselves (transductive), so they are for comparison with "
    "published tables, never for prediction",
    r"top(\d+)": "the {0} highest labels of each image are predicted",
    r"top(\d+)_min([\d.]+)": "the {0} highest labels of each image are predicted if their score is at least {1}",
}


def _measure_predictions(entries: Entries) -> dict[str, float]:
    """Return the metrics of `precision_recall_f1` for each prediction in `Entries.predictions`, as `METRIC@NAME`."""
    metrics = {}
    for name, predicted in entries.predictions.items():
        values = precision_recall_f1(predicted, entries.positive, mask=entries.valid)
        metrics |= {f"{metric}@{name}": value for metric, value in values.items()}
    return metrics


def _selectable(config: ConfigDict) -> list[str]:
    return [f"{metric}@{name}" for name in selectable_predictions(config) for metric in PREDICTION_METRICS]


def selectable_predictions(config: ConfigDict) -> tuple[str, ...]:
    """Return the names in `Entries.predictions` that every split has, such as "0.5" and "top3"."""
    top = f"top{TOP_COUNT}"
    return f"{config.eval.threshold:g}", "prior_matched_transductive", top, f"{top}_min{TOP_MINIMUM:g}"


# The report has a table per threshold for these metrics, instead of one line per name.
PREDICTIONS = MetricGroup("Precision, recall and F1 of predictions", {}, _measure_predictions, _selectable)
