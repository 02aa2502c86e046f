"""The section about the scores of all images: precision-recall, and calibration.

Shape letters: N images, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def precision_recall_points(ranking: Ranking, positives: np.ndarray, *, most: int = MOST_POINTS) -> np.ndarray:
    """Return recall, precision and threshold f64[T,3] at the positives of a ranking, thresholds increasing, T ≤ `most`.

    positives: their scores f[P]. If there are more than `most`, evenly spaced ones, including the first and the last.
    """
    found, seen = ranking.found, ranking.found + ranking.above + ranking.level
    points = np.stack([found / max(1, ranking.positives), found / seen, np.sort(positives)], axis=1)
    return points[np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int))]


def reliability_points(bins: Reliability) -> np.ndarray:
    """Return mean score, share of positives and count of the nonempty bins of the first class: f64[bins,3]."""
    points = np.stack([bins.mean_score[0], bins.fraction_positive[0], bins.count[0]], axis=1)
    return points[bins.count[0] > 0]


# ---------------------------------------------------------------------------------------------------------- curves
def curves(files: RunFiles) -> Section:
    """Return precision over recall and positives over scores, for all labels pooled and for a selected label."""
    name, title, main = "scores", "Precision, recall and calibration", files.main_split
    if main is None or main.scores is None or not len(main.scores):
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    config = files.settings(main.scores.prefix)
    label, mask = main.scores.targets(config.data.difficult_eval)
    scores, positive, valid = checked(main.scores.scores, label, mask)
    bins = reliability(scores, positive, mask=valid)
    pooled = _curve("all labels", rank_all(scores, positive, valid), scores[positive & valid], bins.pooled())
    counts = (positive & valid).sum(axis=0)
    chosen = []
    for k in sorted(k for k in np.argsort(-counts, kind="stable")[:MOST_LABELS] if counts[k]):
        one = slice(k, k + 1)
        ranking = next(rank_classes(scores[:, one], positive[:, one], valid[:, one]))
        of_label = reliability(scores[:, one], positive[:, one], mask=valid[:, one])
        chosen.append(_curve(files.names[k], ranking, scores[positive[:, k] & valid[:, k], k], of_label))
    text = (
        f"On {main.name}. Gray: all {int(valid.sum()):,} scores pooled, {percent(counts.sum() / valid.sum())} % of "
        f"them positive; color: the selected label. Expected calibration error of all scores: "
        f"{percent(pooled['error'])} %, with {bins.count.shape[1]} bins of equal width."
    )
    if len(chosen) < len(counts):
        text += f" Of {len(counts):,} labels, the {len(chosen)} with the most positives can be selected."
    chooser = Widget("curves", chosen, "Select the label of the curves")
    return Section(name, title, [Note(text), *([chooser] if chosen else []), _charts(main.name, pooled)])


def _curve(name: str, ranking: Ranking, positives: np.ndarray, bins: Reliability) -> dict[str, Any]:
    return {
        "name": name,
        "positives": ranking.positives,
        "error": round(float(bins.expected_calibration_error[0]), 5),
        "curve": precision_recall_points(ranking, positives).round(5).tolist(),
        "bins": reliability_points(bins).round(5).tolist(),
    }


def _charts(split: str, pooled: dict[str, Any]) -> Charts:
    pr = [_point(("recall", "precision", "threshold"), row) for row in pooled["curve"]]
    bins = [_point(("score", "share", "count"), row) for row in pooled["bins"]]
    pr_alt = f"Precision over recall for all labels pooled on {split}, and for the selected label"
    bins_alt = "Share of positives over the mean score per bin; the dashed diagonal is perfect calibration"
    return Charts(
        [
            Chart("precision-recall", "Precision and recall", charts.precision_recall(pr), pr_alt),
            Chart("reliability", "Calibration", charts.reliability(bins), bins_alt),
        ]
    )


def _point(names: Sequence[str], row: Sequence[float]) -> dict[str, Any]:
    return {**dict(zip(names, row, strict=True)), "curve": "all labels"}
