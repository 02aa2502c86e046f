"""NUS-WIDE, 81 concepts, from the published layout.

    ImageList/{Train,Test}Imagelist.txt                                 # a path per line: actor\\0001_2124494179.jpg
    Groundtruth/Labels_{Train,Test}.txt                                 # 81 numbers per line, 0 or 1
    Groundtruth/TrainTestLabels/Labels_{concept}_{Train,Test}.txt       # or one file per concept, one number per line
    Flickr/actor/0001_2124494179.jpg

There are 161,789 training and 107,859 test images, about 125,449 and 83,898 of them with a label. Many are no longer on
Flickr; data.bad_images=skip skips missing images.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.images import ImageFiles
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


def open_nuswide(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open train or test. Images are in the order of the lists, and ids are relative to the root."""
    folder = NUSWIDE_FILES.folder(data_config.root)
    list_path = folder / "ImageList" / f"{split.capitalize()}Imagelist.txt"
    files = [line.strip().replace("\\", "/") for line in NUSWIDE_FILES.lines(list_path) if line.strip()]
    labels = _read_labels(folder / "Groundtruth", split.capitalize(), len(files), list_path)
    ids = [f"Flickr/{file}" for file in files]
    return Split(split, CONCEPTS, labels, ids, ImageFiles(folder, ids))


def _read_labels(folder: Path, split: str, images: int, list_path: Path) -> np.ndarray:
    """Read the labels of N images as i8[N,81], from the merged file or from one file per concept."""
    merged, per_concept = folder / f"Labels_{split}.txt", folder / "TrainTestLabels"
    if merged.is_file():
        return _read_marks(merged, len(CONCEPTS), images, list_path)
    files = [per_concept / f"Labels_{name}_{split}.txt" for name in CONCEPTS]
    return np.concatenate([_read_marks(file, 1, images, list_path) for file in files], axis=1)


def _read_marks(path: Path, count: int, images: int, list_path: Path) -> np.ndarray:
    """Read i8[images,count] from a file with `count` numbers 0 or 1 per line."""
    fields = NUSWIDE_FILES.read(path).split()
    marks = b"".join(fields)
    with damage_explained(path):
        if len(fields) != count * images or len(marks) != len(fields) or marks.strip(b"01"):
            raise ValueError(f"it should have {count} × {images:,} numbers 0 or 1, for the images of {list_path}")
        return (np.frombuffer(marks, np.int8) - ord("0")).reshape(images, count)


NUSWIDE = DataSource(
    open_nuswide,
    splits=("train", "test"),
    drops_empty=True,
    labels=lambda data_config: len(CONCEPTS),
    published=NUSWIDE_FILES,
)
