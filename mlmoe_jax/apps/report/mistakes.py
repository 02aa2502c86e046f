"""Sections about mistakes: the most confident ones, and images with their present and predicted labels to filter.

Shape letters: N images, K labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlmoe_jax.apps.report.components import Details, Note, Section, Table, Widget
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.data.split import NEGATIVE, POSITIVE
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.explain import thumbnail
from mlmoe_jax.runs.thresholds import Thresholds
from mlmoe_jax.runtime.text import counted

SIDE = 160  # maximum side of a thumbnail in pixels
MOST_MISTAKES = 24  # per kind
MOST_IMAGES = 1000  # in the table
LISTED = 30  # labels per image
KINDS = (("False positives", NEGATIVE, 1), ("False negatives", POSITIVE, -1))


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
    if stored.source:
        fitted = stored.cuts_for(split, labels)
        if not fitted:
            return same, f"{origin}, as those of thresholds.json were fitted on {split} itself"
        return fitted["fitted"], f"those of thresholds.json, fitted on {stored.source['split']}"
    values = stored.of(labels)
    if len(set(values.tolist())) == 1:
        return values, f"{values[0]:g} for every label"
    return values, f"those of thresholds.json, from {values.min():g} to {values.max():g}"


@dataclass
class Thumbnails:
    """The thumbnails of some images: name -> content of a JPEG file, and sentences about images that are left out."""

    shown: dict[str, bytes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """The scored images of the main split with the thresholds of predictions, and thumbnails of the worst mistakes."""

    table: SplitScores
    labels: Sequence[str]
    thresholds: np.ndarray
    origin: str
    thumbnails: Thumbnails

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


def judge(files: RunFiles) -> Judged | None:
    """Judge the images of the main split with the thresholds of the run; None without scores."""
    scored = files.scored
    if scored is None:
        return None
    default = files.settings(scored.prefix).eval.threshold
    thresholds, origin = prediction_thresholds(files.thresholds, default, scored.name, files.names)
    rows = [n for _, code, sign in KINDS for n, _ in worst(scored, code, sign)]
    return Judged(scored, files.names, thresholds, origin, thumbnails(files, scored, scored.ids[rows].tolist()))


def thumbnails(files: RunFiles, scored: SplitScores, names: Iterable[str]) -> Thumbnails:
    """Return thumbnails of the samples of the run, and of images by name from its data set.

    An image of the data set is shown only if it has the labels with which the run scored it: other data may be in the
    same place by now.
    """
    samples, result = files.samples, Thumbnails()
    if samples is not None and samples.split == scored.name:
        result.shown = dict(zip(samples.ids, samples.images, strict=True))
    absent = [name for name in dict.fromkeys(names) if name not in result.shown]
    if not absent:
        return result
    config = files.config
    try:
        source = open_split(config.data, scored.name, classes=files.names, seed=config.seed)
    except UserError as error:
        result.missing = [f"{counted(len(absent), 'image')} cannot be shown: {error}."]
        return result
    rows = {str(name): row for row, name in enumerate(source.ids)}
    codes, lost = dict(zip(map(str, scored.ids), scored.codes, strict=True)), 0
    for name in absent:
        row = rows.get(name)
        try:
            if row is None or not np.array_equal(source.labels[row], codes[name]):
                raise BadImage("the data set has no such image with these labels")
            result.shown[name] = thumbnail(source.images.read(row, Decoding.of(config.data, SIDE)), SIDE)
        except BadImage:
            lost += 1
    if lost:
        why = "the data set has none with these labels, or they cannot be read"
        result.missing = [f"{counted(lost, 'image')} cannot be shown, since {why}."]
    return result


def worst(table: SplitScores, code: int, sign: int) -> list[tuple[int, int]]:
    """Return (image, label) of the entries with this code and the highest (sign 1) or lowest (−1) scores, in order."""
    ranked = np.where(table.codes == code, sign * table.scores, -np.inf).ravel()
    count = min(MOST_MISTAKES, int((table.codes == code).sum()))
    if not count:
        return []
    top = np.argpartition(-ranked, count - 1)[:count]
    top = top[np.lexsort((top, -ranked[top]))]
    return [divmod(int(place), table.codes.shape[1]) for place in top]


# ----------------------------------------------------------------------------------------------------------- sections
def mistakes(files: RunFiles, judged: Judged | None) -> Section:
    """Return absent labels with the highest scores and present ones with the lowest, as images and as tables."""
    name, title = "mistakes", "Most confident mistakes"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    table, shown = judged.table, judged.thumbnails.shown
    note = (
        f"On {table.name}. False positives are absent labels with the highest scores; false negatives are "
        "present labels with the lowest. Unknown and difficult labels are left out. Some may be annotation errors."
    )
    parts: list[Any] = [Note(" ".join([note, *judged.thumbnails.missing]))]
    columns, tables = [("label", "text"), ("score", "fraction"), ("image", "text")], []
    for kind, code, sign in KINDS:
        key = kind.replace(" ", "-").lower()
        rows = [(judged.labels[k], float(table.scores[n, k]), str(table.ids[n])) for n, k in worst(table, code, sign)]
        outcome = "false" if sign == 1 else "missed"
        cards = [{"id": of, "labels": [(k, outcome, score)]} for k, score, of in rows if of in shown]
        if cards:
            data = {"title": f"{kind}, worst first", "cards": cards, "filter": False}
            parts.append(Widget(f"cards-{key}", "cards", data, kind))
        caption = f"{kind} of all {len(table):,} images, scores in percent"
        tables.append(Table(f"mistakes-{key}", columns, rows, caption))
    return Section(name, title, [*parts, Details("All of them as tables", tables)] if shown else [*parts, *tables])


def images(files: RunFiles, judged: Judged | None) -> Section:
    """Return images with their labels, to filter, and a table of images by mistakes."""
    name, title = "images", "Images"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    missed, false, right = judged.missed, judged.false, (judged.table.codes == POSITIVE) & judged.predicted
    wrong = missed.sum(axis=1) + false.sum(axis=1)
    rank = np.argsort(-wrong, kind="stable")
    ids = [str(of) for of in judged.table.ids]
    cards = [{"id": ids[n], "labels": _labels_of(judged, n)} for n in rank if ids[n] in judged.thumbnails.shown]
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
