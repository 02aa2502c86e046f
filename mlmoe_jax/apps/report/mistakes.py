"""Sections about mistakes: images with their present and predicted labels to filter, and the most confident mistakes.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlmoe_jax.apps.report.components import Details, Note, Section, Table, Widget
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import NEGATIVE, POSITIVE
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import OUT_OF_FOLD, SplitScores
from mlmoe_jax.inference.explain import thumbnail
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import counted

SIDE = 160  # maximum side of a thumbnail in pixels
MOST_MISTAKES = 24  # per kind
MOST_IMAGES = 1000  # in the table
LISTED = 30  # labels per image
# What is wrong, the property of Judged with all such entries, and the sign with which the highest scores are the worst.
KINDS = (("Wrongly predicted", "false", 1), ("Missed", "missed", -1))


# -------------------------------------------------------------------------------------------------------- predictions
def prediction_thresholds(
    stored: Thresholds | None, default: float, split: str, labels: Sequence[str]
) -> tuple[np.ndarray, str]:
    """Return the thresholds f64[K] with which the run predicts `labels`, and their origin as the end of a sentence.

    These are the thresholds of thresholds.json if there are any; `default` replaces thresholds that were fitted on this
    very split, whose predictions would be too good. Raises UserError if a label has no threshold.
    """
    same, origin = np.full(len(labels), default), f"{default:g} for every label"
    if stored is None:
        return same, origin
    fitted_on = stored.source.get("split")
    if fitted_on == split:
        return same, f"{origin}, as those of thresholds.json were fitted on {split} itself"
    return stored.of(labels), f"those of thresholds.json{f', fitted on {fitted_on}' if fitted_on else ''}"


@dataclass(frozen=True)
class Judged:
    """The scored images of the main split with the thresholds of predictions.

    thumbnails: name -> JPEG file, of the samples and the worst mistakes. missing: a sentence about images without one.
    """

    table: SplitScores
    labels: Sequence[str]
    thresholds: np.ndarray
    origin: str
    thumbnails: dict[str, bytes]
    missing: str = ""

    @property
    def predicted(self) -> np.ndarray:
        """bool[N,K], the labels that are predicted."""
        return self.table.scores >= self.thresholds

    @property
    def missed(self) -> np.ndarray:
        """bool[N,K], present labels that are not predicted."""
        return (self.table.codes == POSITIVE) & ~self.predicted

    @property
    def false(self) -> np.ndarray:
        """bool[N,K], absent labels that are predicted."""
        return (self.table.codes == NEGATIVE) & self.predicted

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


def judge(files: RunFiles) -> Judged | None:
    """Judge the images of the main split with the thresholds of the run; None without scores."""
    scored = files.scored
    if scored is None:
        return None
    default = files.settings(scored.prefix).eval.threshold
    thresholds, origin = prediction_thresholds(files.thresholds, default, scored.name, files.names)
    judged = Judged(scored, files.names, thresholds, origin, {})
    rows = [n for _, kind, sign in KINDS for n, _ in judged.worst(kind, sign)]
    shown, missing = thumbnails(files, scored, scored.ids[rows].tolist())
    return replace(judged, thumbnails=shown, missing=missing)


def thumbnails(files: RunFiles, scored: SplitScores, names: Iterable[str]) -> tuple[dict[str, bytes], str]:
    """Return thumbnails of the samples of the run and of images by name, and a sentence about those left out, or "".

    An image of the data set is shown only if it has the labels with which the run scored it: other data may be in the
    same place by now.
    """
    samples, shown = files.samples, {}
    if samples is not None and samples.split == scored.name:
        shown = dict(zip(samples.ids, samples.images, strict=True))
    absent = [name for name in dict.fromkeys(names) if name not in shown]
    if not absent:
        return shown, ""
    config = files.config
    try:
        name = config.data.train_split if scored.name == OUT_OF_FOLD else scored.name
        source = open_split(config.data, name, classes=files.names, seed=config.seed)
    except UserError as error:
        return shown, f"{counted(len(absent), 'image')} cannot be shown: {error}."
    rows = {str(name): row for row, name in enumerate(source.ids)}
    codes = dict(zip(scored.ids.tolist(), scored.codes, strict=True))
    for name in absent:
        row = rows.get(name)
        if row is not None and np.array_equal(source.labels[row], codes[name]):
            with contextlib.suppress(BadImage):
                shown[name] = thumbnail(source.images.read(row, Decoding.of(config.data, SIDE)), SIDE)
    if lost := sum(name not in shown for name in absent):
        why = "the data set has none with these labels, or they cannot be read"
        return shown, f"{counted(lost, 'image')} cannot be shown, since {why}."
    return shown, ""


# ----------------------------------------------------------------------------------------------------------- sections
def mistakes(files: RunFiles, judged: Judged | None) -> Section:
    """Return the predicted labels that are absent and the present ones that are not predicted, as images and tables."""
    name, title = "mistakes", "Most confident mistakes"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    table, shown = judged.table, judged.thumbnails
    counts = f"{counted(int(judged.false.sum()), 'label')} wrongly predicted and {int(judged.missed.sum()):,} missed"
    note = (
        f"On {counted(len(table), 'image')} of {table.name}: {counts}. A wrongly predicted label is absent but reaches "
        f"its threshold; a missed one is present and does not. Thresholds: {judged.origin}. Unknown and difficult "
        "labels are left out. Some mistakes may be annotation errors."
    )
    parts: list[Any] = [Note(f"{note} {judged.missing}".rstrip())]
    columns, tables = [("label", "text"), ("score", "fraction"), ("image", "text")], []
    for what, kind, sign in KINDS:
        rows = [(judged.labels[k], float(table.scores[n, k]), str(table.ids[n])) for n, k in judged.worst(kind, sign)]
        cards = [{"id": of, "labels": [(k, kind, score)]} for k, score, of in rows if of in shown]
        if cards:
            data = {"title": f"{what}, worst first", "cards": cards, "filter": False}
            parts.append(Widget(f"cards-{kind}", "cards", data, what))
        if rows:
            tables.append(Table(f"mistakes-{kind}", columns, rows, f"{what}, worst first; scores in percent"))
    return Section(name, title, [*parts, *([Details("The same as tables", tables)] if tables else [])])


def images(files: RunFiles, judged: Judged | None) -> Section:
    """Return images with their labels, to filter, and a table of images by mistakes."""
    name, title = "images", "Images"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    missed, false, right = judged.missed, judged.false, (judged.table.codes == POSITIVE) & judged.predicted
    wrong = missed.sum(axis=1) + false.sum(axis=1)
    rank = np.argsort(-wrong, kind="stable")
    ids = [str(of) for of in judged.table.ids]
    cards = [{"id": ids[n], "labels": _labels_of(judged, n)} for n in rank if ids[n] in judged.thumbnails]
    text = (
        f"On {judged.table.name}: present labels and predicted ones, with their probabilities. Thresholds: "
        f"{judged.origin}."
    )
    parts: list[Any] = [Note(text)]
    if cards:
        parts[0] = Note(f"{text} The {len(cards):,} images are the samples of the run and its most confident mistakes.")
        data = {"title": "", "cards": cards, "filter": True}
        parts.append(Widget("cards-images", "cards", data, "Images to filter by label and mistake"))
    rows = []
    for n in rank[:MOST_IMAGES]:
        names = (", ".join(judged.labels[k] for k in np.flatnonzero(of[n])[:LISTED]) for of in (missed, false, right))
        rows.append([ids[n], int(wrong[n]), *names])
    columns = [("image", "text"), ("mistakes", "count"), *((of, "text") for of in ("missed", "false", "right"))]
    caption = "Images with the most mistakes first; search by name or label."
    if len(rows) < len(rank):
        caption += f" Of {len(rank):,} images, the first {len(rows):,} are listed."
    return Section(name, title, [*parts, Table("image-table", columns, rows, caption)])


def _labels_of(judged: Judged, n: int) -> list[tuple[str, str, float]]:
    """Return (label, outcome, score) of the present and the predicted labels of an image, highest scores first."""
    codes, scores, predicted = judged.table.codes[n], judged.table.scores[n], judged.predicted[n]
    shown = np.flatnonzero((codes == POSITIVE) | predicted)
    shown = shown[np.argsort(-scores[shown], kind="stable")][:LISTED]
    outcomes = {(POSITIVE, True): "right", (POSITIVE, False): "missed", (NEGATIVE, True): "false"}
    return [
        (judged.labels[k], outcomes.get((int(codes[k]), bool(predicted[k])), "unknown"), round(float(scores[k]), 4))
        for k in shown
    ]
