"""Hierarchical precision, recall and F1, for data sets with a tree of labels.

Sources: S. Kiritchenko, S. Matwin, R. Nock and A. F. Famili, "Learning and evaluation in the presence of class
hierarchies: application to text categorization", Canadian AI 2006. Here the tree has no root node that all
labels would imply.
"""

from ml_collections import ConfigDict

from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import precision_recall_f1
from mlmoe_jax.evaluation.metrics.standard import selectable_predictions

_OVERALL = {"hP": "OP", "hR": "OR", "hF1": "OF1"}
_MEANINGS = {
    r"hP@(.+)": "hierarchical precision at {0}: OP of the predicted labels and all that they imply, against the "
    "present labels and all that they imply",
    r"hR@(.+)": "hierarchical recall at {0}: OR of the same sets",
    r"hF1@(.+)": "hierarchical F1 at {0}: harmonic mean of hP and hR",
}


def measure_hierarchical(entries: Entries) -> dict[str, float]:
    """Return the metrics `hP@NAME`, `hR@NAME`, `hF1@NAME` of each of `Entries.predictions`; {} without a label tree."""
    if not entries.tree:
        return {}
    positive, metrics = entries.tree.add_implied(entries.positive & entries.valid), {}
    for name, predicted in entries.predictions.items():
        values = precision_recall_f1(entries.tree.add_implied(predicted), positive, mask=entries.valid)
        metrics |= {f"{metric}@{name}": values[overall] for metric, overall in _OVERALL.items()}
    return metrics


def _selectable(config: ConfigDict) -> list[str]:
    return [f"{metric}@{name}" for name in selectable_predictions(config) for metric in _OVERALL if config.data.tree]


HIERARCHICAL = MetricGroup("Hierarchical precision, recall and F1", _MEANINGS, measure_hierarchical, _selectable)
