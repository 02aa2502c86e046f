"""The page of an audit: suggested corrections with images, similar images, and labels that are always together."""

from collections import defaultdict
from collections.abc import Iterable

from ml_collections import ConfigDict

from mlmoe_jax.apps.audit.audit import Audit
from mlmoe_jax.apps.report.components import Note, PageTable, Section, Widget
from mlmoe_jax.apps.report.page import render_page
from mlmoe_jax.apps.report.predictions import read_thumbnails
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.runtime.text import quantity

MOST_IMAGES, MOST_PAIRS = 200, 50
# The words for the outcomes of a label on a card, and the entries of the menu that filters the cards by outcome.
_WORDS = {"missed": "missing", "false": "superfluous", "right": "✓", "unknown": "absent"}
_KINDS = [("", "all"), ("missed", "with a missing label"), ("false", "with a superfluous label")]


def audit_page(audit: Audit, config: ConfigDict) -> str:
    """Return the HTML page about an audit of the data set of `config.data`."""
    worst = audit.worst_images[:MOST_IMAGES]
    twins = audit.twins[:MOST_PAIRS]
    images = read_thumbnails(audit.split, config.data, [*worst, *(row for pair in twins for row in pair)])
    sections = [_suggestions(audit, worst, images), _twins(audit, twins, images), _together(audit)]
    title = f"{config.data.name} {config.data.root}".strip()
    return render_page(title, "Audit of labels", [section for section in sections if section.parts], images=images)


def _cards(name: str, title: str, audit: Audit, labels: Iterable[tuple[int, dict[int, str]]], **settings) -> Widget:
    """Return a widget with one card per image: the image, and the outcome and probability of each listed label.

    The widget has the name `cards-NAME`, and `title` is its alternative text. `labels` has one pair per image: its row,
    and a dict from label index to outcome, a key of `_WORDS`. `settings` are further entries of `Widget.data`, such as
    `filter`.
    """
    names, cards = audit.split.classes, []
    for row, outcomes in labels:
        texts = [(names[k], outcome, round(float(audit.scores[row, k]), 4)) for k, outcome in outcomes.items()]
        cards.append({"id": str(audit.split.ids[row]), "labels": texts})
    data = {"title": "", "cards": cards, "words": _WORDS, "kinds": _KINDS, **settings}
    return Widget(f"cards-{name}", "cards", data, title)


def _suggestions(audit: Audit, worst: list[int], images: dict[str, bytes]) -> Section:
    outcomes = defaultdict(dict)  # row -> label -> outcome
    for row, k in audit.suggestions.tolist():
        outcomes[row][k] = "missed" if audit.is_missing(row, k) else "false"
        values = next((item.labels for item in audit.split.tree.attributes if k in item.labels), ())
        outcomes[row] |= {value: "false" for value in values if audit.split.labels[row][value] == POSITIVE}
    note = (
        f"Of {quantity(len(audit.split), 'image')} of split {audit.split.name}, {len(outcomes):,} have labels that the "
        "images contradict: a missing label is as probable as for images that have it, a superfluous label as "
        "improbable as for images that lack it. The percentages are probabilities by a classifier that has "
        "not seen the image. Images with the most doubtful labels come first."
    )
    shown = [(row, outcomes[row]) for row in worst if str(audit.split.ids[row]) in images]
    cards = _cards("suggestions", "Images with suggested corrections", audit, shown, filter=True)
    notes = [Note(text) for text in (note, *audit.sentences())]
    return Section("suggestions", "Suggested corrections", [*notes, *([cards] if shown else [])])


def _twins(audit: Audit, twins: list[tuple[int, int]], images: dict[str, bytes]) -> Section:
    title, labels, shown = "Similar images with different labels", audit.split.labels, []
    for pair in twins:
        for row in pair:
            outcomes = {k: "right" if labels[row][k] == POSITIVE else "unknown" for k in audit.differences(*pair)}
            if str(audit.split.ids[row]) in images:
                shown.append((row, outcomes))
    if not shown:
        return Section("twins", title)
    note = (
        f"{quantity(len(audit.twins), 'pair')} of similar images; each card has the labels that differ from "
        "the labels of its neighbor."
    )
    return Section("twins", title, [Note(note), _cards("twins", title, audit, shown, filter=False)])


def _together(audit: Audit) -> Section:
    names, counts, rows = audit.split.classes, audit.split.labels.count(POSITIVE), []
    for pair in audit.pairs:
        rows.append([names[pair.a], names[pair.b], pair.p_b_given_a, int(counts[pair.a]) - pair.support])
    columns = ["label", "nearly always with", ("share", "fraction"), ("images without", "count")]
    caption = "Shares in percent of the images with the first label. Images without the second label may lack it."
    title = "Labels that are nearly always together"
    return Section("together", title, [PageTable("together-table", columns, rows, caption)] if rows else [])
