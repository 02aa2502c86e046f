"""Your own images sorted into one folder per class: one positive label per image, all other labels negative.

    root/{split}/{class}/…/a.jpg     # one folder per split
    root/{class}/…/a.jpg             # no folders per split, with data.val_fraction or without another split

A folder of a class may have subfolders. Hidden files and folders, files other than images, and images outside every
class folder are left out.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.rows import ImageRow, Listing, validated
from mlmoe_jax.data.sources.source import DataSource, data_folder
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

# Of images.IMAGE_FORMATS, and of HEIC, which cannot be read, so that an error names these files.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff", ".jp2", ".j2k"),
    *(".ppm", ".pgm", ".heic", ".heif"),
)


def open_folders(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of images that are sorted into one folder per class.

    Classes and the images of each class are sorted by name. Ids are paths relative to `data.root`.

    Raises:
      UserError: the split has no folder or no images, or a folder is not one of the classes.
    """
    root = data_folder(data_config, "the folders of classes")
    top = _folder_of_split(root, split, data_config)
    names = _subfolders(top)
    prefix = "" if top == root else f"{split}/"
    rows = [ImageRow(f"{prefix}{name}/{file}", {name: POSITIVE}) for name in names for file in image_names(top / name)]
    return validated(rows, Listing(top, split), names if classes is None else classes).to_split(root)


def _folder_of_split(root: Path, split: str, data_config: ConfigDict) -> Path:
    if (root / split).is_dir():
        return root / split
    others = [name for name in (data_config.val_split, *data_config.test_splits) if name]
    alone = split == data_config.train_split and not any((root / name).is_dir() for name in others)
    if alone and (data_config.val_fraction or not others):
        return root
    found = ", ".join(_subfolders(root)[:5]) or "none"
    raise UserError(
        f"there is no folder {root / split} (folders there: {found}); sort the images into {root}/SPLIT/CLASS, "
        f"or into {root}/CLASS with data.val_fraction above 0 and data.test_splits cleared"
    )


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_names(folder: Path) -> list[str]:
    """Return the paths of all images at any depth below a folder. They are sorted and relative to the folder."""
    images = []
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_cycle(Path(path, name))]
        relative = Path(path).relative_to(folder)
        images += [
            (relative / file).as_posix()
            for file in files
            if file.lower().endswith(IMAGE_SUFFIXES) and not file.startswith(".")
        ]
    return sorted(images)


def _is_cycle(folder: Path) -> bool:
    """Return whether a folder is a symbolic link to itself or to one of its parents."""
    return folder.is_symlink() and any(folder.samefile(above) for above in folder.absolute().parents)


FOLDERS = DataSource(open_folders)
