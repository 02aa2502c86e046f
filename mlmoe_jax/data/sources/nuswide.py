"""NUS-WIDE, 81 concepts, from the published layout.

    ImageList/{Train,Test}Imagelist.txt                                 # a path per line: actor\\0001_2124494179.jpg
    Groundtruth/Labels_{Train,Test}.txt                                 # 81 numbers per line, 0 or 1
    Groundtruth/TrainTestLabels/Labels_{concept}_{Train,Test}.txt       # or one file per concept, one number per line
    Flickr/actor/0001_2124494179.jpg

There are 161,789 training and 107,859 test images, about 125,449 and 83,898 of them with a label. Many are no longer on
Flickr; data.bad_images=skip skips missing images.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.rows import ImageRow, Listing, select_split
from mlmoe_jax.data.sources.source import DataSource, Published
from mlmoe_jax.data.split import Split
from mlmoe_jax.runtime.files import damage_explained

NUSWIDE_FILES = Published(
    "nuswide",
    "ImageList, Groundtruth and Flickr",
    "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html",
    "nus-wide",
)
_NAMES = """
airport animal beach bear birds boats book bridge buildings cars castle cat cityscape clouds computer coral cow
dancing dog earthquake elk fire fish flags flowers food fox frost garden glacier grass harbor horses house lake leaf
map military moon mountain nighttime ocean person plane plants police protest railroad rainbow reflection road rocks
running sand sign sky snow soccer sports statue street sun sunset surf swimmers tattoo temple tiger tower town toy
train tree valley vehicle water waterfall wedding whales window zebra
"""
CONCEPTS = tuple(_NAMES.split())
_CODE_OF_MARK = {"1": POSITIVE, "0": NEGATIVE}


def open_nuswide(data_config: ConfigDict, split: str) -> Split:
    """Open the split train or test, in the order of the image lists. Ids are paths relative to `data.root`."""
    folder = NUSWIDE_FILES.folder(data_config.root)
    list_path = folder / "ImageList" / f"{split.capitalize()}Imagelist.txt"
    files = [line.replace("\\", "/") for line in NUSWIDE_FILES.lines(list_path)]
    labels = folder / "Groundtruth" / f"Labels_{split.capitalize()}.txt"
    if labels.is_file():
        marks = map(str.split, NUSWIDE_FILES.lines(labels))
    else:
        labels = folder / "Groundtruth" / "TrainTestLabels"
        files_of_concepts = (labels / f"Labels_{name}_{split.capitalize()}.txt" for name in CONCEPTS)
        marks = zip(*map(NUSWIDE_FILES.lines, files_of_concepts), strict=True)
    with damage_explained(f"{labels} for the images of {list_path}"):
        rows = (_make_row(file, row) for file, row in zip(files, marks, strict=True))
        return select_split(rows, Listing(list_path, split, folder), CONCEPTS)


def _make_row(file: str, marks: Sequence[str]) -> ImageRow:
    codes = {name: code for name, mark in zip(CONCEPTS, marks, strict=True) if (code := _CODE_OF_MARK[mark])}
    return ImageRow(f"Flickr/{file}", codes)


NUSWIDE = DataSource(
    open_nuswide,
    splits=("train", "test"),
    drops_empty=True,
    labels=len(CONCEPTS),
    published=NUSWIDE_FILES,
)
