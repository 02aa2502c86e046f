"""Write the labels of a data set as files of a labeling tool (`mlmoe pack --format=…`)."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.apps.tools.pack import open_whole
from mlmoe_jax.data.images import ImageFiles
from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.labeling_formats import FORMATS, Format, LabelEntry, LabelFile, output_path
from mlmoe_jax.data.sources.named_files import find_root, require_no_table
from mlmoe_jax.data.sources.source import difficult_treatment
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.split_checks import warn_unused
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.table import Column, Outcome, Table


def write_labels(config: ConfigDict, name: str, output: str) -> Outcome:
    """Write the labels of every split of `config.data` to `output`, a path in which {split} is the name of a split.

    `name` is a format, a key of FORMATS. Raises UserError if the images are not files, or the labeling tool's format
    cannot represent the names of the images.
    """
    form, splits = FORMATS[name], open_whole(config)
    warn_unused(splits)
    if len(splits) > 1 and "{split}" not in output:
        names = " and ".join(split.name for split in splits)
        raise UserError(f"there are the splits {names}; write {{split}} in --output, or clear data.test_splits")
    files = [_label_file(split, config.data, name, output) for split in splits]
    for file in files:
        require_no_table(file.path, config.data)
        form.require(file)
    rows, notes = [], []
    for split, file in zip(splits, files, strict=True):
        difficult = _difficult_code(form, difficult_treatment(config.data, split.name))
        note = form.write(file, _entries(split, file.images, difficult))
        rows.append([split.name, len(split), split.labels.count(POSITIVE).sum(), str(file.path)])
        notes += [*_losses(split, form, difficult), *filter(None, [note])]
    columns = ["split", "images", "positive labels", Column("written to", align="<")]
    return Outcome([Table(columns, rows, notes=notes)])


def _label_file(split: Split, data_config: ConfigDict, name: str, output: str) -> LabelFile:
    """Return the description of the file to write. Paths of images outside the folder of the data set are absolute."""
    images, root = split.images, find_root(data_config)
    if not isinstance(images, ImageFiles):
        raise UserError(f"the images of {data_config.name} are not files, which a labeling tool could show")
    folder = os.path.relpath(images.folder, root)
    if folder.startswith(".."):
        folder = os.path.abspath(images.folder)
    below = "" if folder == "." else f"{folder}/"
    path = output_path(output.replace("{split}", split.name), name)
    return LabelFile(path, split.classes, [f"{below}{image}" for image in images.names], root, tree=split.tree)


def _difficult_code(form: Format, treatment: str) -> int:
    """Return the label code that replaces DIFFICULT in the file; DIFFICULT if the format has a mark for it.

    Otherwise, the code is POSITIVE if `treatment` is "positive", and NEGATIVE for all other values.
    """
    if form.holds_difficult:
        return DIFFICULT
    return POSITIVE if treatment == "positive" else NEGATIVE


def _entries(split: Split, images: Sequence[str], difficult: int) -> Iterator[LabelEntry]:
    """Yield the path and labels (None if unlabeled) of each image. DIFFICULT is replaced by the code `difficult`."""
    for image, given in zip(images, split.labels, strict=True):
        codes = np.where(given == DIFFICULT, difficult, given)
        labels = {split.classes[k]: int(codes[k]) for k in np.flatnonzero(codes > NEGATIVE)}
        yield LabelEntry(image, None if (codes == UNKNOWN).all() else labels)


def _losses(split: Split, form: Format, difficult: int) -> Iterator[str]:
    """Yield sentences about label codes that the format cannot represent, and that are written as another code."""
    count = split.labels.count(UNKNOWN, axis=1)
    # An image without known labels stays unlabeled.
    if unknown := count[count < len(split.classes)].sum():
        yield f"{split.name}: {unknown:,} unknown labels are written as absent, because the format has no mark for them"
    if not form.holds_difficult and (count := split.labels.count(DIFFICULT).sum()):
        name = "present" if difficult == POSITIVE else "absent"
        yield f"{split.name}: {count:,} difficult labels are written as {name}, because the format has no mark for them"
