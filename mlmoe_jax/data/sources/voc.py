"""Pascal VOC 2007 and 2012, classification labels, from the published layout.

    VOCdevkit/VOC2012/ImageSets/Main/{class}_{split}.txt     # lines "2008_000002 -1"
    VOCdevkit/VOC2012/JPEGImages/2008_000002.jpg

A mark is 1 (present), -1 (absent) or 0 (present, but difficult to see). ML-VPT treats 0 as absent and drops an image
without a 1, as does PAT. ML-GCN and ADD-GCN treat 0 as present in training, CSRA and SpliceMix as absent; all four
leave it out of the AP, and keep every image. `data.difficult_train` and `data.difficult_eval` set the treatment. Where
difficult objects count as absent, an image with only difficult objects is dropped. The published lists of 2007 and 2012
have no such image.
"""

import functools
import re
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.rows import ImageRow, Listing, select_split
from mlmoe_jax.data.sources.source import DataSource, Published
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import damage_explained

_NAMES = """
aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep sofa
train tvmonitor
"""
VOC_CLASSES = tuple(_NAMES.split())
VOC_FILES = {
    year: Published(
        f"voc{year}", f"VOCdevkit/VOC{year}", f"http://host.robots.ox.ac.uk/pascal/VOC/voc{year}/", f"voc-{year}"
    )
    for year in (2007, 2012)
}
_CODE_OF_MARK = {"1": POSITIVE, "-1": NEGATIVE, "0": DIFFICULT}


def open_voc(year: int, data_config: ConfigDict, split: str) -> Split:
    """Open the split train, val, trainval or test, sorted by name. Ids are paths relative to the folder of the year.

    `data.root` is the parent folder of VOCdevkit, VOCdevkit itself or the folder of the year.
    """
    published = VOC_FILES[year]
    folder = _find(published.folder(data_config.root), year)
    lists = folder / "ImageSets" / "Main"
    labels: dict[str, dict[str, int]] = {}  # image -> class -> code
    for name in VOC_CLASSES:
        path = lists / f"{name}_{split}.txt"
        with damage_explained(path):
            marks = dict(map(str.split, published.lines(path)))
            if name == VOC_CLASSES[0]:
                labels = {image: {} for image in sorted(marks)}
            for image, codes in labels.items():
                codes[name] = _CODE_OF_MARK[marks[image]]
    rows = (ImageRow(f"JPEGImages/{image}.jpg", codes) for image, codes in labels.items())
    return select_split(rows, Listing(lists, split, folder), VOC_CLASSES)


def _find(root: Path, year: int) -> Path:
    below = [root / "VOCdevkit" / f"VOC{year}", root / f"VOC{year}"]
    own_name = root.absolute().name
    is_other_year = re.fullmatch(r"VOC\d{4}", own_name) and own_name != f"VOC{year}"
    folders = below if is_other_year else [*below, root]
    for folder in folders:
        if (folder / "ImageSets" / "Main").is_dir():
            return folder
    raise VOC_FILES[year].missing(f"ImageSets/Main is not in {', '.join(map(str, folders[:-1]))} or {folders[-1]}")


VOC2007, VOC2012 = (
    DataSource(
        functools.partial(open_voc, year),
        splits=("train", "val", "trainval", "test"),
        drops_empty=True,
        labels=len(VOC_CLASSES),
        published=published,
    )
    for year, published in VOC_FILES.items()
)
