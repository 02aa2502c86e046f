"""The page of an audit: suggested corrections with images, similar images, and labels that are always together."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.audit.audit import Audit
from mlmoe_jax.apps.report.components import Note, PageTable, Section, Widget
from mlmoe_jax.apps.report.mistakes import SIDE
from mlmoe_jax.apps.report.page import render_page
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN
from mlmoe_jax.inference.explain import thumbnail
from mlmoe_jax.runtime.text import quantity

MOST_IMAGES, MOST_PAIRS, MOST_ROWS = 200, 50, 1000
# Outcomes of a label on a card: their words and their choices in the menu.
_WORDS = {"missed": "missing", "false": "superfluous", "right": "✓", "unknown": "absent"}
_KINDS = [("", "all"), ("missed", "with a missing label"), ("false", "with a superfluous label")]


def audit_page(audit: Audit, config: ConfigDict) -> str:
    """Return the page about an audit of `config.data`."""
    worst = _worst_images(audit)[:MOST_IMAGES]
    twins = audit.twins[:MOST_PAIRS]
    images = _thumbnails(audit, config, [*worst, *(row for pair in twins for row in pair)])
    sections = [_suggestions(audit, worst, images), _labels(audit), _twins(audit, images), _together(audit)]
    title = f"{config.data.name} {config.data.root}".strip()
    return render_page(title, "Audit of labels", [section for section in sections if section.parts], images=images)


def _worst_images(audit: Audit) -> list[int]:
    """Return the rows of the images with suggestions, the image with the lowest score first."""
    rows = np.unique(audit.suggestions[:, 0])
    return rows[np.argsort(audit.quality[rows], kind="stable")].tolist()


def _thumbnails(audit: Audit, config: ConfigDict, rows: Iterable[int]) -> dict[str, bytes]:
    decoding, images = Decoding.from_config(config.data, SIDE), {}
    for row in rows:
        with contextlib.suppress(BadImage):  # it could be read a moment ago
            images[str(audit.split.ids[row])] = thumbnail(audit.split.images.read(row, decoding), SIDE)
    return images


def _card(audit: Audit, row: int, labels: Iterable[tuple[int, str]]) -> dict[str, Any]:
    """Return the data of a card: the image, and for some labels the outcome and the probability."""
    names, scores = audit.split.classes, audit.scores[row]
    return {
        "id": str(audit.split.ids[row]),
        "labels": [(names[k], outcome, round(float(scores[k]), 4)) for k, outcome in labels],
    }


def _suggestions(audit: Audit, worst: list[int], images: dict[str, bytes]) -> Section:
    split, outcomes = audit.split, defaultdict(list)  # row -> (label, outcome)
    for row, k in audit.suggestions.tolist():
        outcomes[row].append((k, _outcome(audit, row, k)))
    note = (
        f"Of {quantity(len(split), 'image')} of split {split.name}, {len(outcomes):,} have labels that the images "
        "contradict: a missing label is probable and not given, a superfluous label is given and improbable. The "
        "percentages are probabilities of the labels by a classifier that has not seen the image. Images with the most "
        "doubtful labels come first."
    )
    parts: list[Any] = [Note(note)]
    cards = [_card(audit, row, outcomes[row]) for row in worst if str(split.ids[row]) in images]
    if cards:
        data = {"title": "", "cards": cards, "filter": True, "words": _WORDS, "kinds": _KINDS}
        parts.append(Widget("cards-suggestions", "cards", data, "Images with suggested corrections"))
    if outcomes:
        parts.append(_suggestion_list(audit))
    return Section("suggestions", "Suggested corrections", parts)


def _outcome(audit: Audit, row: int, label: int) -> str:
    return "missed" if audit.is_missing(row, label) else "false"


def _suggestion_list(audit: Audit) -> PageTable:
    """Return the suggestions with their lines in suggestions.csv."""
    split, rows = audit.split, []
    for line, (row, k) in enumerate(audit.suggestions[:MOST_ROWS].tolist(), start=2):
        word = _WORDS[_outcome(audit, row, k)]
        if split.labels[row, k] == UNKNOWN:
            word += ", was unknown"
        rows.append([line, str(split.ids[row]), split.classes[k], word, float(audit.scores[row, k])])
    columns = [("line", "count"), ("image", "text"), ("label", "text"), ("it is", "text"), ("probability", "fraction")]
    caption = "Suggestions by their line in suggestions.csv; probabilities of the labels in percent."
    if len(audit.suggestions) > MOST_ROWS:
        caption += f" Of {len(audit.suggestions):,} suggestions, the first {MOST_ROWS:,} are listed."
    return PageTable("suggestions", columns, rows, caption)


def _labels(audit: Audit) -> Section:
    missing, superfluous = np.zeros((2, len(audit.split.classes)), int)
    for row, k in audit.suggestions.tolist():
        (missing if audit.is_missing(row, k) else superfluous)[k] += 1
    counts = (audit.split.labels == POSITIVE).sum(axis=0)
    columns = [("label", "text"), ("images", "count"), ("missing", "count"), ("superfluous", "count")]
    rows = [
        [name, int(counts[k]), *((int(missing[k]), int(superfluous[k])) if audit.judged[k] else (None, None))]
        for k, name in enumerate(audit.split.classes)
    ]
    caption = "Images with each label, and suggestions; a dash if too few images have the label, or are known not to."
    return Section("labels", "Suggestions per label", [PageTable("label-table", columns, rows, caption)])


def _twins(audit: Audit, images: dict[str, bytes]) -> Section:
    title, labels, cards = "Similar images with different labels", audit.split.labels, []
    for pair in audit.twins[:MOST_PAIRS]:
        for row in pair:
            outcomes = [(k, "right" if labels[row, k] == POSITIVE else "unknown") for k in audit.differences(*pair)]
            if str(audit.split.ids[row]) in images:
                cards.append(_card(audit, row, outcomes))
    if not cards:
        return Section("twins", title)
    note = (
        f"{quantity(len(audit.twins), 'pair')} of similar images; each card has the labels that differ from "
        "the labels of its neighbor."
    )
    data = {"title": "", "cards": cards, "filter": False, "words": _WORDS, "kinds": _KINDS}
    return Section("twins", title, [Note(note), Widget("cards-twins", "cards", data, title)])


def _together(audit: Audit) -> Section:
    names, counts, rows = audit.split.classes, (audit.split.labels == POSITIVE).sum(axis=0), []
    for pair in audit.pairs:
        rows.append([names[pair.a], names[pair.b], pair.p_b_given_a, int(counts[pair.a]) - pair.support])
    columns = [("label", "text"), ("nearly always with", "text"), ("share", "fraction"), ("images without", "count")]
    caption = "Shares in percent of the images with the first label. Images without the second label may lack it."
    title = "Labels that are nearly always together"
    return Section("together", title, [PageTable("together-table", columns, rows, caption)] if rows else [])
