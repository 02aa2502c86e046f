"""The section about the scores of all images: precision-recall, and calibration.

Shape letters: N images, K labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Note, Section, Widget
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.evaluation.metrics.calibration import Reliability, reliability
from mlmoe_jax.evaluation.metrics.ranking import Ranking, checked, rank_all, rank_classes
from mlmoe_jax.runtime.text import percent

MOST_LABELS = 80  # with their own curves
MOST_POINTS = 100  # of a precision-recall curve
_RANKED, _BINNED = ("recall", "precision", "threshold"), ("score", "share", "count")


def precision_recall_points(ranking: Ranking, positives: np.ndarray, *, most: int = MOST_POINTS) -> np.ndarray:
    """Return recall, precision and threshold f64[T,3] at the positives of a ranking, thresholds increasing, T ≤ `most`.

    positives: their scores f[P]. If there are more than `most`, evenly spaced ones, including the first and the last.
    """
    hits, seen = ranking.found, ranking.found + ranking.above + ranking.level
    points = np.stack([hits / max(1, ranking.positives), hits / seen, np.sort(positives)], axis=1)
    return points[np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int))]


def reliability_points(bins: Reliability) -> np.ndarray:
    """Return mean score, share of positives and count of the nonempty bins of the first class: f64[bins,3]."""
    points = np.stack([bins.mean_score[0], bins.fraction_positive[0], bins.count[0]], axis=1)
    return points[bins.count[0] > 0]


def curves(files: RunFiles) -> Section:
    """Return precision over recall and positives over scores, for all labels pooled and for a selected label."""
    name, title, scored = "scores", "Precision, recall and calibration", files.scored
    if scored is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    targets = scored.targets(files.settings(scored.prefix).data.difficult_eval)
    scores, positive, valid = checked(scored.scores, *targets)
    bins = reliability(scores, positive, mask=valid)
    pooled = _curve("all labels", rank_all(scores, positive, valid), scores[positive & valid], bins.pooled())
    counts = (positive & valid).sum(axis=0)
    chosen = []
    for k in sorted(k for k in np.argsort(-counts, kind="stable")[:MOST_LABELS] if counts[k]):
        one = slice(k, k + 1)
        ranking = next(rank_classes(scores[:, one], positive[:, one], valid[:, one]))
        own = reliability(scores[:, one], positive[:, one], mask=valid[:, one])
        chosen.append(_curve(files.names[k], ranking, scores[positive[:, k] & valid[:, k], k], own))
    text = (
        f"On {scored.name}. Gray: all {int(valid.sum()):,} scores pooled, {percent(counts.sum() / valid.sum())} % of "
        f"them positive; color: the selected label. Expected calibration error of all scores: "
        f"{percent(pooled['error'])} %, with {bins.count.shape[1]} bins of equal width."
    )
    if len(chosen) < len(counts):
        text += f" Of {len(counts):,} labels, the {len(chosen)} with the most positives can be selected."
    chooser = Widget("curves", "curves", chosen, "Select the label of the curves")
    return Section(name, title, [Note(text), *([chooser] if chosen else []), _charts(scored.name, pooled)])


def _curve(name: str, ranking: Ranking, positives: np.ndarray, bins: Reliability) -> dict[str, Any]:
    """Return the rows of both charts for one label, or for all labels pooled."""
    points = {
        "precision-recall": (_RANKED, precision_recall_points(ranking, positives)),
        "reliability": (_BINNED, reliability_points(bins)),
    }
    rows = {
        chart: [dict(zip((*names, "curve"), (*row, name), strict=True)) for row in values.round(5).tolist()]
        for chart, (names, values) in points.items()
    }
    error = round(float(bins.expected_calibration_error[0]), 5)
    return {"name": name, "positives": ranking.positives, "error": error, "rows": rows}


def _charts(split: str, pooled: dict[str, Any]) -> Charts:
    rows = pooled["rows"]
    ranked = charts.chosen_over_pooled(
        rows["precision-recall"],
        x=("recall", "recall"),
        y=("precision", "precision"),
        more=("threshold", "score at least", ".3f"),
    )
    binned = charts.chosen_over_pooled(
        rows["reliability"],
        x=("score", "mean score"),
        y=("share", "share of positives"),
        more=("count", "scores in the bin", ","),
        diagonal=True,
    )
    alt = f"Precision over recall for all labels pooled on {split}, and for the selected label"
    bins_alt = "Share of positives over the mean score per bin; the dashed diagonal is perfect calibration"
    return Charts(
        [
            Chart("precision-recall", "Precision and recall", ranked, alt),
            Chart("reliability", "Calibration", binned, bins_alt),
        ]
    )
