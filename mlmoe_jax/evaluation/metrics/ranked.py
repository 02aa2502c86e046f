"""The metrics of a split that need no threshold: mean average precision in every form, AUC, precision@1."""

from mlmoe_jax.evaluation.metrics.groups import Entries, MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import map_of_returned, mean_average_precision, top_k
from mlmoe_jax.evaluation.metrics.ranking import rank_all
from mlmoe_jax.evaluation.metrics.rates import mean_defined, ratio

MEANINGS = {
    r"mAP": "mean of average precision, the mean precision at each positive, over the labels with a positive",
    r"mAP_envelope": "the same with the largest precision at this or any higher recall (VOC 2010+, Q2L, ML-VPT)",
    r"mAP_11point": "the same at recall 0, 0.1 … 1 (VOC 2007)",
    r"mAP_weighted": "mean of average precision weighted by the positives of each label",
    r"mAP_micro": "average precision of the scores of all labels in one list",
    r"mAP@(\d+)": "mAP if each image returns only its {0} highest labels",
    r"AUC_macro": "mean over labels of the chance that a positive scores higher than a negative",
    r"precision@1": "share of the images whose highest label is right",
}


def measure(entries: Entries) -> dict[str, float]:
    """Return the metrics that MEANINGS names.

    mAP (plain), mAP_envelope, mAP_11point and AUC_macro are means over classes; mAP_weighted is weighted by the number
    of positives; mAP_micro ranks all entries in one list. precision@1 is over the images with a valid entry; images
    without positives are misses.
    """
    of_class, positive, valid = entries.of_class, entries.positive, entries.valid
    first = top_k(entries.scores, 1, mask=valid)
    return {
        "mAP": mean_average_precision(of_class["AP"]),
        "mAP_envelope": mean_average_precision(of_class["AP_envelope"]),
        "mAP_11point": mean_average_precision(of_class["AP_11point"]),
        "mAP_weighted": mean_average_precision(of_class["AP"], weights=of_class["positives"]),
        "mAP_micro": rank_all(entries.scores, positive, valid).average_precision(),
        "AUC_macro": float(mean_defined(of_class["AUC"])),
        "precision@1": float(ratio((first & positive).sum(), valid.any(axis=1).sum())),
        f"mAP@{entries.k}": map_of_returned(entries.scores, positive, valid, entries.top),
    }


RANKING = MetricGroup(
    "Ranking, without thresholds",
    MEANINGS,
    measure,
    lambda config: (name.replace(r"(\d+)", str(config.metrics.top_k)) for name in MEANINGS),
)
