"""Pascal VOC 2007 and 2012, classification labels, from the published layout.

    VOCdevkit/VOC2012/ImageSets/Main/{class}_{split}.txt     # lines "2008_000002 -1"
    VOCdevkit/VOC2012/JPEGImages/2008_000002.jpg

A mark is 1 (present), -1 (absent) or 0 (present, but difficult to see). ML-VPT treats 0 as absent and drops an image
without a 1. ML-GCN and ADD-GCN treat 0 as present in training, leave it out of the AP, and keep every image.
`data.difficult_train` and `data.difficult_eval` choose: an image with only difficult objects is dropped like an empty
one where they count as absent. The published lists of 2007 and 2012 have no such image.
"""

import os
import re
from pathlib import Path

import numpy as np

from mlmoe_jax.data.images import image_files
from mlmoe_jax.data.sources.source import (
    Published,
    Source,
    difficult_of,
    kept_and_checked,
    labeled,
    require_split,
)
from mlmoe_jax.data.split import DIFFICULT, NEGATIVE, POSITIVE, Split
from mlmoe_jax.errors import UserError

SPLITS = ("train", "val", "trainval", "test")
NAMES = """
aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep sofa
train tvmonitor
"""
CLASSES = tuple(NAMES.split())
PUBLISHED = {
    year: Published(
        f"voc{year}", f"VOCdevkit/VOC{year}", f"http://host.robots.ox.ac.uk/pascal/VOC/voc{year}/", f"voc-{year}"
    )
    for year in (2007, 2012)
}
MEANING = {"1": POSITIVE, "-1": NEGATIVE, "0": DIFFICULT}


def open_voc(
    root: str | os.PathLike,
    year: int,
    split: str,
    *,
    keep_empty: bool = False,
    difficult: str = "negative",
    check: bool = True,
) -> Split:
    """Open train, val, trainval or test of VOC `year`; images sorted by name, ids relative to the year's folder.

    root: as for `Published.folder`, or the year's own folder or VOCdevkit. keep_empty, check: see `kept_and_checked`.
    difficult: how difficult labels count, as in `data.batch.targets`; unless as `negative`, images with only difficult
    labels stay too.
    """
    require_split(f"voc{year}", split, SPLITS)
    folder = _find(PUBLISHED[year].folder(root), year)
    lists = folder / "ImageSets" / "Main"
    names, labels = read_lists(PUBLISHED[year], lists, split)
    of_split = f"{lists}/*_{split}.txt"
    names, labels = labeled(names, labels, keep_empty=keep_empty, lists=of_split, difficult=difficult)
    files = [f"{name}.jpg" for name in names]
    images = image_files(folder / "JPEGImages", files, check=check)
    return Split(split, CLASSES, labels, [f"JPEGImages/{file}" for file in files], images)


def read_lists(published: Published, folder: Path, split: str) -> tuple[list[str], np.ndarray]:
    """Read the 20 lists of a split: the names of the N images, sorted, and their labels i8[N,20].

    Raises UserError for a list that is missing, malformed, or has other images than the first.
    """
    marks = [_read_list(published, folder, name, split) for name in CLASSES]
    names = sorted(marks[0])
    for name, marks_of in zip(CLASSES, marks, strict=True):
        if marks_of.keys() != marks[0].keys():
            raise UserError(
                f"{CLASSES[0]}_{split}.txt and {name}_{split}.txt in {folder} list different images; "
                "unpack the lists again"
            )
    columns = [[marks_of[name] for name in names] for marks_of in marks]
    return names, np.array(columns, np.int8).T.copy()


def _find(root: Path, year: int) -> Path:
    below = [root / "VOCdevkit" / f"VOC{year}", root / f"VOC{year}"]
    own_name = root.absolute().name
    is_other_year = re.fullmatch(r"VOC\d{4}", own_name) and own_name != f"VOC{year}"
    folders = below if is_other_year else [*below, root]
    for folder in folders:
        if (folder / "ImageSets" / "Main").is_dir():
            return folder
    raise PUBLISHED[year].missing(f"ImageSets/Main is not in {', '.join(map(str, folders[:-1]))} or {folders[-1]}")


def _read_list(published: Published, folder: Path, name: str, split: str) -> dict[str, int]:
    path = folder / f"{name}_{split}.txt"
    marks = {}
    for number, line in enumerate(published.lines(path), 1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 2 or fields[1] not in MEANING or fields[0] in marks:
            raise UserError(
                f"{path} line {number} should be a new image's name and 1, 0 or -1, not '{line[:80].strip()}'"
            )
        marks[fields[0]] = MEANING[fields[1]]
    return marks


def _source(year: int) -> Source:
    return Source(
        lambda data_config, split, classes: open_voc(
            data_config.root,
            year,
            split,
            difficult=difficult_of(data_config, split),
            **kept_and_checked(data_config),
        ),
        labels=lambda data_config: len(CLASSES),
        published=PUBLISHED[year],
    )


VOC2007, VOC2012 = _source(2007), _source(2012)
