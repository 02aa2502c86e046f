"""Sections about mistakes: images with their present and predicted labels, and the most confident mistakes."""

from typing import Any

import numpy as np

from mlmoe_jax.apps.report.components import Details, Note, PageTable, Widget
from mlmoe_jax.apps.report.predictions import KINDS, VALUE_RULE, Predictions
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.runtime.text import quantity

MOST_IMAGES = 1000  # rows of the table
LISTED_LABELS = 30  # labels per image
_OUTCOMES = {(POSITIVE, True): "right", (POSITIVE, False): "missed", (NEGATIVE, True): "false"}


def mistakes(files: RunFiles) -> list[Any]:
    """Return the parts of the section about false positives and false negatives: image cards, and tables."""
    predictions = files.predictions
    scored = predictions.scored
    note = (
        f"On {quantity(len(scored), 'image')} of {scored.name}: {quantity(int(predictions.false.sum()), 'label')} "
        f"wrongly predicted and {int(predictions.missed.sum()):,} missed. A wrongly predicted label is absent but "
        f"reaches its threshold; a missed label is present and does not. Thresholds: {predictions.origin}. Unknown and "
        "difficult labels are left out. Some mistakes may be annotation errors."
    )
    if absent := sum(name not in files.images for name in predictions.mistaken):
        note += f" {quantity(absent, 'image')} cannot be shown: the data is missing or has changed."
    parts: list[Any] = [Note(note), *[Note(VALUE_RULE)] * bool(predictions.attributes)]
    columns, tables = ["label", ("score", "fraction"), "image"], []
    for what, kind, sign in KINDS:
        rows = [
            (files.names[k], float(scored.scores[n, k]), str(scored.ids[n])) for n, k in predictions.worst(kind, sign)
        ]
        cards = [{"id": name, "labels": [(k, kind, score)]} for k, score, name in rows if name in files.images]
        if cards:
            data = {"title": f"{what}, worst first", "cards": cards, "filter": False}
            parts.append(Widget(f"cards-{kind}", "cards", data, what))
        if rows:
            tables.append(PageTable(f"mistakes-{kind}", columns, rows, f"{what}, worst first; scores in percent"))
    return [*parts, Details("Mistakes as tables", tables)] if tables else parts


def show_images(files: RunFiles) -> list[Any]:
    """Return cards of images with their labels, which can be filtered, and a table of the images with most mistakes."""
    predictions = files.predictions
    order = np.argsort(-predictions.mistakes, kind="stable")
    ids = predictions.scored.ids.tolist()
    cards = [{"id": ids[n], "labels": _image_labels(predictions, n)} for n in order if ids[n] in files.images]
    text = (
        f"On {predictions.scored.name}: present and predicted labels, with their probabilities. Thresholds: "
        f"{predictions.origin}. Of {len(ids):,} images, {len(cards):,} are shown: samples of the run and its most "
        "confident mistakes."
    )
    data = {"title": "", "cards": cards, "filter": True}
    widget = Widget("cards-images", "cards", data, "Images to filter by label and mistake")
    return [Note(text), widget, _image_table(predictions, order[:MOST_IMAGES])]


def _image_table(predictions: Predictions, rows: np.ndarray) -> PageTable:
    """Return a table of the missed, wrongly and correctly predicted labels of the images `rows`, i64[n], in order."""
    right, cells = (predictions.scored.codes == POSITIVE) & predictions.predicted, []
    for n in rows:
        listed = [np.flatnonzero(kind[n])[:LISTED_LABELS] for kind in (predictions.missed, predictions.false, right)]
        texts = [", ".join(predictions.labels[k] for k in labels) for labels in listed]
        cells.append([str(predictions.scored.ids[n]), int(predictions.mistakes[n]), *texts])
    columns = ["image", ("mistakes", "count"), "missed", "false", "right"]
    caption = f"{quantity(len(rows), 'image')}, those with the most mistakes first; search by name or label."
    return PageTable("image-table", columns, cells, caption)


def _image_labels(predictions: Predictions, n: int) -> list[tuple[str, str, float]]:
    """Return (label, outcome, score) of at most LISTED_LABELS present or predicted labels, by decreasing score.

    The outcome is "right", "missed", "false", or "unknown" if the truth is not known.
    """
    codes, scores, predicted = predictions.scored.codes[n], predictions.scored.scores[n], predictions.predicted[n]
    labels = np.flatnonzero((codes == POSITIVE) | predicted)
    labels = labels[np.argsort(-scores[labels], kind="stable")][:LISTED_LABELS]
    return [
        (
            predictions.labels[k],
            _OUTCOMES.get((int(codes[k]), bool(predicted[k])), "unknown"),
            round(float(scores[k]), 4),
        )
        for k in labels
    ]
