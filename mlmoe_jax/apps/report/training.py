"""Sections about the training: summary, curves, cost, config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, Numbers, PageTable, Section
from mlmoe_jax.apps.report.run_files import COST, Evaluated, RunFiles
from mlmoe_jax.apps.tools.compare import RESAMPLES, SEED
from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.data.label_codes import few_positives
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, standard_interval
from mlmoe_jax.evaluation.results import OUT_OF_FOLD
from mlmoe_jax.models.registries import describe_adapters
from mlmoe_jax.runs.checkpoint import newest_notes
from mlmoe_jax.runs.folder import BACKBONE
from mlmoe_jax.runs.starts import read_starts
from mlmoe_jax.runtime.text import percent, quantity
from mlmoe_jax.training.selection import Selection, selection_split

MOST_POINTS = 500  # points of a curve
MOST_LABELS, FEWEST = 2000, 100  # most labels that are ranked in each resample, fewest resamples of a large split
_MOST_ENTRIES = 2e9  # scores in all resamples together: a few seconds
_NO_ROWS = "metrics.jsonl is written from the first logged step on."
_KEY_METRICS = {"mAP": "mAP", "mAP_envelope": "mAP, envelope", "precision@1": "precision@1"}
_KEY_METRICS_AT = {"CF1": "CF1", "F1_macro": "F1, macro", "OF1": "OF1"}  # at the threshold


def intervals(files: RunFiles, *, most: int = RESAMPLES) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the number of resamples and the 95 % intervals of metrics of the main split (bootstrap over its images).

    There are at most `most` resamples, and fewer for a large split. A run without scores, or with more than MOST_LABELS
    labels, has no intervals.
    """
    scored = files.scored
    if scored is None or scored.codes.shape[1] > MOST_LABELS:
        return 0, {}
    count = min(most, max(FEWEST, int(_MOST_ENTRIES / scored.codes.size)))
    settings = files.main_split.settings
    entries = scored.entries(settings.difficult)
    measure = WeightedMetrics(entries.scores, entries.positive, entries.valid, settings.threshold)
    parts = [measure(weights)[0] for weights in draw(len(scored), count, SEED)]
    values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    metrics = files.main_split.metrics
    ends = {name: standard_interval(metrics[name], values[name]) for name in values if name in metrics}
    return count, {name: pair for name, pair in ends.items() if not np.isnan(pair[0])}


def why_rough(files: RunFiles) -> str:
    """Return why the metrics of the main split are rough, as one sentence; "" without a reason.

    Selection on a test split has its own sentence, in the words of the papers.
    """
    main, config, reasons = files.main_split, files.config, []
    if main is None:
        return ""
    selection = None if config.eval.select_on == "test" else _selection(files)
    if selection is not None and selection.split == main.name:
        fitted = files.thresholds is not None and files.thresholds.source.get("split") == main.name
        reasons.append(f"selected the weights{' and fitted the thresholds' if fitted else ''}")
    if main.scores is not None and (few := few_positives(main.scores.codes)):
        reasons.append(f"have {few}")
    return f"The metrics on {main.name} are rough: its images {', and '.join(reasons)}." if reasons else ""


# ---------------------------------------------------------------------------------------------------------- header
def header(files: RunFiles) -> Section:
    """Return the summary: model and data, the selected step, and the main metrics with their intervals."""
    config, main, (resamples, ends) = files.config, files.main_split, intervals(files)
    parts: list[Any] = []
    if config.eval.select_on == "test":
        parts.append(Note("Selected on test, as published: the step was selected on the reported split."))
    if main is None:
        parts.append(Note("No split is evaluated yet; results are written when training ends, or by --mode=eval."))
    else:
        parts.append(Numbers(_tiles(main, f"{main.settings.threshold:g}", ends)))
    if resamples:
        parts.append(
            Note(
                "Ranges are 95 % intervals, 1.96 standard deviations on each side, over "
                f"{resamples:,} resamples of the images (bootstrap). They measure how much a number depends on the "
                "choice of the evaluated images, not on the seed of the training."
            )
        )
    if main is not None and main.name == OUT_OF_FOLD:
        parts.append(Note("out_of_fold: the training images, each scored by a fit without the image."))
    if rough := why_rough(files):
        parts.append(Note(rough))
    facts = [(name, value) for name, value in _facts(files) if value]
    return Section("summary", "Summary", [*parts, PageTable("facts", [("", "text"), ("", "text")], facts)])


def _tiles(main: Evaluated, threshold: str, ends: Mapping[str, tuple[float, float]]) -> list[tuple[str, str, str]]:
    """Return the name of each main metric with its threshold, its value, and its split and interval."""
    at_threshold = {f"{name}@{threshold}": f"{title} at {threshold}" for name, title in _KEY_METRICS_AT.items()}
    tiles = []
    for name, title in (_KEY_METRICS | at_threshold).items():
        if name in main.metrics:
            interval = f", {percent(ends[name][0], 1)} to {percent(ends[name][1], 1)}" if name in ends else ""
            tiles.append((f"{title} %", percent(main.metrics[name]), f"on {main.name}{interval}"))
    return tiles


def _facts(files: RunFiles) -> list[tuple[str, str]]:
    config, space, backbone = files.config, files.label_space, files.json(BACKBONE)
    model, adapters = config.model, describe_adapters(config)
    what = f"head {model.head.kind}{f' on {adapters}' if adapters else ''}"
    labels = (
        "" if space is None else f"{quantity(len(space.names), 'label')}, {quantity(space.images, 'training image')}"
    )
    fixed = "" if backbone is None else f", {backbone['frozen_parameters']:,} frozen parameters"
    last = files.rows[-1] if files.rows else None
    stopped = "" if last is None else f"{last['step']:,} steps"
    if last is not None and last.get("epoch") is not None:
        stopped += f", {last['epoch']:.4g} of {config.train.epochs} epochs"
    when, fitted = files.finished, config.train.fit == "logistic"
    return [
        ("model", what),
        ("backbone", f"{model.backbone.name} (weights: {model.backbone.weights}){fixed}"),
        ("data", f"{config.data.name}, {config.data.image_size} × {config.data.image_size} pixels"),
        ("labels", labels),
        ("trained", "to convergence, by logistic regression" if fitted else stopped),
        ("selected", "" if fitted else selection_text(files)),
        ("written", "" if when is None else f"{when:%Y-%m-%d %H:%M} UTC"),
        ("folder", str(files.folder)),
    ]


def selection_text(files: RunFiles) -> str:
    """Return a description of the selected weights, from a checkpoint or else from metrics.jsonl; "" without both."""
    selection, config = _selection(files), files.config
    if selection is None and config.eval.select_on == "none" and files.rows:
        return f"the last {'ema' if config.ema.decay else 'raw'} weights, regardless of {config.eval.select_metric}"
    return "" if selection is None else str(selection)


def _selection(files: RunFiles) -> Selection | None:
    if notes := newest_notes(files.folder):
        return Selection.from_notes({}, notes)
    config, metric = files.config, files.config.eval.select_metric
    split, selection = selection_split(config), Selection({}, metric)
    if config.eval.select_on == "none":
        return None
    for row in files.rows:
        values = {kind: row.get(f"{split}/{kind}/{metric}") for kind in ("raw", "ema")}
        if measured := {kind: (value, {}) for kind, value in values.items() if value is not None}:
            selection.consider(row["step"], split, measured)
    return selection if selection.best else None


# ---------------------------------------------------------------------------------------------------------- curves
def training_curves(files: RunFiles) -> Section:
    """Return loss and its terms, mAP, learning rate, speed and waiting for data over the steps."""
    rows = files.rows
    if not rows:
        none = "A fit to convergence has no steps." if files.config.train.fit == "logistic" else _NO_ROWS
        return Section("curves", "Training curves", missing=none)
    terms = list(dict.fromkeys(name for row in rows for name in row if name.startswith("loss/")))
    plots = [
        _plot(rows, "loss", "Loss", ["loss"], y_title="loss", from_zero=False),
        _plot(rows, "terms", "Terms of the loss", terms, y_title="loss", from_zero=False),
        _plot_metrics(files),
        _plot(rows, "rate", "Learning rate", ["learning_rate"], y_title="rate", y_format="~e"),
        _plot(rows, "gradient", "Norm of the gradient", ["gradient_norm"], y_title="norm"),
        _plot(rows, "speed", "Speed", ["images_per_second"], y_title="images/s", y_format="~s"),
        _plot(rows, "wait", "Waiting for data", ["data_wait"], y_title="share of the time", y_format=".2~%"),
    ]
    parts: list[Any] = [Charts([plot for plot in plots if plot is not None])]
    if len(rows) > MOST_POINTS:
        parts.append(Note(f"{len(rows):,} logged steps are averaged to {MOST_POINTS} points per curve."))
    return Section("curves", "Training curves", parts)


def _plot_metrics(files: RunFiles) -> Chart | None:
    """Return a chart of the mAP, and of the metric of the selection, on all splits."""
    metrics = list(dict.fromkeys(("mAP", files.config.eval.select_metric)))
    endings = tuple(f"/{metric}" for metric in metrics)
    names = list(dict.fromkeys(name for row in files.rows for name in row if name.endswith(endings)))
    title = f"{' and '.join(metrics)} during training"
    return _plot(files.rows, "map", title, names, y_title=metrics[0], y_format=".1%", from_zero=False)


def _plot(
    rows: Sequence[Mapping[str, Any]], name: str, title: str, keys: Sequence[str], **options: Any
) -> Chart | None:
    """Return a chart of the values of keys over the steps; None if no step has one of them."""
    points = [point for key in keys for point in thin_curve(rows, key)]
    if not points:
        return None
    alt = f"{title} over {rows[-1]['step']:,} steps, at the end {points[-1]['value']:.4g}"
    return Chart(f"curve-{name}", title, charts.line_chart(points, **options), alt)


def thin_curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return at most MOST_POINTS points of a curve, each the mean of neighboring steps."""
    logged = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    chunks = np.array_split(np.array(logged, np.float64), min(len(logged), MOST_POINTS)) if logged else []
    return [{"step": chunk[-1, 0], "value": chunk[:, 1].mean(), "series": key} for chunk in chunks]


# ------------------------------------------------------------------------------------------------------------ cost
def cost(files: RunFiles) -> Section:
    """Return parameters, multiply-adds and bytes, as in the tables of the prompt-tuning papers."""
    title, counts = "Cost", files.json(COST)
    if counts is None:
        missing = "Parameters and multiply-adds are not counted yet; this counts them:"
        return Section("cost", title, missing=missing, command=files.command("--mode=report", "--cost"))
    parameters, macs = counts["params"], counts["macs"]
    share = percent(parameters["trainable"] / max(1, parameters["total"]))
    rows = [
        ("parameters, total", f"{parameters['total']:,}", ""),
        ("parameters, trainable", f"{parameters['trainable']:,}", f"{share} % of all"),
        ("parameters of the backbone", f"{parameters['backbone']:,}", ""),
        ("GMACs as the papers count", f"{macs['layers'] / 1e9:.4g}", "layers alone: no attention, experts, gates"),
        ("GMACs, full", f"{macs['full'] / 1e9:.4g}", "with attention, experts and gates"),
        ("GMACs, executed", f"{macs['executed'] / 1e9:.4g}", "counted on the evaluation step as compiled"),
        *((f"MB, {part}", f"{size / 1e6:,.1f}", "") for part, size in counts.get("memory", {}).items()),
    ]
    modules = [(name, int(row[0]), int(row[1])) for name, row in counts.get("modules", {}).items()]
    columns = [("module", "text"), ("parameters", "count"), ("trainable", "count")]
    parts = [
        PageTable("cost-table", [("per image", "text"), ("count", "text"), ("meaning", "text")], rows),
        Details("Parameters per module", [PageTable("module-table", columns, modules)]),
    ]
    return Section("cost", title, parts)


# ---------------------------------------------------------------------------------------------------------- config
def settings(files: RunFiles) -> Section:
    """Return the changed keys of the config, and the starts of the training with their versions."""
    now, default = configuration.flatten(files.config), configuration.flatten(default_config())
    changed = [(key, repr(value), repr(default.get(key))) for key, value in now.items() if value != default.get(key)]
    same = [(key, repr(value)) for key, value in now.items() if value == default.get(key)]
    columns = [("key", "text"), ("value", "text"), ("default", "text")]
    parts: list[Any] = [
        Note(f"{quantity(len(changed), 'key')} with another value than the default."),
        PageTable("changed-keys", columns, changed),
        Details(f"{quantity(len(same), 'key')} with the default value", [PageTable("same-keys", columns[:2], same)]),
    ]
    starts = [
        (
            *(start["time"], start["step"], f"{start['devices']} × {start['device']}", start["processes"]),
            ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        )
        for start in read_starts(files.folder)
    ]
    columns = [
        ("time", "text"),
        ("from step", "count"),
        ("devices", "text"),
        ("processes", "count"),
        ("versions", "text"),
    ]
    parts += [PageTable("starts", columns, starts, "Starts of the training")] if starts else []
    return Section("config", "Config and versions", parts)
