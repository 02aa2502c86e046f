"""Sections about the training: summary, curves, cost, config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Facts, Note, Numbers, Section, Table, Widget
from mlmoe_jax.apps.report.resampling import Resampled
from mlmoe_jax.apps.report.run_files import COST, Evaluated, RunFiles
from mlmoe_jax.config.defaults import default_config
from mlmoe_jax.data.split import few_positives
from mlmoe_jax.models.adapters.catalog import described
from mlmoe_jax.runs.history import versions
from mlmoe_jax.runtime.text import percent
from mlmoe_jax.training.selection import Selection, selection_split

MOST_POINTS = 500  # of a curve
_KEY_METRICS = {"mAP": "mAP", "mAP_envelope": "mAP, envelope", "precision@1": "precision@1"}
_KEY_FIGURES = {"CF1": "CF1", "F1_macro": "F1, macro", "OF1": "OF1"}  # at the threshold


# ---------------------------------------------------------------------------------------------------------- header
def header(files: RunFiles, resampled: Resampled | None = None) -> Section:
    """Return the summary: model and data, the selected step, and the main metrics with their intervals."""
    config, main = files.config, files.main_split
    parts: list[Any] = []
    if config.eval.select_on == "test":
        parts.append(Note("Selected on test, as published: the step was selected on the same split that is reported."))
    if main is not None:
        parts.append(Numbers(_tiles(main, f"{files.settings(main.prefix).eval.threshold:g}", resampled)))
        parts += [Note(text) for text in _about_numbers(main, resampled)]
    parts.append(Facts([(name, value) for name, value in _facts(files) if value]))
    if main is None:
        parts.append(Note("No split is evaluated yet; results are written when training ends, or by --mode=eval."))
    return Section("summary", "Summary", parts)


def _tiles(main: Evaluated, threshold: str, resampled: Resampled | None) -> list[tuple[str, str, str]]:
    """Return the name of each main metric with its threshold, its value, and its split and interval."""
    figures = {f"{name}@{threshold}": f"{shown} at {threshold}" for name, shown in _KEY_FIGURES.items()}
    tiles = []
    for name, shown in (_KEY_METRICS | figures).items():
        if (value := main.metrics.get(name)) is not None:
            ends = resampled.interval(name, value) if resampled else None
            interval = f", {percent(ends[0], 1)} to {percent(ends[1], 1)}" if ends else ""
            tiles.append((f"{shown} %", percent(value), f"on {main.name}{interval}"))
    return tiles


def _about_numbers(main: Evaluated, resampled: Resampled | None) -> list[str]:
    """Return sentences about the intervals, and about a split with few positives."""
    found = []
    if resampled is not None:
        found.append(
            "Ranges are 95 % intervals, 1.96 standard deviations on each side, over "
            f"{resampled.count:,} resamples of the images (bootstrap): they tell how much a number depends on the "
            "choice of the evaluated images, not on the seed of the training."
        )
    if main.scores is not None and (few := few_positives(main.scores.codes)):
        found.append(f"The metrics on {main.name} are rough: its images have {few}.")
    return found


def _facts(files: RunFiles) -> list[tuple[str, str]]:
    config, space, backbone = files.config, files.label_space, files.backbone
    model, adapters = config.model, described(config)
    what = f"head {model.head.kind}{f' on {adapters}' if adapters else ''}"
    labels = "" if space is None else f"{len(space.names):,} labels, {space.images:,} training images"
    frozen = f", {backbone['frozen_parameters']:,} frozen parameters" if backbone else ""
    weights = f" (weights: {model.backbone.weights})"
    last = files.rows[-1] if files.rows else None
    stopped = "" if last is None else f"{last['step']:,} steps"
    if last is not None and last.get("epoch") is not None:
        stopped += f", {last['epoch']:.4g} of {config.train.epochs} epochs"
    when = files.finished
    return [
        ("model", what),
        ("backbone", f"{model.backbone.name}{weights}{frozen}"),
        ("data", f"{config.data.name}, {config.data.image_size} × {config.data.image_size} pixels"),
        ("labels", labels),
        ("trained", stopped),
        ("selected", selected(files)),
        ("written", "" if when is None else f"{when:%Y-%m-%d %H:%M} UTC"),
        ("folder", str(files.folder)),
    ]


def selected(files: RunFiles) -> str:
    """Return a description of the selected weights according to metrics.jsonl; "" without rows."""
    config, metric = files.config, files.config.eval.select_metric
    watched, selection = selection_split(config), Selection({}, metric)
    kinds = ("raw", "ema") if config.ema.decay else ("raw",)
    if config.eval.select_on == "none":
        return f"the last {kinds[-1]} weights, regardless of {metric}" if files.rows else ""
    for row in files.rows:
        found = {kind: row.get(f"{watched}/{kind}/{metric}") for kind in kinds}
        if measured := {kind: (value, {}) for kind, value in found.items() if value is not None}:
            selection.consider(row["step"], watched, measured)
    return str(selection) if selection.best else ""


# ---------------------------------------------------------------------------------------------------------- curves
def curves(files: RunFiles) -> Section:
    """Return loss and its terms, mAP, learning rate, speed and waiting for data over the steps."""
    rows = timed(files.rows, [datetime.fromisoformat(start["time"]).timestamp() for start in files.starts])
    if not rows:
        return Section("curves", "Training curves", missing="metrics.jsonl is written from the first logged step on.")
    names = list(dict.fromkeys(name for row in rows for name in row))
    terms = [name for name in names if name.startswith("loss/")]
    percent_axis = {"y_format": ".1%", "from_zero": False}
    shown = tuple(dict.fromkeys(("mAP", files.config.eval.select_metric)))
    measured = [name for name in names if name.endswith(tuple(f"/{metric}" for metric in shown))]
    panels = [
        ("loss", "Loss", ["loss"], {"y_title": "loss", "from_zero": False}),
        ("terms", "Terms of the loss", terms, {"y_title": "loss", "from_zero": False}),
        ("map", f"{' and '.join(shown)} during training", measured, {"y_title": shown[0], **percent_axis}),
        ("rate", "Learning rate", ["learning_rate"], {"y_title": "rate", "y_format": "~e"}),
        ("gradient", "Norm of the gradient", ["gradient_norm"], {"y_title": "norm"}),
        ("speed", "Speed", ["images_per_second"], {"y_title": "images/s", "y_format": "~s"}),
        ("wait", "Waiting for data", ["data_wait"], {"y_title": "share of the time", "y_format": ".2~%"}),
    ]
    drawn = []
    for name, title, keys, options in panels:
        points = [point for key in keys for point in _thinned(rows, key)]
        if points:
            alt = f"{title} over {rows[-1]['step']:,} steps: {_in_words(points)}"
            drawn.append(Chart(f"curve-{name}", title, charts.curves(points, **options), alt))
    parts: list[Any] = []
    if clock := _clock(rows):
        parts.append(Widget("axis", {"section": "curves", **clock}, "Axis of the training curves"))
    parts.append(Charts(drawn))
    if len(rows) > MOST_POINTS:
        parts.append(Note(f"{len(rows):,} logged steps are averaged to {MOST_POINTS} points per curve."))
    return Section("curves", "Training curves", parts)


def timed(rows: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows with `elapsed`, the seconds of training until each one that has a `time`, without pauses.

    starts: the times at which the training started or resumed, in seconds like `time`; a pause ends with a start.
    """
    found, before, elapsed = [], None, 0.0
    for row in rows:
        now = row.get("time")
        if now is None:
            found.append(dict(row))
            continue
        begun = max((start for start in starts if start <= now and (before is None or start > before)), default=before)
        elapsed += now - begun if begun is not None else 0.0
        before = now
        found.append({**row, "elapsed": elapsed})
    return found


def _clock(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the title and the seconds per unit of an axis of time; {} if rows have no times, as in older runs."""
    most = max((row["elapsed"] for row in rows if "elapsed" in row), default=0.0)
    seconds = next(size for size in (3600, 60, 1) if most >= 2 * size or size == 1)
    unit = {3600: "hours", 60: "minutes", 1: "seconds"}[seconds]
    return {"title": f"{unit} of training", "seconds": seconds} if most > 0 else {}


def _thinned(rows: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return at most MOST_POINTS points of a curve, each the mean of neighboring steps."""
    found = [(row["step"], row[key], row.get("elapsed", math.nan)) for row in rows if row.get(key) is not None]
    chunks = np.array_split(np.array(found, np.float64), min(len(found), MOST_POINTS)) if found else []
    points = []
    for chunk in chunks:
        point = {"step": chunk[-1, 0], "value": chunk[:, 1].mean(), "series": key}
        points.append(point if math.isnan(chunk[-1, 2]) else {**point, "elapsed": round(chunk[-1, 2], 1)})
    return points


def _in_words(points: Sequence[Mapping[str, Any]]) -> str:
    series = dict.fromkeys(point["series"] for point in points)
    ends = {name: [p["value"] for p in points if p["series"] == name] for name in series}
    return "; ".join(f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in ends.items())


# ------------------------------------------------------------------------------------------------------------ cost
def cost(files: RunFiles) -> Section:
    """Return parameters, multiply-adds and bytes, as in the tables of the prompt-tuning papers."""
    title, counted = "Cost", files.cost
    if counted is None:
        missing = "Parameters and multiply-adds are not counted yet; this counts them:"
        return Section("cost", title, missing=missing, command=files.command("--mode=report", "--cost"))
    with files.folder.reading(COST):
        parameters, macs = counted["params"], counted["macs"]
        share = percent(parameters["trainable"] / max(1, parameters["total"]))
        rows = [
            ("parameters, total", f"{parameters['total']:,}", ""),
            ("parameters, trainable", f"{parameters['trainable']:,}", f"{share} % of all"),
            ("parameters of the backbone", f"{parameters['backbone']:,}", ""),
            (
                "GMACs as the papers count",
                _giga(macs["layers"]),
                "layers alone: no attention products, experts, gates",
            ),
            ("GMACs, full", _giga(macs["full"]), "with attention products, experts and gates"),
            ("GMACs, executed", _giga(macs["executed"]), "counted on the evaluation step as compiled"),
        ]
        memory = [(part, f"{size / 1e6:,.1f}") for part, size in counted.get("memory", {}).items()]
        modules = [(name, f"{of[0]:,}", f"{of[1]:,}") for name, of in counted.get("modules", {}).items()]
    return Section(
        "cost",
        title,
        [
            Table(("per image", "count", "meaning"), rows, text=(0, 2)),
            Details("Memory of the training state", [Table(("part", "MB"), memory)]),
            Details("Parameters per module", [Table(("module", "parameters", "trainable"), modules)]),
        ],
    )


def _giga(count: float) -> str:
    return f"{count / 1e9:,.2f}" if count >= 1e9 else f"{count / 1e9:.3g}"


# ---------------------------------------------------------------------------------------------------------- config
def settings(files: RunFiles) -> Section:
    """Return the config, changed keys first, and versions."""
    now, default = configuration.flatten(files.config), configuration.flatten(default_config())
    changed = [(key, repr(value), repr(default.get(key))) for key, value in now.items() if value != default.get(key)]
    same = [(key, repr(value)) for key, value in now.items() if value == default.get(key)]
    return Section(
        "config",
        "Config and versions",
        [
            Note(f"{len(changed)} keys differ from the defaults."),
            Table(("key", "value", "default"), changed, text=(0, 1, 2)),
            Details(f"The other {len(same)} keys, with default values", [Table(("key", "value"), same, text=(0, 1))]),
            _versions(files),
        ],
    )


def _versions(files: RunFiles) -> Details:
    """Return all starts of the training, and the versions of this page and of each start that changed them."""
    used: dict[str, dict[str, str]] = {}
    for start in files.starts:
        if not used or start["versions"] != [*used.values()][-1]:
            used[f"from step {start['step']:,}"] = start["versions"]
    used["this page"] = versions()
    names = dict.fromkeys(name for of in used.values() for name in of)
    rows = [(name, *(of.get(name, "") for of in used.values())) for name in names]
    where = [
        Note(
            f"{start['time']}: from step {start['step']:,} on {start['devices']} × {start['device']} in "
            f"{start['processes']} process(es)."
        )
        for start in files.starts
    ]
    return Details("Starts and versions", [*where, Table(("library", *used), rows, text=range(len(used) + 1))])
