"""Sections about the results: metrics per split and per label, differences from another run, thresholds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, Section, Table
from mlmoe_jax.apps.report.run_files import Evaluated, RunFiles
from mlmoe_jax.apps.tools.compare import ComparedRun, Comparison, compare_runs
from mlmoe_jax.evaluation.metrics.groups import GROUPS
from mlmoe_jax.evaluation.metrics.standard import CUTS, FIGURES, PREDICTIONS
from mlmoe_jax.evaluation.results import hidden_evaluations
from mlmoe_jax.runtime.text import percent

MOST_BARS = 100
_INTERVAL = (("difference", "difference"), ("from", "difference"), ("to", "difference"))


# --------------------------------------------------------------------------------------------------------- metrics
def metrics(files: RunFiles) -> Section:
    """Return the metrics of each split in percent, by group, each with its definition."""
    title, splits = "Metrics", _headed(files.splits)
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
    at_thresholds = {name: name.partition("@")[2] for name in names if name.partition("@")[0] in FIGURES}
    remaining = [name for name in names if name not in at_thresholds]
    for number, group in enumerate(map(GROUPS.__getitem__, GROUPS)):
        if meanings := {name: text for name in remaining if (text := _meaning(name, group.meanings))}:
            remaining = [name for name in remaining if name not in meanings]
            parts.append(_table(f"metrics-{number}", group.caption, meanings, splits))
    threshold = f"{files.settings(files.main_split.prefix).eval.threshold:g}"
    for at in sorted(dict.fromkeys(at_thresholds.values()), key=lambda at: at != threshold):  # of the config first
        meaning = _meaning(at, CUTS) or "see results.json"
        figures = {f"{name}@{at}": text for name, text in FIGURES.items() if f"{name}@{at}" in names}
        table = _table(f"metrics-at-{at}", f"{PREDICTIONS.caption} at {at}: {meaning}", figures, splits)
        parts += [table, *_never(files)] if at == threshold else [Details(f"The same at {at}", [table])]
    if remaining:
        rows = [[name, *(split.metrics.get(name) for split in splits.values())] for name in remaining]
        columns = [("name", "text"), *((name, "number") for name in splits)]
        parts.append(Table("metrics-other", columns, rows, "Other values of results.json, not in percent"))
    return Section("metrics", title, parts)


def _headed(splits: Mapping[str, Evaluated]) -> Mapping[str, Evaluated]:
    """Return the splits by the headings of their columns, which name the source if it is not the same for all."""
    if len({split.prefix for split in splits.values()}) == 1:
        return splits
    return {f"{name} ({split.prefix or 'training'})": split for name, split in splits.items()}


def _meaning(name: str, definitions: Mapping[str, str]) -> str:
    """Return the meaning of a name; "" if it matches no pattern."""
    for pattern, sentence in definitions.items():
        if match := re.fullmatch(pattern, name):
            return sentence.format(*match.groups())
    return ""


def _table(name: str, caption: str, meanings: Mapping[str, str], splits: Mapping[str, Evaluated]) -> Table:
    """Return metrics by name with their definitions."""
    rows = [[[of, meanings[of]], *(split.metrics.get(of) for split in splits.values())] for of in meanings]
    return Table(name, [("metric", "term"), *((split, "fraction") for split in splits)], rows, caption)


def _never(files: RunFiles) -> list[Note]:
    scored = files.scored
    if scored is None:
        return []
    config = files.settings(scored.prefix)
    known = scored.targets(config.data.difficult_eval)[1] != 0
    never = int((~((scored.scores >= config.eval.threshold) & known).any(axis=0)).sum())
    text = f"{never:,} of {known.shape[1]:,} labels are never predicted on {scored.name} at {config.eval.threshold:g}"
    return [Note(f"{text}; CP and CF1 leave them out, precision_macro and F1_macro count them as 0.")]


# -------------------------------------------------------------------------------------------------------- per class
def per_class(files: RunFiles) -> Section:
    """Return the average precision per label as bars, and a table with all values per label."""
    title, main = "Labels", files.main_split
    if main is None or not main.per_class:
        missing = "per_class.csv is written when training ends, or by an evaluation:"
        return Section("labels", title, missing=missing, command=files.command("--mode=eval"))
    rows = [
        {"label": label, "value": row["AP"], "positives": row.get("positives")}
        for label, row in main.per_class.items()
        if row.get("AP") is not None
    ]
    rows.sort(key=lambda row: -row["value"])
    parts: list[Any] = []
    if rows:
        drawn, sentence = _ends(rows)
        alt = (
            f"Average precision of {len(rows)} labels on {main.name}, from {rows[0]['label']} with "
            f"{percent(rows[0]['value'])} % to {rows[-1]['label']} with {percent(rows[-1]['value'])} %"
        )
        parts.append(Note(f"Average precision on {main.name}, highest first. {sentence}".strip()))
        spec = charts.bars(drawn, title="average precision")
        parts.append(Charts([Chart("ap-bars", "Average precision of each label", spec, alt, wide=True)]))
    return Section("labels", title, [*parts, _label_table(files, main)])


def _ends(ordered: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the first and the last items of a long list, and a sentence about the omission."""
    if len(ordered) <= MOST_BARS:
        return list(ordered), ""
    half = MOST_BARS // 2
    sentence = f"Of {len(ordered):,} labels, the {half} highest and the {half} lowest are drawn; the table lists all."
    return [*ordered[:half], *ordered[-half:]], sentence


def _label_table(files: RunFiles, main: Evaluated) -> Table:
    """Return the table of labels: per_class.csv of the main split, AP on the other splits, thresholds."""
    own = list(next(iter(main.per_class.values())))
    others = {
        name: split.per_class for name, split in _headed(files.splits).items() if split is not main and split.per_class
    }
    thresholds = None if files.thresholds is None else files.thresholds.values
    columns = [("label", "text"), *((name, "count" if name == "positives" else "fraction") for name in own)]
    columns += [(f"AP on {name}", "fraction") for name in others]
    columns += [("threshold", "number")] if thresholds is not None else []
    rows = []
    for label, row in main.per_class.items():
        cells = [label, *row.values(), *(table.get(label, {}).get("AP") for table in others.values())]
        rows.append(cells if thresholds is None else [*cells, thresholds.get(label)])
    return Table("label-table", columns, rows, f"All labels on {main.name}; AP and other fractions in percent.")


# ------------------------------------------------------------------------------------------------------ differences
def differences(files: RunFiles, other: RunFiles | None) -> Section:
    """Return the differences between this run and another, in total and per label (DR-MoE, table 6).

    Raises UserError if the runs cannot be compared: no scores, different labels, or no common image.
    """
    name, title = "differences", "Differences from another run"
    if other is None:
        missing = "This page is about one run; with the folder of another one in place of OTHER, it compares them:"
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
        Table("metric-differences", columns, rows, caption),
        *_label_differences(comparison, files.name, other.name),
        _changed_images(comparison, other.name),
    ]
    return Section(name, title, parts)


def _in_words(comparison: Comparison, other: str) -> str:
    counts, clear = comparison.counts, [change for change in comparison.ap.values() if change.clear]
    better = sum(change.difference > 0 for change in clear)
    text = (
        f"This run minus {other}, on the {counts['images']:,} images of {comparison.split} with scores in both. "
        f"Intervals contain 95 % of the differences over {comparison.resamples:,} resamples of the images; a "
        f"difference is clear if its interval excludes 0. Of {len(comparison.ap):,} labels, {better} are clearly "
        f"better and {len(clear) - better} clearly worse. More than one in twenty labels without a difference look "
        "clear by chance: about one in fifteen with 30 positive images, and one in ten with 8."
    )
    only = counts["only_a"] + counts["only_b"]
    if only or counts["unread"]:
        text += f" Left out: {only:,} images of only one run, {counts['unread']:,} unreadable."
    return text


def _label_differences(comparison: Comparison, name: str, other: str) -> list[Any]:
    shown = [(label, change) for label, change in comparison.ap.items() if not math.isnan(change.difference)]
    if not shown:
        return [Note("No label has a positive, so average precision is undefined.")]
    shown.sort(key=lambda pair: -pair[1].difference)
    drawn, sentence = _ends(shown)
    rows = [
        {"label": label, "value": c.difference, "low": c.low, "high": c.high, "here": c.b, "there": c.a}
        for label, c in drawn
    ]
    (best, most), (worst, least) = shown[0], shown[-1]
    alt = (
        f"Average precision minus that of {other}, from {100 * most.difference:+.2f} points for {best} to "
        f"{100 * least.difference:+.2f} for {worst}"
    )
    spec = charts.difference_bars(rows, title="difference of average precision")
    columns = [("label", "text"), ("positives", "count"), *_INTERVAL]
    columns += [(f"AP in {name}", "fraction"), (f"AP in {other}", "fraction")]
    table = [[label, comparison.positives[label], c.difference, c.low, c.high, c.b, c.a] for label, c in shown]
    return [
        *([Note(sentence)] if sentence else []),
        Charts([Chart("ap-differences", "Difference of average precision", spec, alt, wide=True)]),
        Table("difference-table", columns, table, "Average precision and its difference in percent."),
    ]


def _changed_images(comparison: Comparison, other: str) -> Details:
    rows = []
    for image in comparison.changed:
        moves = ", ".join(f"{m.label} {percent(m.a, 0)} → {percent(m.b, 0)} %{' ✓' * m.positive}" for m in image.moves)
        rows.append([image.id, image.change, image.b - image.a, moves, ", ".join(image.labels)])
    columns = [("image", "text"), ("mean change", "fraction"), ("closer to the truth by", "difference")]
    columns += [(f"from {other} to this run (✓: present)", "text"), ("present labels", "text")]
    caption = "Images whose scores changed most on average over their labels, in percent."
    return Details("Images that changed most", [Table("changed-table", columns, rows, caption)])


# ------------------------------------------------------------------------------------------------------- thresholds
def thresholds(files: RunFiles) -> Section:
    """Return the thresholds that prediction uses, and their origin."""
    name, title, stored = "thresholds", "Thresholds", files.thresholds
    if stored is None:
        missing = "thresholds.json is written when training starts, or fitted to the scores of a split:"
        return Section(name, title, missing=missing, command=files.command("--mode=thresholds"))
    parts: list[Any] = [Note("The thresholds are fixed; --mode=thresholds fits them on a split.")]
    if stored.source:
        rows = [(key, value if isinstance(value, str) else repr(value)) for key, value in stored.source.items()]
        parts = [Table("threshold-source", [("", "text"), ("", "text")], rows, "How they were fitted")]
    finite = [value for value in stored.values.values() if math.isfinite(value)]
    never = len(stored.values) - len(finite)
    if not finite:
        parts.append(Note("No label is ever predicted."))
    elif not never and min(finite) == max(finite):
        parts.append(Note(f"Each label is predicted if its probability is at least {finite[0]:g}."))
    else:
        text = (
            "Each label is predicted if its probability is at least its own threshold: from "
            f"{min(finite):.3g} to {max(finite):.3g}, median {np.median(finite):.3g}."
        )
        parts.append(Note(text + f" {never:,} labels (with a dash) are never predicted." * bool(never)))
        columns = [("label", "text"), ("threshold", "number")]
        parts.append(Table("threshold-table", columns, list(stored.values.items())))
    return Section(name, title, parts)
