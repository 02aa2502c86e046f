"""The interface of data sources, and what several of them share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TypeVar

import numpy as np
from ml_collections import ConfigDict

from mlmoe_jax.data.split import Split, has_positive
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, read_bytes

VARIABLE = "MLMOE_DATA"  # a folder with one folder per data set
BESIDE = Path("data")  # the same, below the working directory
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One data set, or one file layout for your own images.

    open: (`config.data`, split, classes) -> Split; it raises UserError for all errors in the data or its settings.
    classes: the ordered class names of the model, or None, with which a source without fixed classes reads its labels.
    labels: `config.data` -> the number of labels; None if the data set has to be opened to count them.
    original: `config.data` -> the name of the data set of which this is a copy; None if it is not a copy.
    published: where the files of a published data set are; None for other data.
    """

    open: Callable[[ConfigDict, str, Sequence[str] | None], Split]
    labels: Callable[[ConfigDict], int] | None = None
    original: Callable[[ConfigDict], str] | None = None
    published: Published | None = None


@dataclass(frozen=True)
class Published:
    """The files of one published data set.

    name: that of `data.name`. files: the files and folders that its folder holds. address: where they are published.
    section: that of docs/datasets.md which has the download commands and the layout.
    """

    name: str
    files: str
    address: str
    section: str

    def folder(self, root: str | os.PathLike = "") -> Path:
        """Return the folder of the data set: `root`, or if it is empty $MLMOE_DATA/NAME or else data/NAME.

        Raises UserError if there is none; a `root` that is set is the only place that counts.
        """
        if os.fspath(root):
            places = [Path(root).expanduser()]
        else:
            above = [Path(os.environ[VARIABLE]).expanduser()] if os.environ.get(VARIABLE) else []
            places = [folder / self.name for folder in (*above, BESIDE)]
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None:
            unset = "" if os.fspath(root) or len(places) > 1 else f" (and ${VARIABLE} is not set)"
            raise self.missing(f"there is no folder {' or '.join(map(str, places))}{unset}")
        return folder

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""
        try:
            return read_bytes(path, MOST_DATA)
        except OSError as error:
            raise self.missing(f"cannot read {path} ({error.strerror})") from error

    def lines(self, path: Path) -> list[str]:
        """Return the lines of a text file; bytes that are not UTF-8 are replaced."""
        return self.read(path).decode(errors="replace").splitlines()

    def missing(self, reason: str) -> UserError:
        """Return the error for files that are not there; `reason` says which was looked for and where."""
        return UserError(
            f"{reason}; {self.name} needs {self.files}, published at {self.address}: put it there, or set data.root "
            f"to its folder (docs/datasets.md#{self.section} shows how)"
        )


def require_split(data_set: str, split: str, splits: Iterable[str]) -> None:
    """Raise UserError unless `split` is one of the splits of a data set."""
    if split not in (known := list(splits)):
        raise UserError(f"data set {data_set} has no split '{split}'; it has {', '.join(known)}")


def difficult_of(data_config: ConfigDict, split: str) -> str:
    """Return how difficult labels of a split count: as in training for the training split, else as in metrics."""
    return data_config.difficult_train if split == data_config.train_split else data_config.difficult_eval


def labeled(
    images: Sequence[T], labels: np.ndarray, data_config: ConfigDict, *, lists: object, difficult: str = "negative"
) -> tuple[list[T], np.ndarray]:
    """Return the images that have a positive label, or with `data.keep_empty` all N images, and their labels i8[N,K].

    Raises UserError, with the name of the `lists`, if no image is left.
    """
    rows = has_positive(labels, difficult) | data_config.keep_empty
    if not rows.any():
        raise UserError(f"no image of {lists} has a positive label; check the file or set data.keep_empty")
    return list(compress(images, rows)), labels[rows]


def data_folder(data_config: ConfigDict, holds: str) -> Path:
    """Return the folder `data.root` of your own images; UserError, which says what it `holds`, if it is none."""
    folder = Path(data_config.root).expanduser()
    if not data_config.root or not folder.is_dir():
        what = f"'{folder}', which is not a folder" if data_config.root else "empty"
        raise UserError(f"data.root is {what}; set it to the folder that holds {holds} of your images")
    return folder
