"""Sections about the results: metrics per split and per label, differences from another run, scores, thresholds."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, PageTable
from mlmoe_jax.apps.report.predictions import VALUE_RULE
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import Comparison, MetricChange, compare_runs
from mlmoe_jax.apps.tools.fit_thresholds import fitted_lines
from mlmoe_jax.evaluation.measure import confusion_tables
from mlmoe_jax.evaluation.metrics.metric_groups import GROUPS
from mlmoe_jax.evaluation.metrics.ranking import rank_all
from mlmoe_jax.evaluation.metrics.reliability import reliability
from mlmoe_jax.evaluation.metrics.standard import PREDICTION_METRICS, PREDICTIONS, THRESHOLD_MEANINGS
from mlmoe_jax.runtime.text import percent

MOST_BARS, MOST_POINTS = 100, 100  # bars of differences, points of a precision-recall curve


# --------------------------------------------------------------------------------------------------------- metrics
def metrics(files: RunFiles) -> list[Any]:
    """Return a table per group of metrics: the name and definition of each, and its value in percent for each split."""
    names = list(dict.fromkeys(name for entry in files.results.values() for name in entry.metrics))
    text = "In percent. Means over labels leave out labels without a positive in a split, unless a definition says"
    parts: list[Any] = [Note(f"{text} otherwise.")]
    for key in GROUPS:
        group = GROUPS[key]
        if meanings := {name: meaning for name in names if (meaning := _meaning(name, group.meanings))}:
            parts.append(_metric_table(f"metrics-{key}", group.caption, meanings, files))
        if key == "attributes":
            parts += _confusion_tables(files)
    for at in dict.fromkeys(name.partition("@")[2] for name in names if name.partition("@")[0] in PREDICTION_METRICS):
        meanings = {f"{name}@{at}": text for name, text in PREDICTION_METRICS.items() if f"{name}@{at}" in names}
        caption = f"{PREDICTIONS.caption} at {at}: {_meaning(at, THRESHOLD_MEANINGS)}"
        table = _metric_table(f"metrics-at-{at}", caption, meanings, files)
        parts.append(table if at == f"{files.main_settings.threshold:g}" else Details(f"Metrics at {at}", [table]))
    return parts


def _confusion_tables(files: RunFiles) -> list[PageTable]:
    tables = []
    for table in confusion_tables(files.folder, [files.main]):
        name, *values = table.columns
        columns = [name, *((value, "count") for value in values)]
        tables.append(PageTable(f"confusion-{name}", columns, table.rows, table.title))
    return tables


def _meaning(name: str, definitions: Mapping[str, str]) -> str:
    """Return the definition of a metric; "" if there is none.

    `definitions` maps a regular expression for names to a definition, in which {} stands for a group of the match.
    """
    for pattern, sentence in definitions.items():
        if match := re.fullmatch(pattern, name):
            return sentence.format(*match.groups())
    return ""


def _metric_table(name: str, caption: str, meanings: Mapping[str, str], files: RunFiles) -> PageTable:
    """Return a table of the metrics in `meanings` (name -> definition), with one column per split; `name` is its id."""
    rows = [
        [[metric, meaning], *(entry.metrics.get(metric) for entry in files.results.values())]
        for metric, meaning in meanings.items()
    ]
    return PageTable(name, [("metric", "term"), *((split, "fraction") for split in files.results)], rows, caption)


# -------------------------------------------------------------------------------------------------------- per class
def list_labels(files: RunFiles) -> list[Any]:
    """Return a table with one row per label.

    The columns are the metrics of per_class.csv on the main split, the AP on each other split, and the threshold.
    """
    others = {name: table for name, table in files.per_class.items() if name != files.main}
    main = files.per_class.get(files.main, {})
    columns = ["label"]
    for name in next(iter(main.values()), {}):
        columns.append((name, "count" if name == "positives" else "fraction"))
    columns += [*((f"AP on {name}", "fraction") for name in others), ("threshold", "number")]
    thresholds = files.thresholds.values if files.thresholds else {}
    rows = [
        [label, *row.values(), *(table.get(label, {}).get("AP") for table in others.values()), thresholds.get(label)]
        for label, row in main.items()
    ]
    return [PageTable("label-table", columns, rows, f"All labels on {files.main}; AP and other fractions in percent.")]


# ------------------------------------------------------------------------------------------------------ differences
def differences(files: RunFiles) -> list[Any]:
    """Return the differences from another run: metrics of the main split, and the AP of each label (DR-MoE, table 6).

    Raises UserError if the runs cannot be compared: no scores, different labels, or no common image.
    """
    comparison = compare_runs(files.other, files)
    changes = [(label, change) for label, change in comparison.ap.items() if not math.isnan(change.difference)]
    changes.sort(key=lambda pair: -pair[1].difference)
    return [
        Note(_in_words(comparison, files.other.name)),
        _change_table("metric-differences", f"Metrics on {comparison.split}", comparison.metrics, files),
        Charts([_difference_chart(changes)]),
        _change_table("difference-table", "Average precision", dict(changes), files),
    ]


def _change_table(name: str, what: str, changes: Mapping[str, MetricChange], files: RunFiles) -> PageTable:
    """Return a table with one row per change, by name: the values of both runs, and the difference with its interval.

    `name` is the id of the table, and `what` the beginning of its caption.
    """
    columns = ["", (files.name, "fraction"), (files.other.name, "fraction")]
    columns += [(title, "difference") for title in ("difference", "from", "to")]
    rows = [[key, change.b, change.a, change.difference, change.low, change.high] for key, change in changes.items()]
    return PageTable(name, columns, rows, f"{what} of both runs, and the difference, in percent.")


def _in_words(comparison: Comparison, other: str) -> str:
    counts, clear = comparison.counts, [change for change in comparison.ap.values() if change.clear]
    better = sum(change.difference > 0 for change in clear)
    return (
        f"This run minus {other}, on the {counts['images']:,} images of {comparison.split} with scores in both. "
        f"Intervals contain 95 % of the differences over {comparison.resamples:,} resamples of the images; a "
        f"difference is clear if its interval excludes 0. Of {len(comparison.ap):,} labels, {better} are clearly "
        f"better and {len(clear) - better} clearly worse. More than one in twenty labels without a difference appear "
        "clear by chance: about one in fifteen with 30 positive images, and one in ten with 8."
    )


def _difference_chart(changes: list[tuple[str, MetricChange]]) -> Chart:
    """Return a bar chart of changes by decreasing difference; at most MOST_BARS, the highest and the lowest."""
    half, title = MOST_BARS // 2, "Difference of average precision"
    if len(changes) > MOST_BARS:
        changes = [*changes[:half], *changes[-half:]]
        title += f", the {half} highest and the {half} lowest"
    rows = [{"label": label, "difference": c.difference, "low": c.low, "high": c.high} for label, c in changes]
    alt = "Average precision of this run minus the other per label, the highest first"
    return Chart("ap-differences", title, charts.difference_bars(rows), alt)


# ----------------------------------------------------------------------------------------------------------- scores
def precision_recall_points(scores: np.ndarray, positive: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the points of a precision-recall curve: recall, precision and threshold f64[T,3], by increasing threshold.

    All entries [N,K] that are valid are one list. Each score of a positive is a threshold. If there are more than
    MOST_POINTS positives, only MOST_POINTS evenly spaced positives are used, including the first and the last.
    """
    ranking = rank_all(scores, positive, valid)
    hits, ranks = ranking.hits, ranking.hits + ranking.above + ranking.level
    thresholds = np.sort(scores[positive & valid])
    points = np.stack([hits / max(1, ranking.positives), hits / ranks, thresholds], axis=1)
    return points[np.unique(np.linspace(0, len(points) - 1, min(MOST_POINTS, len(points))).round().astype(int))]


def score_curves(files: RunFiles) -> list[Any]:
    """Return a precision-recall curve and a calibration curve, which both pool the scores of all labels."""
    entries = files.corrected.entries(files.main_settings.difficult)
    scores, positive, valid = entries.scores, entries.positive, entries.valid
    known, bins = positive & valid, reliability(scores, positive, mask=valid).pooled()
    points = precision_recall_points(scores, positive, valid)
    text = (
        f"On {files.main}: all {int(valid.sum()):,} scores pooled, {percent(known.sum() / valid.sum())} % of them "
        f"positive. Expected calibration error: {percent(bins.expected_calibration_error[0])} %, with "
        f"{bins.count.shape[1]} bins of equal width."
    )
    if fitted := files.thresholds.calibration if files.thresholds else None:
        before = reliability(files.scored.scores, positive, mask=valid).pooled().expected_calibration_error[0]
        text += f" The scores are corrected as fitted on {fitted['split']}; raw {percent(before)} %."
    ranked = charts.unit_curve(points, ("recall", "precision", "score at least"))
    alt = f"Precision over recall for all labels pooled on {files.main}"
    plots = [Chart("precision-recall", "Precision and recall", ranked, alt), _calibration_chart(bins.points)]
    return [Note(text), Charts(plots)]


def _calibration_chart(points: np.ndarray) -> Chart:
    """Return a chart of the share of positives over the mean score, a point per bin; see `Reliability.points`."""
    spec = charts.unit_curve(points, ("mean score", "share of positives", "scores in the bin"), diagonal=True)
    alt = "Share of positives over the mean score per bin; the dashed diagonal is perfect calibration"
    return Chart("reliability", "Calibration", spec, alt)


# ------------------------------------------------------------------------------------------------------- thresholds
def thresholds(files: RunFiles) -> list[Any]:
    """Return the thresholds that `mlmoe predict` uses, and how they were fitted.

    If they were fitted to a goal, a table has the metrics before and after the fit.
    """
    stored = files.thresholds
    source, parts = stored.source, [Note("A label is predicted if its probability is at least its threshold.")]
    parts += [Note(VALUE_RULE)] * bool(files.tree.attributes)
    if "goal" not in source:
        origin = f"were fitted on {source['split']}" if source else "are fixed; mlmoe thresholds fits them"
        return [*parts, Note(f"The thresholds of the table of labels {origin}. A dash: the label is never predicted.")]
    rows = [[metric, before, source["after"][metric]] for metric, before in source["before"].items()]
    columns = ["metric", (f"at {source['fixed']:g}", "fraction"), ("fitted", "fraction")]
    caption = f"On {source['split']} in percent; fitted to these images, so too good."
    parts.append(Note(f"Fitted on {source['split']}: {'. '.join(fitted_lines(stored))}."))
    return [*parts, PageTable("threshold-metrics", columns, rows, caption)]
