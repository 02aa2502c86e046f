"""The main metrics of each category of labels, for data sets with `data.categories`."""

from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.evaluation.metrics.metric_groups import MetricGroup
from mlmoe_jax.evaluation.metrics.multilabel import mean_average_precision, precision_recall_f1

_MEANINGS = {
    r"category/(.+)/mAP": "mAP of the labels of the category {0}",
    r"category/(.+)/(CF1|OF1)@(.+)": "{1}@{2} of the labels of the category {0}",
}


def measure_categories(entries: Entries) -> dict[str, float]:
    """Return the metrics `category/NAME/METRIC` of each category; {} without categories."""
    metrics = {}
    for name, labels in entries.categories.items():
        metrics[f"category/{name}/mAP"] = mean_average_precision(entries.per_class["AP"][labels])
        positive, valid = entries.positive[:, labels], entries.valid[:, labels]
        for at, predicted in entries.predictions.items():
            values = precision_recall_f1(predicted[:, labels], positive, mask=valid)
            metrics |= {f"category/{name}/{metric}@{at}": values[metric] for metric in ("CF1", "OF1")}
    return metrics


CATEGORY_METRICS = MetricGroup("Categories of labels", _MEANINGS, measure_categories)
