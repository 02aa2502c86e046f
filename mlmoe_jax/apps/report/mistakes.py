"""Sections about mistakes: the most confident ones as images, labels that are confused, and a filter of images.

Shape letters: N images, K labels.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from mlmoe_jax.apps.report import charts
from mlmoe_jax.apps.report.components import Chart, Charts, Details, Note, Section, SortableTable, Widget
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.apps.report.thumbnails import Thumbnails, thumbnails
from mlmoe_jax.data.split import NEGATIVE, POSITIVE
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.thresholds import Thresholds

MOST_MISTAKES = 24  # per kind
MOST_CONFUSED = 1000  # labels that are missed, and labels that are predicted falsely
MOST_PAIRS = 500  # of confused labels
MOST_LABELS = 80  # in the heat map
MOST_IMAGES = 1000  # in the table
LISTED = 30  # labels per image
KINDS = (("False positives", NEGATIVE, 1), ("False negatives", POSITIVE, -1))


class Cuts(NamedTuple):
    """The thresholds f64[K] of a run, and where they come from, as the end of a sentence."""

    values: np.ndarray
    origin: str


def prediction_cuts(stored: Thresholds | None, default: float, split: str, labels: Sequence[str]) -> Cuts:
    """Return the thresholds with which the run predicts `labels`: those of thresholds.json if there are any.

    `default` replaces thresholds that were fitted on this very split, whose predictions would be too good. Raises
    UserError if a label has no threshold.
    """
    same = Cuts(np.full(len(labels), default), f"{default:g} for every label")
    if stored is None:
        return same
    if stored.source:
        fitted = stored.cuts_for(split, labels)
        if not fitted:
            return Cuts(same.values, f"{same.origin}, as those of thresholds.json were fitted on {split} itself")
        return Cuts(fitted["fitted"], f"those of thresholds.json, fitted on {stored.source['split']}")
    values = stored.of(labels)
    if len(set(values.tolist())) == 1:
        return Cuts(values, f"{values[0]:g} for every label")
    return Cuts(values, f"those of thresholds.json, from {values.min():g} to {values.max():g}")


@dataclass(frozen=True)
class Judged:
    """The scored images of the main split with predictions, and thumbnails of those with the worst mistakes."""

    name: str
    table: SplitScores
    labels: Sequence[str]
    cuts: Cuts
    thumbnails: Thumbnails

    @property
    def predicted(self) -> np.ndarray:
        """bool[N,K], the labels that are predicted."""
        return self.table.scores >= self.cuts.values

    @property
    def missed(self) -> np.ndarray:
        """bool[N,K], present labels that are not predicted."""
        return (self.table.codes == POSITIVE) & ~self.predicted

    @property
    def false(self) -> np.ndarray:
        """bool[N,K], absent labels that are predicted."""
        return (self.table.codes == NEGATIVE) & self.predicted


def judge(files: RunFiles) -> Judged | None:
    """Judge the images of the main split with the thresholds of the run, see `prediction_cuts`; None without scores."""
    main = files.main_split
    if main is None or main.scores is None or not len(main.scores):
        return None
    cuts = prediction_cuts(files.thresholds, files.settings(main.scores.prefix).eval.threshold, main.name, files.names)
    rows = [n for _, code, sign in KINDS for n, _ in worst(main.scores, code, sign)]
    shown = thumbnails(files, main.scores, [*dict.fromkeys(main.scores.ids[rows].tolist())])
    return Judged(main.name, main.scores, files.names, cuts, shown)


def mistakes(files: RunFiles, judged: Judged | None) -> Section:
    """Return absent labels with the highest scores and present ones with the lowest, as images and as tables."""
    name, title = "mistakes", "Most confident mistakes"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    found = [(kind, list(_rows(judged, code, sign))) for kind, code, sign in KINDS]
    note = (
        f"On {judged.name}. False positives are absent labels with the highest scores; false negatives are "
        "present labels with the lowest. Unknown and difficult labels are left out. Some may be annotation errors."
    )
    parts: list[Any] = [Note(" ".join([note, *judged.thumbnails.left_out]))]
    available = _sources(files, judged)
    groups = [
        {"title": f"{kind}, worst first", "rows": [row for row in rows if row["id"] in available]}
        for kind, rows in found
    ]
    seen = any(group["rows"] for group in groups)
    if seen:
        parts.append(Widget("mistakes", groups, "Images with confident mistakes"))
    columns = [("label", "text"), ("score", "fraction"), ("image", "text")]
    tables = [
        SortableTable(
            f"mistakes-{kind.replace(' ', '-').lower()}",
            columns,
            [[row["label"], row["score"], row["id"]] for row in rows],
            f"{kind} of all {len(judged.table):,} images, scores in percent",
        )
        for kind, rows in found
    ]
    return Section(name, title, [*parts, *([Details("All of them as tables", tables)] if seen else tables)])


def _rows(judged: Judged, code: int, sign: int) -> Iterator[dict[str, Any]]:
    table = judged.table
    for n, k in worst(table, code, sign):
        score = round(float(table.scores[n, k]), 4)
        yield {"id": str(table.ids[n]), "label": judged.labels[k], "score": score}


def worst(table: SplitScores, code: int, sign: int) -> list[tuple[int, int]]:
    """Return (image, label) of the entries with this code and the highest (sign 1) or lowest (−1) scores, in order."""
    ranked = np.where(table.codes == code, sign * table.scores, -np.inf).ravel()
    count = min(MOST_MISTAKES, int((table.codes == code).sum()))
    if not count:
        return []
    top = np.argpartition(-ranked, count - 1)[:count]
    top = top[np.lexsort((top, -ranked[top]))]
    return [divmod(int(place), table.codes.shape[1]) for place in top]


# ------------------------------------------------------------------------------------------------------- confusion
def confusion(files: RunFiles, judged: Judged | None) -> Section:
    """Return the pairs of labels (a, b) by the number of images in which a is missed and b is predicted falsely."""
    name, title = "confusion", "Confused labels"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    together = confused(judged)
    note = (
        f"On {judged.name}. Label a is confused with b in an image if a is present and not predicted, and b is absent "
        f"and predicted. Thresholds: {judged.cuts.origin}."
    )
    if not together.nnz:
        return Section(name, title, [Note(note), Note("No image has both a missed and a falsely predicted label.")])
    present, missed = (judged.table.codes == POSITIVE).sum(axis=0), judged.missed.sum(axis=0)
    a, b, count = _largest(together)
    rows = [
        [judged.labels[i], judged.labels[j], int(n), float(n / missed[i]), float(n / present[i])]
        for i, j, n in zip(a, b, count, strict=True)
    ]
    columns = [("present, missed: a", "text"), ("absent, predicted: b", "text"), ("images", "count")]
    columns += [("of the misses of a", "fraction"), ("of the images with a", "fraction")]
    caption = "Pairs of labels, most images first; shares in percent."
    if together.nnz > len(rows):
        caption += f" Of {together.nnz:,} pairs, the first {len(rows)} are listed."
    parts = [Note(note), SortableTable("confusion-table", columns, rows, caption)]
    return Section(name, title, [*parts, _heat_map(judged, together, present)])


def confused(judged: Judged) -> csr_array:
    """Return for each pair (a, b) the number of images in which a is missed and b falsely predicted: i64[K,K].

    Only the MOST_CONFUSED labels with most mistakes of either kind are counted: there are K² pairs.
    """
    missed, false = (_of_most(x) for x in (judged.missed, judged.false))
    return csr_array(missed.T @ false)


def _of_most(mistakes: np.ndarray) -> csr_array:
    """Return bool[N,K] as counts, without the labels beyond the MOST_CONFUSED that have most mistakes."""
    if mistakes.shape[1] > MOST_CONFUSED:
        fewest = np.argsort(-mistakes.sum(axis=0), kind="stable")[MOST_CONFUSED:]
        mistakes = mistakes.copy()
        mistakes[:, fewest] = False
    return csr_array(mistakes, dtype=np.int64)


def _largest(together: csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pairs = together.tocoo()
    first = np.lexsort((pairs.coords[1], pairs.coords[0], -pairs.data))[:MOST_PAIRS]
    return pairs.coords[0][first], pairs.coords[1][first], pairs.data[first]


def _heat_map(judged: Judged, together: csr_array, present: np.ndarray) -> Charts:
    involved = np.asarray(together.sum(axis=0)).ravel() + np.asarray(together.sum(axis=1)).ravel()
    shown = np.sort(np.argsort(-involved, kind="stable")[:MOST_LABELS])
    shown = shown[involved[shown] > 0]
    shares = together[shown][:, shown].toarray() / np.maximum(present[shown], 1)[:, None]
    names, most = [judged.labels[k] for k in shown], shares.max()
    rows = [
        {
            "x": names[b],
            "y": names[a],
            "value": round(float(shares[a, b] / most), 4),
            "text": f"{names[a]} missed and {names[b]} predicted in {100 * shares[a, b]:.1f} % of its images",
        }
        for a, b in np.argwhere(shares > 0)
    ]
    spec = charts.heat_map(rows, x=names, y=names, value_title="", x_title="predicted: b", y_title="missed: a")
    title = f"Share of the images with a (full color: {100 * most:.1f} %)"
    alt = f"Heat map of {len(names)} labels that are missed while another one is predicted"
    return Charts([Chart("confusion-heat", title, spec, alt, wide=True)])


# ---------------------------------------------------------------------------------------------------------- images
def images(files: RunFiles, judged: Judged | None) -> Section:
    """Return the embedded images of the main split with their labels, to filter, and a table of images by mistakes."""
    name, title = "images", "Images"
    if judged is None:
        return Section(name, title, missing=NO_SCORES, command=files.command("--mode=eval"))
    missed, false = judged.missed, judged.false
    rank = np.argsort(-(missed.sum(axis=1) + false.sum(axis=1)), kind="stable")
    sources = _sources(files, judged)
    shown = [n for n in rank.tolist() if str(judged.table.ids[n]) in sources]
    cards = [{"id": str(judged.table.ids[n]), "labels": _labels_of(judged, n)} for n in shown]
    used = sorted({k for card in cards for k, *_ in card["labels"]})
    data = {"thumbnails": sources, "cards": cards, "names": {k: judged.labels[k] for k in used}}
    text = (
        f"On {judged.name}: present labels and predicted ones, with their probabilities. Thresholds: "
        f"{judged.cuts.origin}."
    )
    if cards:
        text += f" The {len(cards):,} images are the samples of the run and those of its most confident mistakes."
        shows = [Note(text), Widget("images", data, "Images with their labels, to filter by label and mistake")]
    else:  # also without an image, since the section of the mistakes reads the thumbnails there
        shows = [Note(text), Widget("images", data, "No image is available")]
    rows = [_row(judged, n, missed[n], false[n]) for n in rank[:MOST_IMAGES].tolist()]
    columns = [("image", "text"), ("mistakes", "count"), *((of, "text") for of in ("missed", "false", "right"))]
    caption = "Images with the most mistakes first; search by name or label."
    if len(rows) < len(rank):
        caption += f" Of {len(rank):,} images, the first {len(rows):,} are listed."
    return Section(name, title, [*shows, SortableTable("image-table", columns, rows, caption)])


def _sources(files: RunFiles, judged: Judged) -> dict[str, str]:
    """Return image -> data address, or "" for an image that is embedded as a sample of the run."""
    samples, known = files.samples, set(map(str, judged.table.ids))
    own = [] if samples is None or samples.split != judged.name else [x for x in samples.ids if x in known]
    shown = {
        name: "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
        for name, jpeg in judged.thumbnails.shown.items()
    }
    return shown | dict.fromkeys(own, "")


def _labels_of(judged: Judged, n: int) -> list[tuple[int, int, float, int]]:
    """Return (label, code, score, 1 if predicted) of the present and the predicted labels, highest scores first."""
    codes, scores = judged.table.codes[n], judged.table.scores[n]
    predicted = scores >= judged.cuts.values
    shown = np.flatnonzero((codes == POSITIVE) | predicted)
    shown = shown[np.argsort(-scores[shown], kind="stable")][:LISTED]
    return [(int(k), int(codes[k]), round(float(scores[k]), 4), int(predicted[k])) for k in shown]


def _row(judged: Judged, n: int, missed: np.ndarray, false: np.ndarray) -> list[Any]:
    right = (judged.table.codes[n] == POSITIVE) & ~missed
    texts = (", ".join(judged.labels[k] for k in np.flatnonzero(of)[:LISTED]) for of in (missed, false, right))
    return [str(judged.table.ids[n]), int(missed.sum() + false.sum()), *texts]
