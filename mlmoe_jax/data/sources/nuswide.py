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
from mlmoe_jax.data.sources.coco import with_positive
from mlmoe_jax.data.sources.published import Published
from mlmoe_jax.data.sources.source import Source, kept_and_checked
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, read_bytes

SPLITS = ("train", "test")
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

    root: the folder that holds ImageList, Groundtruth and Flickr, or "", see `Published.folder`. keep_empty: keep
    images without a positive label.
    check: verify now that all images exist.
    Raises UserError for an unknown split, or lists, labels or images that are missing, malformed or empty.
    """
    if split not in SPLITS:
        raise UserError(f"data set nuswide has no split '{split}'; it has {', '.join(SPLITS)}")
    folder = PUBLISHED.folder(root)
    _check_concepts(folder)
    list_path = folder / "ImageList" / f"{split.capitalize()}Imagelist.txt"
    lines = _read(list_path).decode("utf-8", errors="replace").splitlines()
    files = [line.strip().replace("\\", "/") for line in lines if line.strip()]
    labels = _read_labels(folder / "Groundtruth", split.capitalize(), len(files), list_path)
    if not keep_empty:
        files, labels = with_positive(files, labels)
    if not files:
        raise UserError(f"no image of {list_path} has a label; check the lists or set data.keep_empty")
    images = image_files(folder / "Flickr", files, check=check)
    return Split(split, CLASSES, labels, [f"Flickr/{file}" for file in files], images)


def _check_concepts(folder: Path) -> None:
    for path in (folder / "ConceptsList" / "Concepts81.txt", folder / "Concepts81.txt"):
        if path.is_file():
            found = tuple(_read(path).decode("utf-8", errors="replace").split())
            if found != CLASSES:
                odd = next((name for name in found if name not in CLASSES), "another number or order of them")
                raise UserError(
                    f"{path} does not list the 81 concepts of NUS-WIDE in alphabetical order, but {odd}; unpack it "
                    "again"
                )


def _read_labels(folder: Path, split: str, images: int, list_path: Path) -> np.ndarray:
    """Read the labels of N `images` as i8[N,81], from the merged file or else from one file per concept."""
    merged = folder / f"Labels_{split}.txt"
    if merged.is_file():
        labels = [_marks(line, len(CLASSES), merged, number) for number, line in _lines(merged)]
        _require_equal_counts(len(labels), merged, images, list_path)
        return np.array(labels, np.int8).reshape(-1, len(CLASSES))
    per_concept = folder / "TrainTestLabels"
    if not per_concept.is_dir():
        raise UserError(f"there are neither labels {merged} nor a folder {per_concept}; unpack Groundtruth there")
    labels = np.empty((images, len(CLASSES)), np.int8)
    for k, name in enumerate(CLASSES):
        path = per_concept / f"Labels_{name}_{split}.txt"
        marks = _whole_file(path)
        _require_equal_counts(len(marks), path, images, list_path)
        labels[:, k] = marks
    return labels


def _lines(path: Path) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(_read(path).splitlines(), 1) if line.strip()]


def _whole_file(path: Path) -> np.ndarray:
    """Read i8[N] from a file with one mark per line."""
    fields = _read(path).split()
    marks = b"".join(fields)
    if len(marks) == len(fields) and not marks.strip(b"01"):
        return np.frombuffer(marks, np.int8) - ord("0")
    return np.concatenate([_marks(line, 1, path, number) for number, line in _lines(path)])


def _marks(line: bytes, count: int, path: Path, number: int) -> np.ndarray:
    """Read i8[count] from a line of 0 and 1."""
    fields = line.split()
    marks = b"".join(fields)
    if not len(fields) == len(marks) == count or marks.strip(b"01"):
        text = line[:60].decode("utf-8", errors="replace").strip()
        what = "0 or 1" if count == 1 else f"{count} numbers 0 or 1"
        raise UserError(f"{path} line {number} should be {what}, not '{text}'; unpack it again")
    return np.frombuffer(marks, np.int8) - ord("0")


def _require_equal_counts(marks: int, path: Path, images: int, list_path: Path) -> None:
    if marks != images:
        raise UserError(f"{path} has {marks:,} lines, but {list_path} lists {images:,} images; unpack both again")


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_DATA)
    except OSError as error:
        raise PUBLISHED.wanted(f"cannot read {path} ({error.strerror})") from error


NUSWIDE = Source(
    lambda data_config, split, classes: open_nuswide(data_config.root, split, **kept_and_checked(data_config)),
    labels=lambda data_config: len(CLASSES),
    published=PUBLISHED,
)
