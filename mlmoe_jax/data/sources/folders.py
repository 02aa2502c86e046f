"""Your own images sorted into one folder per class: the class is positive, all other labels are negative.

    root/{split}/{class}/…/a.jpg     # one folder per split, such as train, Validation or test_set, see `split_key`
    root/{class}/…/a.jpg             # no folders per split, with data.val_fraction or without another split

A folder of a class may have subfolders. An image whose file is in several classes of a split is one image with all of
these labels, whose id is the first path. Files that are not used are counted, see `image_search.list_images`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from mlmoe_jax.data.image_search import is_skipped, list_images
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.names import split_key
from mlmoe_jax.data.sources.rows import ImageRow, Listing, validated
from mlmoe_jax.data.sources.source import DataSource, data_folder, used_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage, unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import compose

STANDARD_SPLITS = ("train", "val", "test")  # a folder in `data.root` with such a name, see `split_key`, is no class
SHOWN_FOLDERS = 8  # folders of no split that are counted one by one


class _Image(NamedTuple):
    """An image: its split, the folder of its class, and its path relative to `data.root`."""

    split: str
    folder: str
    path: str


def open_folders(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of images that are sorted into one folder per class.

    Classes and the images of each class are sorted by name. Ids are paths relative to `data.root`.

    Raises:
      UserError: the split has no folder or no images, or a folder is not one of the classes.
    """
    root = data_folder(data_config, "the folders of classes")
    split_of_folder = _find_splits(root, split, data_config)
    usage = Usage(f"{root}", "file")
    images = _find_images(root, split_of_folder, usage)
    rows = [ImageRow(path, {compose(folder): POSITIVE}) for name, folder, path in images if name == split]
    tops = [root / folder for folder, name in split_of_folder.items() if name == split]
    if not rows:
        raise UserError("; ".join([f"{tops[0]} lists no images in folders of classes", *unused_input([usage])]))
    names = sorted({compose(name) for top in tops for name in _subfolders(top)})
    opened = validated(rows, Listing(tops[0], split), names if classes is None else classes).to_split(root)
    return replace(opened, usage=(usage,))


def _find_splits(root: Path, split: str, data_config: ConfigDict) -> dict[str, str | None]:
    """Return a dict of folder -> its split, or None if the config uses no such split.

    If there are no folders of splits, the only folder is "", which is `root`.

    Raises UserError if the split to open has no folder.
    """
    folders, splits = _subfolders(root), used_splits(data_config, split)
    split_of_key = {split_key(name): name for name in reversed(splits)}
    found = {folder: folder if folder in splits else split_of_key.get(split_key(folder)) for folder in folders}
    if split in found.values():
        return found
    has_splits = any(found.values()) or any(split_key(folder) in STANDARD_SPLITS for folder in folders)
    alone = data_config.val_fraction or not any((data_config.val_split, *data_config.test_splits))
    if alone and split == data_config.train_split and not has_splits:
        return {"": split}
    raise UserError(
        f"there is no folder {root / split} (folders there: {', '.join(folders[:5]) or 'none'}); sort the images into "
        f"{root}/SPLIT/CLASS, or into {root}/CLASS with data.val_fraction above 0 and data.test_splits cleared"
    )


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not is_skipped(entry.name))


def _find_images(root: Path, split_of_folder: dict[str, str | None], usage: Usage) -> list[_Image]:
    """Return the sorted images of all splits, and count all files in `usage`.

    Raises UserError if folders of splits are inside of folders of classes.
    """
    images, elsewhere = [], Counter()
    for path in list_images(root, usage):
        top, _, below = ("", "", path) if "" in split_of_folder else path.partition("/")
        folder, _, file = below.partition("/")
        if not file:
            usage.leave_out("outside every folder of a class", path)
        elif split := split_of_folder[top]:
            images.append(_Image(split, folder, path))
            usage.use(split)
        else:
            elsewhere[top] += 1
        if not top and "/" in file and split_key(inner := file.partition("/")[0]) in STANDARD_SPLITS:
            raise UserError(
                f"{root / folder / inner} has the name of a split, in the folder of a class; sort the images into "
                f"{root}/SPLIT/CLASS, or set data.root to {root / folder}"
            )
    splits = ", ".join(dict.fromkeys(filter(None, split_of_folder.values())))
    for number, (folder, count) in enumerate(elsewhere.items()):
        name = f"'{folder}'" if number < SHOWN_FOLDERS else "other folders"
        usage.leave_out(f"in {name}, which is no folder of the splits {splits}", count=count)
    return sorted(images)


FOLDERS = DataSource(open_folders)
