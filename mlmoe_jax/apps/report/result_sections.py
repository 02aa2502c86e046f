"""Sections about the results: metrics per split and per label, differences from another run, scores, thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, PageTable, Section
from mlmoe_jax.apps.report.run_files import NO_SCORES, Evaluated, RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun, Comparison, MetricChange, compare_runs
from mlmoe_jax.apps.tools.fit_thresholds import fitted_lines
from mlmoe_jax.evaluation.metrics.metric_groups import GROUPS
from mlmoe_jax.evaluation.metrics.ranking import Ranking, rank_all
from mlmoe_jax.evaluation.metrics.reliability import Reliability, reliability
from mlmoe_jax.evaluation.metrics.standard import PREDICTION_METRICS, PREDICTIONS, THRESHOLD_MEANINGS
from mlmoe_jax.runtime.text import percent, quantity

MOST_BARS, MOST_POINTS = 100, 100  # bars of differences, points of a precision-recall curve
_INTERVAL = (("difference", "difference"), ("from", "difference"), ("to", "difference"))


# --------------------------------------------------------------------------------------------------------- metrics
def metrics(files: RunFiles) -> Section:
    """Return the metrics of each split in percent, by group, with their definitions."""
    title, splits = "Metrics", files.splits
    if not splits:
        missing = "results.json is written when training ends, or by an evaluation:"
        return Section("metrics", title, missing=missing, command=files.command("--mode=eval"))
    names = list(dict.fromkeys(name for split in splits.values() for name in split.metrics))
    of_predictions = [name for name in names if name.partition("@")[0] in PREDICTION_METRICS]
    tables, others = _grouped_metrics([name for name in names if name not in of_predictions], splits)
    text = "In percent. Means over labels leave out labels without a positive in a split, unless a definition says"
    parts: list[Any] = [Note(f"{text} otherwise."), *tables]
    first = _threshold_text(files)
    thresholds = dict.fromkeys(name.partition("@")[2] for name in of_predictions)
    for at in sorted(thresholds, key=lambda at: at != first):
        parts += _metrics_at(at, of_predictions, files)
    if others:
        rows = [[name, *(split.metrics.get(name) for split in splits.values())] for name in others]
        columns = [("name", "text"), *((name, "number") for name in splits)]
        parts.append(PageTable("metrics-other", columns, rows, "Other values of results.json, not in percent"))
    return Section("metrics", title, parts)


def _grouped_metrics(names: list[str], splits: Mapping[str, Evaluated]) -> tuple[list[PageTable], list[str]]:
    """Return a table per group of metrics, and the names that no group defines."""
    tables = []
    for key in GROUPS:
        group = GROUPS[key]
        meanings = {name: meaning for name in names if (meaning := _meaning(name, group.meanings))}
        if meanings:
            names = [name for name in names if name not in meanings]
            tables.append(_table(f"metrics-{key}", group.caption, meanings, splits))
    return tables, names


def _metrics_at(at: str, names: list[str], files: RunFiles) -> list[Any]:
    """Return the metrics of predictions at a threshold; collapsed, unless it is eval.threshold."""
    meanings = {f"{name}@{at}": text for name, text in PREDICTION_METRICS.items() if f"{name}@{at}" in names}
    caption = f"{PREDICTIONS.caption} at {at}: {_meaning(at, THRESHOLD_MEANINGS) or 'see results.json'}"
    table = _table(f"metrics-at-{at}", caption, meanings, files.splits)
    if at == _threshold_text(files):
        return [table, *_never_predicted(files)]
    return [Details(f"Metrics at {at}", [table])]


def _threshold_text(files: RunFiles) -> str:
    """Return eval.threshold as in the names of metrics."""
    return f"{files.main_split.settings.threshold:g}"


def _meaning(name: str, definitions: Mapping[str, str]) -> str:
    """Return the meaning of a name; "" if it matches no pattern."""
    for pattern, sentence in definitions.items():
        if match := re.fullmatch(pattern, name):
            return sentence.format(*match.groups())
    return ""


def _table(name: str, caption: str, meanings: Mapping[str, str], splits: Mapping[str, Evaluated]) -> PageTable:
    """Return metrics by name with their definitions."""
    rows = [
        [[metric, meanings[metric]], *(split.metrics.get(metric) for split in splits.values())] for metric in meanings
    ]
    return PageTable(name, [("metric", "term"), *((split, "fraction") for split in splits)], rows, caption)


def _never_predicted(files: RunFiles) -> list[Note]:
    scored = files.scored
    if scored is None:
        return []
    threshold, valid = files.main_split.settings.threshold, scored.entries(files.main_split.settings.difficult).valid
    never = int((~((scored.scores >= threshold) & valid).any(axis=0)).sum())
    labels = quantity(valid.shape[1], "label")
    text = f"Never predicted on {scored.name} at {threshold:g}: {never:,} of {labels}."
    return [Note(f"{text} CP and CF1 leave such labels out, precision_macro and F1_macro count them as 0.")]


# -------------------------------------------------------------------------------------------------------- per class
def list_labels(files: RunFiles) -> Section:
    """Return the table of labels: per_class.csv of the main split, AP on any other split, thresholds."""
    title, main = "Labels", files.main_split
    if main is None or not main.per_class:
        missing = "per_class.csv is written when training ends, or by an evaluation:"
        return Section("labels", title, missing=missing, command=files.command("--mode=eval"))
    own = list(next(iter(main.per_class.values())))
    others = {name: split.per_class for name, split in files.splits.items() if split is not main and split.per_class}
    columns = [("label", "text"), *((name, "count" if name == "positives" else "fraction") for name in own)]
    columns += [*((f"AP on {name}", "fraction") for name in others), ("threshold", "number")]
    thresholds = {} if files.thresholds is None else files.thresholds.values
    rows = [
        [label, *row.values(), *(table.get(label, {}).get("AP") for table in others.values()), thresholds.get(label)]
        for label, row in main.per_class.items()
    ]
    caption = f"All labels on {main.name}; AP and other fractions in percent."
    return Section("labels", title, [PageTable("label-table", columns, rows, caption)])


# ------------------------------------------------------------------------------------------------------ differences
def differences(files: RunFiles, other: RunFiles | None) -> Section:
    """Return the differences between this run and another, in total and per label (DR-MoE, table 6).

    Raises UserError if the runs cannot be compared: no scores, different labels, or no common image.
    """
    name, title = "differences", "Differences from another run"
    if other is None:
        missing = "This page is about one run. To compare it with another run, put its folder in place of OTHER:"
        return Section(name, title, missing=missing, command=files.command("--mode=report", "--against=OTHER"))
    comparison = compare_runs(ComparedRun.of(other.folder), ComparedRun.of(files.folder))
    columns = [("metric", "text"), (files.name, "fraction"), (other.name, "fraction"), *_INTERVAL, ("", "text")]
    rows = [
        (metric, c.b, c.a, c.difference, c.low, c.high, "clear" if c.clear else "")
        for metric, c in comparison.metrics.items()
        if not math.isnan(c.difference)
    ]
    caption = f"Metrics on {comparison.split} in percent."
    parts = [
        Note(_in_words(comparison, other.name)),
        PageTable("metric-differences", columns, rows, caption),
        *_label_differences(comparison, files.name, other.name),
    ]
    return Section(name, title, parts)


def _in_words(comparison: Comparison, other: str) -> str:
    counts, clear = comparison.counts, [change for change in comparison.ap.values() if change.clear]
    better = sum(change.difference > 0 for change in clear)
    text = (
        f"This run minus {other}, on the {counts['images']:,} images of {comparison.split} with scores in both. "
        f"Intervals contain 95 % of the differences over {comparison.resamples:,} resamples of the images; a "
        f"difference is clear if its interval excludes 0. Of {len(comparison.ap):,} labels, {better} are clearly "
        f"better and {len(clear) - better} clearly worse. More than one in twenty labels without a difference appear "
        "clear by chance: about one in fifteen with 30 positive images, and one in ten with 8."
    )
    only = counts["only_a"] + counts["only_b"]
    if only or counts["unread"]:
        text += f" Left out: {only:,} images of only one run, {counts['unread']:,} unreadable."
    return text


def _label_differences(comparison: Comparison, name: str, other: str) -> list[Any]:
    """Return bars and a table of the differences in average precision, the highest first."""
    changes = [(label, change) for label, change in comparison.ap.items() if not math.isnan(change.difference)]
    if not changes:
        return [Note("No label has a positive, so average precision is undefined.")]
    changes.sort(key=lambda pair: -pair[1].difference)
    columns = [("label", "text"), ("positives", "count"), *_INTERVAL]
    columns += [(f"AP in {name}", "fraction"), (f"AP in {other}", "fraction")]
    rows = [[label, comparison.positives[label], c.difference, c.low, c.high, c.b, c.a] for label, c in changes]
    table = PageTable("difference-table", columns, rows, "Average precision and its difference in percent.")
    return [*_difference_chart(changes, name, other), table]


def _difference_chart(changes: list[tuple[str, MetricChange]], name: str, other: str) -> list[Any]:
    """Return bars of sorted differences; of many, only the highest and the lowest, which a note says."""
    half, parts, drawn = MOST_BARS // 2, [], changes
    if len(changes) > MOST_BARS:
        drawn = [*changes[:half], *changes[-half:]]
        text = f"Of {len(changes):,} labels, the {half} highest and the {half} lowest are drawn; the table lists all."
        parts.append(Note(text))
    rows = [
        {"label": label, "value": c.difference, "low": c.low, "high": c.high, "here": c.b, "there": c.a}
        for label, c in drawn
    ]
    (best, most), (worst, least) = changes[0], changes[-1]
    alt = (
        f"Average precision of {name} minus {other}, from {100 * most.difference:+.2f} points for {best} to "
        f"{100 * least.difference:+.2f} for {worst}"
    )
    spec = charts.difference_bars(rows, title="difference of average precision")
    return [*parts, Charts([Chart("ap-differences", "Difference of average precision", spec, alt, wide=True)])]


# ----------------------------------------------------------------------------------------------------------- scores
def precision_recall_points(ranking: Ranking, positives: np.ndarray, *, most: int = MOST_POINTS) -> np.ndarray:
    """Return recall, precision and threshold f64[T,3] at the positives of a ranking, with increasing thresholds.

    `positives` has the scores f64[P]. If P is above `most`, `most` evenly spaced positives are used, including the
    first and the last.
    """
    hits, ranks = ranking.hits, ranking.hits + ranking.above + ranking.level
    points = np.stack([hits / max(1, ranking.positives), hits / ranks, np.sort(positives)], axis=1)
    return points[np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).round().astype(int))]


def score_curves(files: RunFiles) -> Section:
    """Return precision over recall and positives over scores, for all labels pooled."""
    name, title, raw, scored = "scores", "Precision, recall and calibration", files.scored, files.corrected
    if raw is None or scored is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    entries = scored.entries(files.main_split.settings.difficult)
    scores, positive, valid = entries.scores, entries.positive, entries.valid
    known, bins = positive & valid, reliability(scores, positive, mask=valid).pooled()
    points = precision_recall_points(rank_all(scores, positive, valid), scores[known])
    text = (
        f"On {scored.name}: all {int(valid.sum()):,} scores pooled, {percent(known.sum() / valid.sum())} % of them "
        f"positive. Expected calibration error: {percent(bins.expected_calibration_error[0])} %, with "
        f"{bins.count.shape[1]} bins of equal width."
    )
    if fitted := files.thresholds.calibration if files.thresholds else None:
        before = reliability(raw.scores, positive, mask=valid).pooled().expected_calibration_error[0]
        text += f" The scores are corrected as fitted on {fitted['split']}; raw {percent(before)} %."
    ranked = charts.unit_curve(points, ("recall", "precision", "score at least"), last_format=".3f")
    alt = f"Precision over recall for all labels pooled on {scored.name}"
    plots = [Chart("precision-recall", "Precision and recall", ranked, alt), _calibration_chart(bins)]
    return Section(name, title, [Note(text), Charts(plots)])


def _calibration_chart(bins: Reliability) -> Chart:
    """Return the share of positives over the mean score of the bins of all labels pooled."""
    used = bins.count[0] > 0
    points = np.stack([bins.mean_score[0], bins.fraction_positive[0], bins.count[0]], axis=1)[used]
    names = ("mean score", "share of positives", "scores in the bin")
    spec = charts.unit_curve(points, names, last_format=",", diagonal=True)
    alt = "Share of positives over the mean score per bin; the dashed diagonal is perfect calibration"
    return Chart("reliability", "Calibration", spec, alt)


# ------------------------------------------------------------------------------------------------------- thresholds
def thresholds(files: RunFiles) -> Section:
    """Return the thresholds that prediction uses, and their origin."""
    name, title, stored = "thresholds", "Thresholds", files.thresholds
    if stored is None:
        missing = "thresholds.json is written when training starts, or fitted to the scores of a split:"
        return Section(name, title, missing=missing, command=files.command("--mode=thresholds"))
    parts: list[Any] = [Note("A label is predicted if its probability is at least its threshold.")]
    finite = [value for value in stored.values.values() if math.isfinite(value)]
    source, never = stored.source, len(stored.values) - len(finite)
    if "goal" in source:
        parts.append(Note(f"Fitted on {source['split']}: {'. '.join(fitted_lines(stored))}."))
        rows = [[metric, before, source["after"][metric]] for metric, before in source["before"].items()]
        columns = [("metric", "text"), (f"at {source['fixed']:g}", "fraction"), ("fitted", "fraction")]
        caption = f"On {source['split']} in percent; fitted to these images, so too good."
        return Section(name, title, [*parts, PageTable("threshold-metrics", columns, rows, caption)])
    text = f"They were fitted on {source['split']}." if source else "They are fixed; --mode=thresholds fits them."
    if finite:
        text += f" They are from {min(finite):.3g} to {max(finite):.3g}, median {np.median(finite):.3g}."
    if never:
        text += f" Never predicted: {quantity(never, 'label')}, with a dash among the labels."
    return Section(name, title, [*parts, Note(text)])
