"""Sections about mistakes: images with their present and predicted labels, and the most confident mistakes.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mlmoe_jax.apps.report.components import Details, Note, PageTable, Section, Widget
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.inference.explain import thumbnail
from mlmoe_jax.models.consistency import Consistency
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import quantity

SIDE = 160  # maximum side of a thumbnail in pixels
MOST_MISTAKES = 24  # per kind
MOST_IMAGES = 1000  # rows of the table
LISTED_LABELS = 30  # labels per image
# (name, property of ThresholdedScores, sign that makes the worst score the highest) of each kind of mistake.
KINDS = (("Wrongly predicted", "false", 1), ("Missed", "missed", -1))


# -------------------------------------------------------------------------------------------------------- predictions
def prediction_thresholds(
    stored: Thresholds | None, default: float, split: str, labels: Sequence[str]
) -> tuple[np.ndarray, str]:
    """Return the thresholds f64[K] with which the run predicts `labels`, and their origin as the end of a sentence.

    Args:
      stored: the thresholds of thresholds.json, if any.
      default: replaces thresholds that were fitted on this split, whose predictions would be too good.

    Raises:
      UserError: a label has no threshold.
    """
    same, origin = np.full(len(labels), default), f"{default:g} for every label"
    if stored is None:
        return same, origin
    fitted_on = stored.source.get("split")
    if fitted_on == split:
        return same, f"{origin}, as thresholds.json was fitted on {split} itself"
    return stored.limits(labels), f"thresholds.json{f', fitted on {fitted_on}' if fitted_on else ''}"


@dataclass(frozen=True)
class ThresholdedScores:
    """The scored images of the main split with the thresholds of predictions.

    Attributes:
      table: the scored images.
      thresholds: f64[K].
      origin: the origin of the thresholds, as the end of a sentence.
      thumbnails: name -> JPEG file, of the samples and the worst mistakes.
      missing: a sentence about images without a thumbnail.
    """

    table: SplitScores
    labels: Sequence[str]
    thresholds: np.ndarray
    origin: str
    thumbnails: dict[str, bytes]
    missing: str = ""

    @cached_property
    def predicted(self) -> np.ndarray:
        """bool[N,K], the labels that are predicted."""
        return self.table.scores >= self.thresholds

    @cached_property
    def missed(self) -> np.ndarray:
        """bool[N,K], present labels below their threshold."""
        return (self.table.codes == POSITIVE) & ~self.predicted

    @cached_property
    def false(self) -> np.ndarray:
        """bool[N,K], absent labels that are predicted."""
        return (self.table.codes == NEGATIVE) & self.predicted

    @cached_property
    def mistakes(self) -> np.ndarray:
        """i64[N], the number of mistakes of each image."""
        return self.missed.sum(axis=1) + self.false.sum(axis=1)

    def worst(self, kind: str, sign: int) -> list[tuple[int, int]]:
        """Return (image, label) of the most confident mistakes of a kind of KINDS, the worst first."""
        wrong = getattr(self, kind)
        count = min(MOST_MISTAKES, int(wrong.sum()))
        if not count:
            return []
        ranked = np.where(wrong, sign * self.table.scores, -np.inf).ravel()
        top = np.argpartition(-ranked, count - 1)[:count]
        top = top[np.lexsort((top, -ranked[top]))]
        return [divmod(int(place), wrong.shape[1]) for place in top]


def apply_thresholds(files: RunFiles) -> ThresholdedScores | None:
    """Apply the thresholds of the run to the scores of the main split; None without scores."""
    scored = files.corrected
    if scored is None:
        return None
    default = files.main_split.settings.threshold
    thresholds, origin = prediction_thresholds(files.thresholds, default, scored.name, files.names)
    consistency = Consistency.of(files.reported_tree, thresholds, len(files.names))  # perhaps other thresholds
    scored = replace(scored, scores=consistency(scored.scores))
    judged = ThresholdedScores(scored, files.names, consistency.limits, origin, {})
    rows = [n for _, kind, sign in KINDS for n, _ in judged.worst(kind, sign)]
    images, missing = read_thumbnails(files, scored, scored.ids[rows].tolist())
    return replace(judged, thumbnails=images, missing=missing)


def read_thumbnails(files: RunFiles, scored: SplitScores, names: Iterable[str]) -> tuple[dict[str, bytes], str]:
    """Return thumbnails of the samples and of images by name, and a sentence about missing thumbnails, or ""."""
    samples, available = files.samples, {}
    if samples is not None and samples.split == scored.name:
        available = dict(zip(samples.ids, samples.images, strict=True))
    absent = [name for name in dict.fromkeys(names) if name not in available]
    if not absent:
        return available, ""
    try:
        available |= _read_from_data(files, scored, absent)
    except UserError as error:
        return available, f"{quantity(len(absent), 'image')} cannot be shown: {error}."
    if count := sum(name not in available for name in absent):
        why = "the data set has no such images with these labels, or they cannot be read"
        return available, f"{quantity(count, 'image')} cannot be shown, since {why}."
    return available, ""


def _read_from_data(files: RunFiles, scored: SplitScores, names: Sequence[str]) -> dict[str, bytes]:
    """Return thumbnails of images of the data set, as far as they can be read.

    The data may have changed since the run. An image is left out unless it has the labels with which it was scored.
    """
    data = files.config.data
    split = data.train_split if scored.name == OUT_OF_FOLD else scored.name
    source = open_split(data, split, classes=files.names, seed=files.config.seed)
    rows = {str(name): row for row, name in enumerate(source.ids)}
    codes, read = dict(zip(scored.ids.tolist(), scored.codes, strict=True)), {}
    for name in names:
        row = rows.get(name)
        if row is not None and np.array_equal(source.labels[row], codes[name]):
            with contextlib.suppress(BadImage):
                read[name] = thumbnail(source.images.read(row, Decoding.from_config(data, SIDE)), SIDE)
    return read


# ----------------------------------------------------------------------------------------------------------- sections
def mistakes(files: RunFiles, judged: ThresholdedScores | None) -> Section:
    """Return wrongly predicted and missed labels, as images and tables."""
    name, title = "mistakes", "Most confident mistakes"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    table, images = judged.table, judged.thumbnails
    counts = f"{quantity(int(judged.false.sum()), 'label')} wrongly predicted and {int(judged.missed.sum()):,} missed"
    note = (
        f"On {quantity(len(table), 'image')} of {table.name}: {counts}. A wrongly predicted label is absent but "
        f"reaches its threshold; a missed label is present and does not. Thresholds: {judged.origin}. Unknown and "
        "difficult labels are left out. Some mistakes may be annotation errors."
    )
    parts: list[Any] = [Note(f"{note} {judged.missing}".rstrip())]
    columns, tables = [("label", "text"), ("score", "fraction"), ("image", "text")], []
    for what, kind, sign in KINDS:
        rows = [(judged.labels[k], float(table.scores[n, k]), str(table.ids[n])) for n, k in judged.worst(kind, sign)]
        cards = [{"id": name, "labels": [(k, kind, score)]} for k, score, name in rows if name in images]
        if cards:
            data = {"title": f"{what}, worst first", "cards": cards, "filter": False}
            parts.append(Widget(f"cards-{kind}", "cards", data, what))
        if rows:
            tables.append(PageTable(f"mistakes-{kind}", columns, rows, f"{what}, worst first; scores in percent"))
    return Section(name, title, [*parts, *([Details("Mistakes as tables", tables)] if tables else [])])


def list_images(files: RunFiles, judged: ThresholdedScores | None) -> Section:
    """Return images with their labels, to filter, and a table of images by mistakes."""
    name, title = "images", "Images"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    order = np.argsort(-judged.mistakes, kind="stable")
    ids = [str(name) for name in judged.table.ids]
    cards = [{"id": ids[n], "labels": _image_labels(judged, n)} for n in order if ids[n] in judged.thumbnails]
    text = (
        f"On {judged.table.name}: present and predicted labels, with their probabilities. Thresholds: {judged.origin}."
    )
    if not cards:
        return Section(name, title, [Note(text), _image_table(judged, order)])
    text += f" The {len(cards):,} images are the samples of the run and its most confident mistakes."
    data = {"title": "", "cards": cards, "filter": True}
    widget = Widget("cards-images", "cards", data, "Images to filter by label and mistake")
    return Section(name, title, [Note(text), widget, _image_table(judged, order)])


def _image_table(judged: ThresholdedScores, order: np.ndarray) -> PageTable:
    """Return the first images of an order with their missed, wrongly predicted and rightly predicted labels."""
    right, rows = (judged.table.codes == POSITIVE) & judged.predicted, []
    for n in order[:MOST_IMAGES]:
        listed = [np.flatnonzero(kind[n])[:LISTED_LABELS] for kind in (judged.missed, judged.false, right)]
        texts = [", ".join(judged.labels[k] for k in labels) for labels in listed]
        rows.append([str(judged.table.ids[n]), int(judged.mistakes[n]), *texts])
    columns = [("image", "text"), ("mistakes", "count"), *((kind, "text") for kind in ("missed", "false", "right"))]
    caption = "Images with the most mistakes first; search by name or label."
    if len(rows) < len(order):
        caption += f" Of {len(order):,} images, the first {len(rows):,} are listed."
    return PageTable("image-table", columns, rows, caption)


def _image_labels(judged: ThresholdedScores, n: int) -> list[tuple[str, str, float]]:
    """Return (label, outcome, score) of the present and the predicted labels of an image, highest scores first."""
    codes, scores, predicted = judged.table.codes[n], judged.table.scores[n], judged.predicted[n]
    labels = np.flatnonzero((codes == POSITIVE) | predicted)
    labels = labels[np.argsort(-scores[labels], kind="stable")][:LISTED_LABELS]
    outcomes = {(POSITIVE, True): "right", (POSITIVE, False): "missed", (NEGATIVE, True): "false"}
    return [
        (judged.labels[k], outcomes.get((int(codes[k]), bool(predicted[k])), "unknown"), round(float(scores[k]), 4))
        for k in labels
    ]
