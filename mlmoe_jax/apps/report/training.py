"""Sections about the training: summary, curves, cost, config."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, Numbers, PageTable
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import RESAMPLES, SEED
from mlmoe_jax.data.label_matrix import few_positives
from mlmoe_jax.evaluation.measure import headlines
from mlmoe_jax.evaluation.metrics.bootstrap import WeightedMetrics, draw, standard_interval
from mlmoe_jax.evaluation.results import OUT_OF_FOLD
from mlmoe_jax.models.adapters.catalog import describe_adapters
from mlmoe_jax.runs.starts import read_starts
from mlmoe_jax.runtime.text import percent, quantity

MOST_POINTS = 500  # points of a curve
MOST_RANKED, FEWEST = 2000, 100  # most labels that are ranked in each resample, fewest resamples of a large split
_MOST_ENTRIES = 2e9  # scores in all resamples together: a few seconds
_MACS = (
    "MACs are multiply-adds per image. layers: as the prompt-tuning papers count, without attention, experts and "
    "gates; full: with them; products: full without norms, as the papers on heads over feature maps count; executed: "
    "those of the evaluation step as compiled."
)


def why_rough(files: RunFiles) -> str:
    """Return a sentence that says why the metrics of the main split are unreliable; "" if there is no reason.

    The reasons are that the images of the main split selected the weights, or that labels have few positive images.
    """
    reasons = []
    if files.selection and files.selection.split == files.main:
        reasons.append("selected the weights")
    if files.raw and (few := few_positives(files.raw.codes)):
        reasons.append(f"have {few}")
    return f"The metrics on {files.main} are rough: its images {' and '.join(reasons)}." if reasons else ""


def intervals(files: RunFiles, *, resamples: int = RESAMPLES) -> dict[str, tuple[float, float]]:
    """Return metric -> (low, high): 95 % intervals on the main split, as fractions, from a bootstrap over its images.

    For a large split, fewer than `resamples` resamples are used, but at least FEWEST. The result is {} if the run has
    no stored scores or has more than MOST_RANKED labels.
    """
    scored = files.scored
    if scored is None or scored.codes.shape[1] > MOST_RANKED:
        return {}
    count = min(resamples, max(FEWEST, int(_MOST_ENTRIES / scored.codes.size)))
    entries = scored.entries(files.main_settings.difficult)
    threshold, attributes = files.main_settings.threshold, files.tree.attributes
    measure = WeightedMetrics(entries.scores, entries.positive, entries.valid, threshold, attributes)
    parts = [measure(weights)[0] for weights in draw(len(scored), count, SEED)]
    metrics = files.results[files.main].metrics
    ends = {
        name: standard_interval(metrics[name], np.concatenate([part[name] for part in parts]))
        for name in parts[0]
        if name in metrics
    }
    return {name: pair for name, pair in ends.items() if not np.isnan(pair[0])}


# ---------------------------------------------------------------------------------------------------------- header
def header(files: RunFiles) -> list[Any]:
    """Return the main metrics with intervals, notes, and facts such as the model, data set and selected step."""
    notes = [why_rough(files)]
    if not files.results:
        notes.append("No split is evaluated yet; results are written when training ends, or by mlmoe eval.")
    if files.main == OUT_OF_FOLD:
        notes.append("out_of_fold: the training images, each scored by a fit without the image.")
    measured = files.results[files.main].metrics if files.results else {}
    ends, tiles = intervals(files), []
    for name in headlines({files.main: measured}):
        interval = f", {' to '.join(percent(end, 1) for end in ends[name])}" if name in ends else ""
        title = name.replace("/", "/\u200b")  # a line may break there
        tiles.append((f"{title}, %", percent(measured[name]), f"on {files.main}{interval}"))
    if ends:
        notes.append(
            "Ranges are 95 % intervals, 1.96 standard deviations on each side, over resamples of the images "
            "(bootstrap). They measure how much a number depends on the choice of the evaluated images, not on the "
            "seed of the training."
        )
    return [
        Numbers(tiles),
        *(Note(note) for note in notes if note),
        PageTable("facts", ["", ""], [fact for fact in _facts(files) if fact[1]]),
    ]


def _facts(files: RunFiles) -> list[tuple[str, str]]:
    config, space, backbone = files.config, files.label_space, files.backbone
    model, adapters = config.model, describe_adapters(config)
    fixed = f", {backbone['frozen_parameters']:,} frozen parameters" if backbone else ""
    trained = f"{files.rows[-1]['step']:,} steps, with train.epochs={config.train.epochs}" if files.rows else ""
    if config.train.fit == "logistic":
        trained = "to convergence, by logistic regression"
    return [
        ("model", f"head {model.head.kind}{f' on {adapters}' if adapters else ''}"),
        ("backbone", f"{model.backbone.name} (weights: {model.backbone.weights}){fixed}"),
        ("data", f"{config.data.name}, {config.data.image_size} × {config.data.image_size} pixels"),
        (
            "labels",
            f"{quantity(len(files.names), 'label')}, {quantity(space.images, 'training image')}" if space else "",
        ),
        ("trained", trained),
        ("selected", str(files.selection or "")),
        ("folder", str(files.folder)),
    ]


# ---------------------------------------------------------------------------------------------------------- curves
def training_curves(files: RunFiles) -> list[Any]:
    """Return charts over the training steps.

    They show the loss and its terms, the mAP and the selection metric, the learning rate, the gradient norm, the images
    per second, and the share of time spent waiting for data.
    """
    rows = files.rows
    names = list(dict.fromkeys(name for row in rows for name in row))
    terms = [name for name in names if name.startswith("loss/")]
    metric = files.config.eval.select_metric
    measured = [name for name in names if name.endswith(("/mAP", f"/{metric}"))]
    kinds = (
        ("loss", "Loss", ["loss"], charts.NUMBER),
        ("terms", "Terms of the loss", terms, charts.NUMBER),
        ("map", f"{' and '.join(dict.fromkeys(('mAP', metric)))} during training", measured, ".1%"),
        ("rate", "Learning rate", ["learning_rate"], "~e"),
        ("gradient", "Norm of the gradient", ["gradient_norm"], charts.NUMBER),
        ("speed", "Speed, images per second", ["images_per_second"], "~s"),
        ("wait", "Share of the time waiting for data", ["data_wait"], ".2~%"),
    )
    plots = []
    for name, title, keys, number_format in kinds:
        if points := [point for key in keys for point in thin_curve(rows, key)]:
            alt = f"{title} over {rows[-1]['step']:,} steps, at the end {points[-1]['value']:.4g}"
            plots.append(Chart(f"curve-{name}", title, charts.line_chart(points, number_format), alt))
    return [Charts(plots)]


def thin_curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return at most MOST_POINTS points of the value `key` in the rows of metrics.jsonl: means over consecutive rows.

    The keys of a point are step (the last step of its rows), value and series (`key`).
    """
    logged = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    chunks = np.array_split(np.array(logged, np.float64), min(len(logged), MOST_POINTS)) if logged else []
    return [{"step": chunk[-1, 0], "value": chunk[:, 1].mean(), "series": key} for chunk in chunks]


# ------------------------------------------------------------------------------------------------------------ cost
def cost(files: RunFiles) -> list[Any]:
    """Return the parts of the section about cost: tables of parameters, multiply-adds and bytes of the model."""
    counts = files.cost
    rows = [
        *((f"parameters, {name}", f"{count:,}") for name, count in counts["params"].items()),
        *((f"GMACs, {name}", f"{count / 1e9:.4g}") for name, count in counts["macs"].items()),
        *((f"MB, {name}", f"{size / 1e6:,.1f}") for name, size in counts["memory"].items()),
    ]
    modules = [(name, *sizes) for name, sizes in counts["modules"].items()]
    columns = ["module", ("parameters", "count"), ("trainable", "count")]
    return [
        Note(_MACS),
        PageTable("cost-table", ["per image", "count"], rows),
        Details("Parameters per module", [PageTable("module-table", columns, modules)]),
    ]


# ---------------------------------------------------------------------------------------------------------- config
def settings(files: RunFiles) -> list[Any]:
    """Return three tables: config keys with a changed value, keys with their default, and starts of the training.

    The last table has the time, devices and library versions of each start.
    """
    default = configuration.flatten(configuration.default_config())
    keys = [(key, repr(value), repr(default.get(key))) for key, value in configuration.flatten(files.config).items()]
    changed, same = [key for key in keys if key[1] != key[2]], [key[:2] for key in keys if key[1] == key[2]]
    columns = ["key", "value", "default"]
    starts = [
        (
            start["time"],
            start["step"],
            f"{start['devices']} × {start['device']}",
            start["processes"],
            ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        )
        for start in read_starts(files.folder)
    ]
    start_columns = ["time", ("from step", "count"), "devices", ("processes", "count")]
    return [
        PageTable("changed-keys", columns, changed, f"{quantity(len(changed), 'key')} with another value."),
        Details(f"{quantity(len(same), 'key')} with the default value", [PageTable("same-keys", columns[:2], same)]),
        PageTable("starts", [*start_columns, "versions"], starts, "Starts of the training"),
    ]
