"""The interface of data sources, and functions for several sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.containers.reach import open_place
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import HUB_DATA, PathLike, read_bytes

VARIABLE = "MLMOE_DATA"  # a folder with one folder per data set
DEFAULT_FOLDER = Path("data")  # a folder with one folder per data set, in the working directory


@dataclass(frozen=True)
class DataSource:
    """A data set, or a file format for the user's own images.

    Attributes:
      open: (`config.data`, split) -> Split. It raises UserError for all errors in the data or its settings.
      reads_classes: whether `open` has a third argument, the ordered class names of the model, or None for a new model.
        A source without fixed classes uses it to read its labels.
      splits: names of the splits; empty if they depend on the settings.
      drops_empty: whether images without a positive label are left out, unless `data.keep_empty` is set.
      labels: the number of labels; None if the data set has to be opened to count the labels.
      original: `config.data` -> the name of the data set of which this data set is a copy. None if it is not a copy.
      published: the files of a published data set; None for other data.
    """

    open: Callable[..., Split]
    splits: Collection[str] = ()
    reads_classes: bool = False
    drops_empty: bool = False
    labels: int | None = None
    original: Callable[[ConfigDict], str] | None = None
    published: Published | None = None


@dataclass(frozen=True)
class Published:
    """The files of a published data set.

    Attributes:
      files: description of the files and folders that the folder of the data set should contain.
      address: where the files are published.
      section: section of docs/datasets.md with the download commands and the layout.
    """

    name: str
    files: str
    address: str
    section: str

    def folder(self, root: PathLike = "") -> Path:
        """Return the folder of the data set; UserError if it does not exist.

        It is `root`, or if that is empty $MLMOE_DATA/NAME, or data/NAME if the variable MLMOE_DATA is not set.
        """
        parent = Path(os.environ.get(VARIABLE) or DEFAULT_FOLDER)
        folder = (Path(root) if os.fspath(root) else parent / self.name).expanduser()
        if not folder.is_dir():
            raise self.missing(f"there is no folder {folder}")
        return folder

    def read(self, path: Path) -> bytes:
        """Return the content of a file of the data set; UserError if it is missing."""
        try:
            return read_bytes(path)
        except OSError as error:
            raise self.missing(f"cannot read {path} ({error.strerror})") from error

    def text(self, path: Path) -> str:
        """Return a text file of the data set. Invalid UTF-8 is replaced."""
        return self.read(path).decode(errors="replace")

    def lines(self, path: Path) -> list[str]:
        """Return the lines of a text file of the data set that are not blank, without spaces around them."""
        return [line.strip() for line in self.text(path).splitlines() if line.strip()]

    def missing(self, reason: str) -> UserError:
        """Return an error whose `reason` names a missing file, and that states where the files can be downloaded."""
        return UserError(
            f"{reason}; {self.name} needs {self.files}, published at {self.address}: put it there, or set data.root "
            f"to its folder (docs/datasets.md#{self.section} shows how); --config=NAME:dataset=digits needs no files"
        )


def used_splits(data_config: ConfigDict, split: str) -> tuple[str, ...]:
    """Return the names of the splits that are read from the data: those that the config uses, and `split`.

    `data.val_split` is not one of them if it is held out of the training split.
    """
    val_split = "" if data_config.val_fraction else data_config.val_split
    names = (data_config.train_split, val_split, *data_config.test_splits, split)
    return tuple(dict.fromkeys(filter(None, names)))


def named_files(data_config: ConfigDict) -> set[str]:
    """Return the paths below `data.root` of the files with classes, a tree, categories and so on."""
    return {data_config[key] for key in ("classes", "tree", "attributes", "categories", "corrections")} - {""}


def require_known_split(data_set: str, split: str, splits: Iterable[str]) -> None:
    """Raise UserError unless `split` is in `splits`, the splits of the data set."""
    if split not in (known := list(splits)):
        raise UserError(f"data set {data_set} has no split '{split}'; it has {', '.join(known)}")


def difficult_treatment(data_config: ConfigDict, split: str) -> str:
    """Return `data.difficult_train` if `split` is the training split, otherwise `data.difficult_eval`."""
    return data_config.difficult_train if split == data_config.train_split else data_config.difficult_eval


def find_in_folders(split: Split, folders: Sequence[PathLike]) -> Split:
    """Return a split whose images are files in several folders, which are found by their names at the ends of the ids.

    `folders` are relative to the folder of the images. An image is in the last of them that has its file, or in the
    last one if none has it.
    """
    root = Path(split.images.folder)
    folder_of = {file: folder for folder in folders if (root / folder).is_dir() for file in os.listdir(root / folder)}
    files = map(os.path.basename, split.ids)
    names = [f"{folder_of.get(file, folders[-1])}/{file}" for file in files]
    return replace(split, images=replace(split.images, names=names))


def data_folder(data_config: ConfigDict, holds: str) -> Path:
    """Return the folder `data.root` of the user's own images, downloaded from the hub; UserError if it does not exist.

    `holds` describes the expected content of the folder in the error.
    """
    if data_config.root.startswith(HUB_DATA):
        place = open_place(data_config.root)
        return Path(place.fetch(place.names))
    if address := next((data_config[key] for key in ("root", "table", "images") if "://" in data_config[key]), ""):
        raise UserError(
            f"{address} is an address, and data.name={data_config.name} reads local files; copy them, or store the "
            "images as Parquet or tar files, which are read at an address (docs/datasets.md)"
        )
    folder = Path(data_config.root).expanduser()
    if not data_config.root or not folder.is_dir():
        raise UserError(
            f"data.root is '{data_config.root}', which is not a folder; set it to the folder of your images, with "
            f"{holds}"
        )
    return folder
