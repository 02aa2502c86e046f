"""The section about pairs of labels: is b predicted because a is present? (ML-VPT, figure 1, and ML-VPT, figure 7)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlmoe_jax.apps.report.components import Gallery, Heading, Note, Section, Table, Thumbnail
from mlmoe_jax.apps.report.run_files import NO_SCORES, RunFiles
from mlmoe_jax.apps.report.thumbnails import Thumbnails, thumbnails
from mlmoe_jax.apps.tools.compare import ComparedRun, match_images, shared_splits
from mlmoe_jax.apps.tools.compare_pairs import (
    MeasuredPair,
    MeasuredPairs,
    difference_text,
    pairs_of_run,
    pairs_of_runs,
    rate_text,
)
from mlmoe_jax.apps.tools.label_pairs import DifferingImage
from mlmoe_jax.runtime.text import percent

MOST_IMAGES = 8  # per pair
_NAME, _TITLE = "pairs", "Label pairs: is b predicted because a is present?"


def pairs(files: RunFiles, other: RunFiles | None = None, *, wanted: str = "") -> Section:
    """Return how often b is predicted with and without a, and the images with a on which two runs differ about b.

    wanted: pairs as in `label_pairs.parse_pairs`; "" = those of `choose_pairs`. Raises UserError for a pair that is not
    among the labels, and if the runs cannot be compared.
    """
    main = files.main_split
    if main is None or main.scores is None or not len(main.scores):
        return Section(_NAME, _TITLE, missing=NO_SCORES, command=files.command("--mode=eval"))
    run = ComparedRun.of(files.folder)
    if other is None:
        found = pairs_of_run(run, main.name, pairs=wanted)
    else:
        there = ComparedRun.of(other.folder)
        images = match_images(there, run, shared_splits(there, run)[0])
        found = pairs_of_runs(there, run, images, pairs=wanted)
    if not found.pairs:
        text = "No two labels are known to occur together in training. --pairs=LABEL:LABEL,… names pairs to show."
        return Section(_NAME, _TITLE, [Note(text)])
    names = (files.name,) if other is None else (other.name, files.name)
    parts: list[Any] = [Note(_explain(found, names))]
    images = Thumbnails()
    if other is None:
        parts.append(Note("--against=FOLDER adds another run and the images with a on which the two differ about b."))
    elif differing := [image.id for pair in found.pairs for image in pair.differing[:MOST_IMAGES]]:
        images = thumbnails(files, run.splits[found.split], differing)
        parts.append(Note(" ".join([_explain_images(names), *images.left_out])))
    for pair in found.pairs:
        parts += [Heading(f"{pair.a} → {pair.b}"), _table(pair, names)]
        if other is not None:
            parts.append(Note(_counted(pair, names)))
        if pair.differing:
            parts.append(Gallery([_thumbnail(pair, image, names, images) for image in pair.differing[:MOST_IMAGES]]))
    return Section(_NAME, _TITLE, parts)


def _explain(found: MeasuredPairs, names: Sequence[str]) -> str:
    text = (
        f"On {found.split}. For each pair a → b, the share of images in which b is predicted, with and without each of "
        "the labels. A model that predicts b because of a predicts it more often in images with a and without b "
        "than in images with neither. In percent, with Wilson's 95 % interval. "
    )
    if len(names) == 1:
        return f"{text}Thresholds: {found.thresholds[0]}."
    origins = (f"{name}: {origin}" for name, origin in zip(names, found.thresholds, strict=True))
    return (
        f"{text}Differences are {names[1]} minus {names[0]} on the same images, with a paired 95 % interval (Bonett "
        f"and Price); * if it excludes 0. Thresholds of {'; of '.join(origins)}."
    )


def _explain_images(names: Sequence[str]) -> str:
    return (
        f"Below each pair are images with a for which only one of the runs predicts b, at most {MOST_IMAGES}, with "
        f"the score of b in {names[0]} → {names[1]}. Images on which the runs agree about all other labels come first."
    )


def _table(pair: MeasuredPair, names: Sequence[str]) -> Table:
    kinds = {
        "false_with_a": f"with {pair.a}, without {pair.b}",
        "false_without_a": "with neither",
        "found_with_a": "with both",
        "found_without_a": f"with {pair.b}, without {pair.a}",
    }
    rows = []
    for kind, of_images in kinds.items():
        row = [of_images, f"{pair.rates[0][kind].images:,}", *(rate_text(rates[kind]) for rates in pair.rates)]
        rows.append([*row, difference_text(pair.changes[kind])] if pair.changes else row)
    known = not math.isnan(pair.training.p_b_given_a)
    training = f"in training p(b|a) {pair.training.p_b_given_a:.2f}, p(b) {pair.training.p_b:.2f}" if known else ""
    columns = ("images", "number", *names, *(["difference"] if pair.changes else []))
    caption = f"{pair.b} predicted, in percent of the images"
    return Table(columns, rows, f"{caption}; {training}" if known else caption)


# ----------------------------------------------------------------------------------------------------------- thumbnails
def _counted(pair: MeasuredPair, names: Sequence[str]) -> str:
    if not pair.differing:
        return f"The runs agree about {pair.b} in every image with {pair.a}."
    count, better = len(pair.differing), sum(image.better for image in pair.differing)
    images = "1 image" if count == 1 else f"{count:,} images"
    return (
        f"The runs differ about {pair.b} in {images} with {pair.a}: {names[1]} is right in {better:,} and {names[0]} "
        f"in {count - better:,}."
    )


def _thumbnail(pair: MeasuredPair, image: DifferingImage, names: Sequence[str], images: Thumbnails) -> Thumbnail:
    title = f"{pair.b}: {percent(image.first, 0)} → {percent(image.second, 0)}\u00a0%"
    truth = f"{'present' if image.present else 'absent'}: {names[image.better]} is right"
    others = "no other label differs"
    if image.others:
        others = "1 other label differs" if image.others == 1 else f"{image.others} other labels differ"
    return Thumbnail(images.shown.get(image.id), f"Image {image.id}", title, (truth, others, image.id))
