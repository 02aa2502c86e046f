"""Sections about the results: metrics per split and per label, differences from another run, thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Facts, Note, Section, SortableTable, Table
from mlmoe_jax.apps.report.frequency import by_frequency
from mlmoe_jax.apps.report.mistakes import Judged
from mlmoe_jax.apps.report.resampling import Resampled
from mlmoe_jax.apps.report.run_files import Evaluated, RunFiles
from mlmoe_jax.apps.tools.compare import Change, ComparedRun, Comparison, compare_runs
from mlmoe_jax.evaluation.metrics.groups import GROUPS
from mlmoe_jax.evaluation.metrics.predictions import CUTS, FIGURES, PREDICTIONS
from mlmoe_jax.evaluation.results import hidden_evaluations
from mlmoe_jax.runtime.text import percent

MOST_BARS = 100


def _meaning(name: str, definitions: Mapping[str, str]) -> str:
    """Return the meaning of a name; "" if it matches no pattern."""
    for pattern, sentence in definitions.items():
        if found := re.fullmatch(pattern, name):
            return sentence.format(*found.groups())
    return ""


# --------------------------------------------------------------------------------------------------------- metrics
def metrics(files: RunFiles, judged: Judged | None = None) -> Section:
    """Return the metrics of each split in percent, by group, each with its definition."""
    title, splits = "Metrics", files.splits
    if not splits:
        missing = "results.json is written when training ends, or by an evaluation:"
        return Section("metrics", title, missing=missing, command=files.command("--mode=eval"))
    names = list(dict.fromkeys(name for split in splits.values() for name in split.metrics))
    parts: list[Any] = [
        Note(
            "In percent. Means over labels leave out those without a positive in a split, unless a definition says "
            "otherwise."
        )
    ]
    parts += [Note(f"{sentence}.") for sentence in hidden_evaluations(files.folder).values()]
    splits = _with_sources(splits)
    left = [name for name in names if not _cut(name)]
    for group in map(GROUPS.__getitem__, GROUPS):
        meaning = {name: sentence for name in left if (sentence := _meaning(name, group.meanings))}
        if meaning:
            left = [name for name in left if name not in meaning]
            parts.append(_table(group.caption, meaning, splits))
    cuts = list(dict.fromkeys(cut for name in names if (cut := _cut(name))))
    if cuts:
        used = files.settings(files.main_split.prefix)
        parts += _at_cuts(cuts, splits, f"{used.eval.threshold:g}", used.data.difficult_eval, judged)
    if left:
        rows = [[name, *(_plain(split.metrics.get(name)) for split in splits.values())] for name in left]
        parts.append(Table(("name", *splits), rows, "Other values of results.json, not in percent"))
    return Section("metrics", title, parts)


def _with_sources(splits: Mapping[str, Evaluated]) -> Mapping[str, Evaluated]:
    """Return the splits by the headings of their columns, which name the source if it is not the same for all."""
    if len({split.prefix for split in splits.values()}) == 1:
        return splits
    return {f"{name} ({split.prefix or 'training'})": split for name, split in splits.items()}


def _cut(name: str) -> str:
    """Return the cut of a metric such as CF1@0.5; "" if it has none."""
    base, _, cut = name.partition("@")
    return cut if base in FIGURES else ""


def _table(caption: str, meanings: Mapping[str, str], splits: Mapping[str, Evaluated], suffix: str = "") -> Table:
    """Return the metrics that any split has, by name without `suffix`, with their definitions below the names."""
    shown = [name for name in meanings if any(name + suffix in split.metrics for split in splits.values())]
    rows = [[name, *(percent(split.metrics.get(name + suffix)) for split in splits.values())] for name in shown]
    return Table(("metric", *splits), rows, caption, meanings=[meanings[name] for name in shown])


def _at_cuts(
    cuts: Sequence[str], splits: Mapping[str, Evaluated], threshold: str, difficult: str, judged: Judged | None
) -> list[Any]:
    """Return precision, recall and F1 at each cut: those at the threshold of the config, and the others collapsed."""
    parts: list[Any] = []
    for cut in sorted(cuts, key=lambda cut: cut != threshold):  # the threshold of the config first
        meaning = _meaning(cut, CUTS) or "see results.json"
        if cut == threshold:
            parts.append(_table(f"{PREDICTIONS.caption} at {cut}: {meaning}", FIGURES, splits, f"@{cut}"))
            parts += [Note(_never(judged, float(cut), difficult))] if judged else []
        else:
            parts.append(Details(f"The same at {cut}", [_table(meaning, FIGURES, splits, f"@{cut}")]))
    return parts


def _never(judged: Judged, threshold: float, difficult: str) -> str:
    known = judged.table.targets(difficult)[1] != 0
    never = int((~((judged.table.scores >= threshold) & known).any(axis=0)).sum())
    of = f"{never:,} of {len(judged.labels):,} labels are never predicted on {judged.name}"
    return f"{of} at {threshold:g}; CP and CF1 leave them out, precision_macro and F1_macro count them as 0."


def _plain(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.5g}"


# -------------------------------------------------------------------------------------------------------- per class
def per_class(files: RunFiles, resampled: Resampled | None = None) -> Section:
    """Return the average precision per label as bars and by frequency, and a table with all values per label."""
    title, main = "Labels", files.main_split
    if main is None or not main.per_class:
        missing = "per_class.csv is written when training ends, or by an evaluation:"
        return Section("labels", title, missing=missing, command=files.command("--mode=eval"))
    shown = [row for row in main.per_class if _number(row.get("AP")) is not None]
    ordered = sorted(shown, key=lambda row: -float(row["AP"]))
    parts: list[Any] = []
    if ordered:
        drawn, left_out = _ends(ordered)
        rows = [
            {"label": row["label"], "value": float(row["AP"]), "detail": f"{row.get('positives', '?')} positives"}
            for row in drawn
        ]
        best, worst = ordered[0], ordered[-1]
        alt = (
            f"Average precision of {len(rows)} labels on {main.name}, from {best['label']} with "
            f"{percent(float(best['AP']))} % to {worst['label']} with {percent(float(worst['AP']))} %"
        )
        parts.append(Note(f"Average precision on {main.name}, highest first. {left_out}".strip()))
        spec = charts.bars(rows, x_title="average precision")
        parts.append(Charts([Chart("ap-bars", "Average precision of each label", spec, alt, wide=True)]))
        parts += by_frequency(files, main, resampled)
    return Section("labels", title, [*parts, _label_table(files, main)])


def _ends(ordered: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the first and the last items of a long list, and a sentence about the omission."""
    if len(ordered) <= MOST_BARS:
        return list(ordered), ""
    half = MOST_BARS // 2
    sentence = f"Of {len(ordered):,} labels, the {half} highest and the {half} lowest are drawn; the table lists all."
    return [*ordered[:half], *ordered[-half:]], sentence


def _label_table(files: RunFiles, main: Evaluated) -> SortableTable:
    """Return the table of labels: per_class.csv of the main split, AP on the other splits, thresholds."""
    own = [name for name in main.per_class[0] if name not in ("split", "label")]
    others = {
        name: {row["label"]: _number(row.get("AP")) for row in split.per_class}
        for name, split in _with_sources(files.splits).items()
        if split is not main and split.per_class
    }
    thresholds = {} if files.thresholds is None else files.thresholds.values
    columns = [("label", "text"), *((name, _kind(name)) for name in own)]
    columns += [(f"AP on {name}", "fraction") for name in others]
    columns += [("threshold", "number")] if thresholds else []
    rows = []
    for row in main.per_class:
        label = row["label"]
        cells = [label, *(_number(row[name]) for name in own), *(of.get(label) for of in others.values())]
        rows.append([*cells, thresholds.get(label)] if thresholds else cells)
    caption = f"All labels on {main.name}; AP and other fractions in percent. Click a column heading to sort."
    return SortableTable("label-table", columns, rows, caption)


def _kind(column: str) -> str:
    if column in ("positives", "images", "negatives", "predicted"):
        return "count"
    fractions = ("AP", "AUC", "precision", "recall", "F1", "ECE", "Brier")
    return "fraction" if column.startswith(fractions) else "number"


def _number(text: str | None) -> float | None:
    """Return the value of a cell; None if it is empty or nan."""
    value = float(text) if text else math.nan
    return None if math.isnan(value) else value


# ------------------------------------------------------------------------------------------------------ differences
def differences(files: RunFiles, other: RunFiles | None) -> Section:
    """Return the differences between this run and another, in total and per label (DR-MoE, table 6).

    Raises UserError if the runs cannot be compared: no scores, different labels, or no common image.
    """
    name, title = "differences", "Differences from another run"
    if other is None:
        missing = "This page is about one run; with the folder of another one in place of OTHER, it compares them:"
        return Section(name, title, missing=missing, command=files.command("--mode=report", "--against=OTHER"))
    found = compare_runs(ComparedRun.of(other.folder), ComparedRun.of(files.folder))
    return Section(
        name,
        title,
        [
            Note(_in_words(found, other.name)),
            _metric_differences(found, files.name, other.name),
            *_label_differences(found, files.name, other.name),
            _changed_images(found, other.name),
        ],
    )


def _in_words(found: Comparison, other: str) -> str:
    clear = [change for change in found.ap.values() if change.clear]
    better = sum(change.difference > 0 for change in clear)
    text = (
        f"This run minus {other}, on the {found.counts['images']:,} images of {found.split} with scores in both. "
        f"Intervals contain 95 % of the differences over {found.resamples:,} resamples of the images; a difference is "
        f"clear if its interval excludes 0. Of {len(found.ap):,} labels, {better} are clearly better and "
        f"{len(clear) - better} clearly worse. More than one in twenty labels without a difference look clear by "
        "chance: about one in fifteen with 30 positive images, and one in ten with 8."
    )
    only, unread = found.counts["only_a"] + found.counts["only_b"], found.counts["unread"]
    if only or unread:
        text += f" Left out: {only:,} images of only one run, {unread:,} unreadable."
    return text


def _metric_differences(found: Comparison, name: str, other: str) -> Table:
    rows = [
        (metric, percent(c.b), percent(c.a), f"{100 * c.difference:+.2f}", _interval(c), "clear" if c.clear else "")
        for metric, c in found.metrics.items()
        if not math.isnan(c.difference)
    ]
    columns = ("metric", name, other, "difference", "95 % interval", "")
    return Table(columns, rows, f"Metrics on {found.split} in percent", text=(0, 5))


def _interval(change: Change) -> str:
    return f"{100 * change.low:+.2f} … {100 * change.high:+.2f}"


def _label_differences(found: Comparison, name: str, other: str) -> list[Any]:
    shown = [(label, change) for label, change in found.ap.items() if not math.isnan(change.difference)]
    if not shown:
        return [Note("No label has a positive, so average precision is undefined.")]
    shown.sort(key=lambda pair: -pair[1].difference)
    drawn, left_out = _ends(shown)
    rows = [
        {"label": label, "value": c.difference, "low": c.low, "high": c.high, "here": c.b, "there": c.a}
        for label, c in drawn
    ]
    (best, most), (worst, least) = shown[0], shown[-1]
    alt = (
        f"Average precision minus that of {other}, from {100 * most.difference:+.2f} points for {best} to "
        f"{100 * least.difference:+.2f} for {worst}"
    )
    spec = charts.difference_bars(rows, x_title="difference of average precision")
    columns = [("label", "text"), ("positives", "count"), ("difference", "fraction"), ("low", "fraction")]
    columns += [("high", "fraction"), (f"AP in {name}", "fraction"), (f"AP in {other}", "fraction")]
    table = [[label, found.positives[label], c.difference, c.low, c.high, c.b, c.a] for label, c in shown]
    return [
        *([Note(left_out)] if left_out else []),
        Charts([Chart("ap-differences", "Difference of average precision", spec, alt, wide=True)]),
        SortableTable("difference-table", columns, table, "Average precision and its difference in percent."),
    ]


def _changed_images(found: Comparison, other: str) -> Details:
    rows = []
    for image in found.changed:
        moves = ", ".join(f"{m.label} {percent(m.a, 0)} → {percent(m.b, 0)} %{' ✓' * m.positive}" for m in image.moves)
        rows.append([image.id, image.change, image.b - image.a, moves, ", ".join(image.labels)])
    columns = [("image", "text"), ("mean change", "fraction"), ("closer to the truth by", "fraction")]
    columns += [(f"from {other} to this run (✓: present)", "text"), ("present labels", "text")]
    caption = "Images whose scores changed most on average over their labels, in percent."
    return Details("Images that changed most", [SortableTable("changed-table", columns, rows, caption)])


# ------------------------------------------------------------------------------------------------------- thresholds
def thresholds(files: RunFiles) -> Section:
    """Return the thresholds that prediction uses, and their origin."""
    name, title, found = "thresholds", "Thresholds", files.thresholds
    if found is None:
        missing = "thresholds.json is written when training starts, or fitted to the scores of a split:"
        return Section(name, title, missing=missing, command=files.command("--mode=thresholds"))
    parts: list[Any] = []
    if found.source:
        parts.append(Facts([(key, v if isinstance(v, str) else repr(v)) for key, v in found.source.items()]))
    else:
        parts.append(Note("The thresholds are fixed; --mode=thresholds fits them on a split."))
    ordered = sorted(found.values.values())
    if ordered and math.isinf(ordered[0]):
        parts.append(Note("No label is ever predicted."))
    elif ordered and ordered[0] == ordered[-1]:
        parts.append(Note(f"Each label is predicted if its probability is at least {ordered[0]:g}."))
    elif ordered:
        given = [cut for cut in ordered if math.isfinite(cut)]
        text = "Each label is predicted if its probability is at least its own threshold"
        if given:
            text += f": from {given[0]:.3g} to {given[-1]:.3g}, median {np.median(given):.3g}"
        never = len(ordered) - len(given)
        parts.append(Note(f"{text}." + (f" {never:,} labels (with a dash) are never predicted." * bool(never))))
        columns = [("label", "text"), ("threshold", "number")]
        parts.append(SortableTable("threshold-table", columns, [[label, cut] for label, cut in found.values.items()]))
    return Section(name, title, parts)
