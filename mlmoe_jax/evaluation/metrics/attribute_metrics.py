"""The accuracy of attributes, and how often each value is taken for another, for data sets with `data.attributes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import mean_defined, ratio

_MEANINGS = {
    r"accuracy/(.+)": "share of the images with a known {0} whose most probable {0} is right",
    r"balanced_accuracy/(.+)": "mean over the values of {0} of the share of their images whose {0} is right",
}


def count_confusions(entries: Entries, attribute: Attribute) -> Int64[np.ndarray, "v v"]:
    """Return the number of images by their value (row) and their most probable value (column), i64[V,V]."""
    labels = list(attribute.labels)
    given = entries.positive[:, labels] & entries.valid[:, labels]
    known = given.any(axis=1)
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (given[known].argmax(axis=1), entries.scores[known][:, labels].argmax(axis=1)), 1)
    return counts


def measure_attributes(entries: Entries) -> dict[str, float]:
    """Return the metrics `accuracy/NAME` and `balanced_accuracy/NAME` of each attribute; {} without attributes."""
    metrics = {}
    for attribute in entries.tree.attributes:
        counts = count_confusions(entries, attribute)
        right = counts.diagonal()
        metrics[f"accuracy/{attribute.name}"] = float(ratio(right.sum(), counts.sum()))
        metrics[f"balanced_accuracy/{attribute.name}"] = float(mean_defined(ratio(right, counts.sum(axis=1))))
    return metrics


def describe_confusions(entries: Entries, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return attribute -> {"values": its V values, "images": the lists of `count_confusions`}, for results.json."""
    return {
        item.name: {
            "values": [item.value(names[k]) for k in item.labels],
            "images": count_confusions(entries, item).tolist(),
        }
        for item in entries.tree.attributes
    }


ATTRIBUTE_METRICS = MetricGroup("Attributes, of whose values an image has one", _MEANINGS, measure_attributes)
