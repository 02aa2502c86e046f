"""All metrics of a split by group. A new group needs one file and one line of `GROUPS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ml_collections import ConfigDict

from mlmoe_jax.evaluation.metrics.entries import Entries
from mlmoe_jax.runtime.registry import Registry


@dataclass(frozen=True)
class MetricGroup:
    """A group of related metrics, shown as one table in the report.

    Attributes:
      meanings: regular expression for metric names -> definition in one sentence. `{0}`, `{1}`, … in the sentence are
        replaced by the groups of the match.
      measure: `Entries` -> {metric name: fraction}, nan if undefined. None if the metrics need more than the scores of
        one split; `evaluation.measure` then adds them.
      selectable: config -> the metric names that `eval.select_metric` may have. These metrics are computed for every
        split, and higher values are better.
    """

    caption: str
    meanings: Mapping[str, str]
    measure: Callable[[Entries], dict[str, float]] | None = None
    selectable: Callable[[ConfigDict], Iterable[str]] = lambda config: ()


# In the order of results.json; the report shows a table for each.
GROUPS: Registry[MetricGroup] = Registry(
    "group of metrics",
    {
        "ranking": "mlmoe_jax.evaluation.metrics.standard:RANKING",
        "predictions": "mlmoe_jax.evaluation.metrics.standard:PREDICTIONS",
        "hierarchical": "mlmoe_jax.evaluation.metrics.hierarchical:HIERARCHICAL",
        "categories": "mlmoe_jax.evaluation.metrics.category_metrics:CATEGORY_METRICS",
        "attributes": "mlmoe_jax.evaluation.metrics.attribute_metrics:ATTRIBUTE_METRICS",
        "calibration": "mlmoe_jax.evaluation.metrics.reliability:CALIBRATION_METRICS",
        "cooccurrence": "mlmoe_jax.evaluation.metrics.cooccurrence:COOCCURRENCE_METRICS",
        "published": "mlmoe_jax.evaluation.metrics.published:PUBLISHED_METRICS",
    },
)


def measure_entries(entries: Entries) -> dict[str, float]:
    """Return the metrics of all groups for one split, as {metric name: fraction}. Undefined metrics are nan.

    Groups whose `measure` is None are skipped. Raises ValueError if a valid score is outside [0, 1].
    """
    metrics: dict[str, float] = {}
    for group in map(GROUPS.__getitem__, GROUPS):
        if group.measure is not None:
            metrics |= group.measure(entries)
    return metrics


def selectable_metrics(config: ConfigDict) -> list[str]:
    """Return the metric names that are valid values of `eval.select_metric`."""
    return [name for group in map(GROUPS.__getitem__, GROUPS) for name in group.selectable(config)]
