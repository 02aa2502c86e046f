"""NUS-WIDE, 81 concepts, from the published layout.

    ImageList/{Train,Test}Imagelist.txt                                 # a path per line: actor\\0001_2124494179.jpg
    Groundtruth/Labels_{Train,Test}.txt                                 # 81 numbers per line, 0 or 1
    Groundtruth/TrainTestLabels/Labels_{concept}_{Train,Test}.txt       # or else these, one number per line
    ConceptsList/Concepts81.txt                                         # only read to verify the concepts
    Flickr/actor/0001_2124494179.jpg

161,789 training and 107,859 test images; without those that have no label, about 125,449 and 83,898. Many are no longer
on Flickr: data.bad_images=skip skips the missing ones.
"""

import os
from pathlib import Path

import numpy as np

from mlmoe_jax.data.images import image_files
from mlmoe_jax.data.sources.source import Published, Source, kept_and_checked, labeled, require_split
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

PUBLISHED = Published(
    "nuswide",
    "ImageList, Groundtruth and Flickr",
    "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html",
    "nus-wide",
)
CONCEPTS = """
airport animal beach bear birds boats book bridge buildings cars castle cat cityscape clouds computer coral cow
dancing dog earthquake elk fire fish flags flowers food fox frost garden glacier grass harbor horses house lake leaf
map military moon mountain nighttime ocean person plane plants police protest railroad rainbow reflection road rocks
running sand sign sky snow soccer sports statue street sun sunset surf swimmers tattoo temple tiger tower town toy
train tree valley vehicle water waterfall wedding whales window zebra
"""
CLASSES = tuple(CONCEPTS.split())


def open_nuswide(root: str | os.PathLike, split: str, *, keep_empty: bool = False, check: bool = True) -> Split:
    """Open train or test; images in the order of the lists, ids relative to `root`.

    root: as for `Published.folder`. keep_empty, check: see `kept_and_checked`.
    """
    require_split("nuswide", split, ("train", "test"))
    folder = PUBLISHED.folder(root)
    _check_concepts(folder)
    list_path = folder / "ImageList" / f"{split.capitalize()}Imagelist.txt"
    files = [line.strip().replace("\\", "/") for line in PUBLISHED.lines(list_path) if line.strip()]
    labels = _read_labels(folder / "Groundtruth", split.capitalize(), len(files), list_path)
    files, labels = labeled(files, labels, keep_empty=keep_empty, lists=list_path)
    images = image_files(folder / "Flickr", files, check=check)
    return Split(split, CLASSES, labels, [f"Flickr/{file}" for file in files], images)


def _check_concepts(folder: Path) -> None:
    for path in (folder / "ConceptsList" / "Concepts81.txt", folder / "Concepts81.txt"):
        if path.is_file() and tuple("\n".join(PUBLISHED.lines(path)).split()) != CLASSES:
            raise UserError(f"{path} does not list the 81 concepts of NUS-WIDE in alphabetical order; unpack it again")


def _read_labels(folder: Path, split: str, images: int, list_path: Path) -> np.ndarray:
    """Read the labels of N `images` as i8[N,81], from the merged file or else from one file per concept."""
    merged, per_concept = folder / f"Labels_{split}.txt", folder / "TrainTestLabels"
    if merged.is_file():
        return _read_marks(merged, len(CLASSES), images, list_path)
    if not per_concept.is_dir():
        raise UserError(f"there are neither labels {merged} nor a folder {per_concept}; unpack Groundtruth there")
    files = [per_concept / f"Labels_{name}_{split}.txt" for name in CLASSES]
    return np.concatenate([_read_marks(file, 1, images, list_path) for file in files], axis=1)


def _read_marks(path: Path, count: int, images: int, list_path: Path) -> np.ndarray:
    """Read i8[images,count] from a file with `count` numbers 0 or 1 per line."""
    content = PUBLISHED.read(path)
    fields = content.split()
    marks = b"".join(fields)
    if len(fields) == len(marks) == count * images and not marks.strip(b"01"):
        return (np.frombuffer(marks, np.int8) - ord("0")).reshape(images, count)
    lines = [(number, line.split()) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    for number, marks_of_line in lines:
        if len(marks_of_line) != count or not {b"0", b"1"}.issuperset(marks_of_line):
            what = "0 or 1" if count == 1 else f"{count} numbers 0 or 1"
            text = b" ".join(marks_of_line).decode(errors="replace")[:60]
            raise UserError(f"{path} line {number} should be {what}, not '{text}'; unpack it again")
    raise UserError(f"{path} has {len(lines):,} lines, but {list_path} lists {images:,} images; unpack both again")


NUSWIDE = Source(
    lambda data_config, split, classes: open_nuswide(data_config.root, split, **kept_and_checked(data_config)),
    labels=lambda data_config: len(CLASSES),
    published=PUBLISHED,
)
