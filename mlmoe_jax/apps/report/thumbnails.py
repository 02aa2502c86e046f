"""Thumbnails of images by name: from samples/ of the run folder, else from the data set of the run.

A run folder may come from somebody else, and a page is passed on. An image of the data set is therefore embedded only
if its file is below `data.root`, links resolved, and if the data set gives it the labels with which the run scored it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.sources.open import open_split, root_of
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.inference.explain import thumbnail

SIDE = 160  # maximum side of a thumbnail in pixels


@dataclass
class Thumbnails:
    """The thumbnails of some images: name -> content of a JPEG file, and sentences about those that are left out."""

    shown: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def thumbnails(files: RunFiles, scored: SplitScores, wanted: Sequence[str]) -> Thumbnails:
    """Return thumbnails of the images `wanted` of a split. scored: the split as the run has scored it."""
    samples, found, asked = files.samples, Thumbnails(), set(wanted)
    if samples is not None and samples.split == scored.name:
        found.shown = {x: image for x, image in zip(samples.ids, samples.images, strict=True) if x in asked}
    if not (missing := [x for x in dict.fromkeys(wanted) if x not in found.shown]):
        return found
    config = files.config
    try:
        source = open_split(config.data, scored.name, classes=files.names, seed=config.seed)
    except UserError as error:
        found.left_out.append(f"{len(missing):,} images are not shown, since the data set cannot be read: {error}.")
        return found
    root = os.path.realpath(root_of(config.data))
    _read(found, missing, source, scored, root, Decoding.of(config.data, SIDE))
    return found


def _read(
    found: Thumbnails, missing: Sequence[str], source: Split, scored: SplitScores, root: str, decoding: Decoding
) -> None:
    """Add thumbnails of the images `missing` that the data set may show."""
    reasons: dict[str, int] = {}
    rows = {str(name): row for row, name in enumerate(source.ids)}
    codes = dict(zip(map(str, scored.ids), scored.codes, strict=True))
    for name in missing:
        row = rows.get(name)
        path = None if row is None else source.images.path(row)
        if row is None or not np.array_equal(source.labels[row], codes[name]):
            reason = "the data set has no such image with these labels"
        elif path is not None and not Path(os.path.realpath(path)).is_relative_to(root):
            reason = "their files are outside data.root"
        else:
            try:
                found.shown[name] = thumbnail(source.images.read(row, decoding), SIDE)
                continue
            except BadImage:
                reason = "they cannot be read"
        reasons[reason] = reasons.get(reason, 0) + 1
    found.left_out += [f"{count:,} images are not shown, since {reason}." for reason, count in reasons.items()]
