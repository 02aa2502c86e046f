"""Write the labels of a data set as files of a labeling tool (`--mode=pack --format=…`)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.pack import open_whole
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.labeling_formats import FORMATS, Entry, Format, LabelFile, output_path
from mlmoe_jax.data.sources.open import root_of
from mlmoe_jax.data.sources.source import difficult_of
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.table import Column, Table

IMAGES_PER_STEP = 1024  # images per step of the progress bar


def write_labels(config: ConfigDict, name: str, output: str) -> Table:
    """Write the labels of every split of `config.data` in the format `name`; return a table of the files.

    Args:
      config: the config.
      name: name of the format.
      output: path of the file or folder, with {split} if there are several splits.

    Raises:
      UserError: the images are not files, or the format cannot name them.
    """
    form, splits = FORMATS[name], open_whole(config)
    if len(splits) > 1 and "{split}" not in output:
        names = " and ".join(split.name for split in splits)
        raise UserError(f"there are the splits {names}; write {{split}} in --output, or clear data.test_splits")
    files = []
    for split in splits:
        path = output_path(output.replace("{split}", split.name), name)
        files.append(LabelFile(path, split.classes, *_paths(split, config.data)))
        form.require(files[-1])
    rows, notes = [], []
    for split, file in zip(splits, files, strict=True):
        difficult = _difficult(form, difficult_of(config.data, split.name))
        steps = math.ceil(len(split) / IMAGES_PER_STEP)
        with contextlib.closing(Progress(split.name, steps, IMAGES_PER_STEP)) as progress:
            note = form.write(file, _entries(split, file.images, difficult, progress))
        rows.append([split.name, len(split), np.count_nonzero(split.labels == POSITIVE), str(file.path)])
        notes += filter(None, (_losses(split, form, difficult), note))
    counts = [Column(name, "{:,}".format) for name in ("images", "positive labels")]
    return Table(["split", *counts, Column("written to", align="<")], rows, notes=notes)


def _difficult(form: Format, treatment: str) -> int:
    """Return the code that a difficult label gets in a format."""
    if form.holds_difficult:
        return DIFFICULT
    return POSITIVE if treatment == "positive" else NEGATIVE


def _paths(split: Split, data_config: ConfigDict) -> tuple[list[str], str]:
    """Return the paths of the images of a split, and the folder of the data set.

    Paths are relative to the folder if they are in it.
    """
    images, root = split.images, root_of(data_config)
    if not isinstance(images, ImageFiles):
        raise UserError(f"the images of {data_config.name} are not files, which a labeling tool could show")
    inside = os.path.relpath(images.folder, root)
    below = "" if inside == "." else f"{inside}/"
    if inside.startswith(".."):
        below = f"{os.path.abspath(images.folder)}/"
    return [f"{below}{name}" for name in images.names], root


def _entries(split: Split, images: Sequence[str], difficult: int, progress: Progress) -> Iterator[Entry]:
    """Yield the entries of a split; `difficult` is the code that a difficult label gets."""
    for row, (image, codes) in enumerate(zip(images, split.labels, strict=True)):
        if row % IMAGES_PER_STEP == 0:
            progress.advance()
        present = np.flatnonzero((codes == POSITIVE) | ((codes == DIFFICULT) & (difficult != NEGATIVE)))
        labels = {split.classes[k]: POSITIVE if codes[k] == POSITIVE else difficult for k in present}
        yield Entry(image, None if (codes == UNKNOWN).all() else labels)


def _losses(split: Split, form: Format, difficult: int) -> str:
    """Return a sentence about the labels that the format cannot hold; "" if there are none."""
    is_labeled = ~(split.labels == UNKNOWN).all(axis=1)  # an image without known labels stays unlabeled
    parts = []
    if unknown := np.count_nonzero(split.labels[is_labeled] == UNKNOWN):
        parts.append(f"{unknown:,} unknown labels are written as absent")
    if not form.holds_difficult and (count := np.count_nonzero(split.labels == DIFFICULT)):
        parts.append(f"{count:,} difficult labels are written as {'present' if difficult == POSITIVE else 'absent'}")
    return f"{split.name}: the format has no mark for them: {' and '.join(parts)}" if parts else ""
