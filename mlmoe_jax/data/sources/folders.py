"""Your own images sorted into one folder per class: the class is positive, all other labels are negative.

    root/{split}/{class}/…/a.jpg     # one folder per split, such as train, Validation or test_set, see `split_key`
    root/{class}/…/a.jpg             # no folders per split, with data.val_fraction or without another split

A folder of a class may have subfolders. An image whose file is in several classes of a split is one image with all of
these labels, whose id is the first path. Files that are not used are counted, see `image_search.list_images`.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.data.image_search import find_copies, is_folder, is_skipped, list_images
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.names import STANDARD_SPLITS, find_split, split_key
from mlmoe_jax.data.sources.rows import ImageRow, Listing, select_split
from mlmoe_jax.data.sources.source import DataSource, data_folder, named_files, used_splits
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import LeftOut, Usage, unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.text import compose, quantity

SHOWN_FOLDERS = 8  # folders of no split that are counted one by one


def open_folders(data_config: ConfigDict, split: str, classes: Sequence[str] | None = None) -> Split:
    """Open a split of images that are sorted into one folder per class.

    Classes and the images of each class are sorted by name. Ids are paths relative to `data.root`. The account of the
    training split notes the images that are in another split too.

    Raises UserError if the split has no folder or no images, or a folder is not one of the classes.
    """
    root = data_folder(data_config, "the folders of classes")
    split_of_folder = _find_splits(root, split, data_config)
    tops = [folder for folder, name in split_of_folder.items() if name == split]
    if classes is None:
        classes = sorted({compose(name).strip() for top in tops for name in _subfolders(root / top)})
    listing = Listing(", ".join(f"{root / top}" for top in tops), split, root, classes, data_config)
    named, usage = named_files(data_config), listing.usage
    usage.unit = "file"
    rest = _count_rest(root, split_of_folder, named)
    images = {path: compose(folder).strip() for top in tops for folder, path in _find_images(root, top, named, usage)}
    others = []
    if split == data_config.train_split:
        _refuse_wrapper(root, tops, images)
        others = _find_others(root, split, split_of_folder)
    labels = _merge_copies(root, split, images, others, usage)
    usages = (usage, rest) if rest.given else (usage,)
    if not labels:
        raise UserError("; ".join([f"{usage.place} lists no images in folders of classes", *unused_input(usages)]))
    rows = [ImageRow(path, dict.fromkeys(names, POSITIVE)) for path, names in labels.items()]
    return replace(select_split(rows, listing), usage=usages)


def _find_splits(root: Path, split: str, data_config: ConfigDict) -> dict[str, str | None]:
    """Return folder -> its split. The split is None if the config does not use the split of the folder.

    Without folders of splits, the result is {"": split}, where "" stands for `root`. Raises UserError if the split to
    open has no folder.
    """
    folders, splits = _subfolders(root), used_splits(data_config, split)
    found = {folder: find_split(folder, splits) for folder in folders}
    if split in found.values():
        return found
    named = [folder for folder in folders if found[folder] or split_key(folder) in STANDARD_SPLITS]
    alone = data_config.val_fraction or not any((data_config.val_split, *data_config.test_splits))
    if alone and split == data_config.train_split and not named:
        return {"": split}
    rename = f"; rename {named[0]}, which has the name of a split, if it is a class" if alone and named else ""
    raise UserError(
        f"there is no folder {root / split} (folders there: {', '.join(folders[:5]) or 'none'}); sort the images into "
        f"{root}/SPLIT/CLASS, or into {root}/CLASS with data.val_fraction above 0 and data.test_splits cleared{rename}"
    )


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_folder(entry) and not is_skipped(entry.name))


def _count_rest(root: Path, split_of_folder: Mapping[str, str | None], named: Collection[str]) -> Usage:
    """Return the account of files outside the folders of splits, except `named`; empty without folders of splits."""
    used = [folder for folder, split in split_of_folder.items() if split is not None]
    splits = ", ".join(dict.fromkeys(split_of_folder[folder] for folder in used))
    rest = Usage(f"{root} outside the folders of {splits}", "file")
    if "" in split_of_folder:
        return rest
    paths = list_images(root, rest, without={*used, *named})
    counts = Counter(path.partition("/")[0] if "/" in path else "" for path in paths)
    for number, (folder, count) in enumerate(counts.items()):
        name = f"'{folder}'" if number < SHOWN_FOLDERS else "other folders"
        rest.leave_out(f"in {name}" if folder else "in no folder", count=count)
    return rest


def _find_images(root: Path, top: str, named: Collection[str], usage: Usage) -> list[tuple[str, str]]:
    """Return sorted (folder of the class, path relative to `root`) of the images below `top` that are not in `named`.

    Raises UserError if folders of splits are inside of folders of classes.
    """
    images = []
    for below in list_images(root / top, usage, without=named):
        folder, _, file = below.partition("/")
        inner, _, is_deep = file.partition("/")
        if not file:
            usage.leave_out("outside every folder of a class", below)
        elif is_deep and not top and split_key(inner) in STANDARD_SPLITS:
            raise UserError(
                f"{root / folder / inner} has the name of a split, in the folder of a class; sort the images into "
                f"{root}/SPLIT/CLASS, or set data.root to {root / folder}"
            )
        else:
            images.append((folder, f"{top}/{below}" if top else below))
    return sorted(images)


def _refuse_wrapper(root: Path, tops: Sequence[str], images: Collection[str]) -> None:
    """Raise UserError if the only class is in fact a folder around the folders of classes, as in many archives."""
    parents = set(map(os.path.dirname, images))
    around = os.path.commonpath(parents or {""})
    if around not in ("", *tops, *parents):
        raise UserError(
            f"all images are in folders in {root / around}, so there is one class only; if the classes are in there, "
            f"move them to {root / tops[0]}, or set data.root"
        )


def _find_others(root: Path, split: str, split_of_folder: Mapping[str, str | None]) -> list[str]:
    """Return the paths of the images of all other splits that are used. Other files are not counted here."""
    return [
        f"{folder}/{path}"
        for folder, name in split_of_folder.items()
        if name not in (None, split)
        for path in list_images(root / folder)
    ]


def _merge_copies(
    root: Path, split: str, label_of_image: Mapping[str, str], others: Iterable[str], usage: Usage
) -> dict[str, list[str]]:
    """Return image -> its labels. Files with equal content in several classes become one image, the first file.

    `usage` counts the further files as merged and has a note about them. Another note is about images whose content is
    also in `others`, the files of other splits.
    """
    labels = {path: [label] for path, label in label_of_image.items()}
    merged, shared = LeftOut(), LeftOut()
    for paths in find_copies(root, {**label_of_image, **dict.fromkeys(others)}):
        first, *copies = own = [path for path in paths if path in labels]
        names = sorted({label_of_image[path] for path in own})
        if len(own) < len(paths):
            shared.add(f"{paths[-1]} as {first}")
        if len(names) > 1:
            labels[first] = names
            for path in copies:
                merged.add(f"{path} as {first}")
                del labels[path]
    if merged.count:
        usage.merged[split] = merged.count
        usage.notes.append(f"has {quantity(merged.count, 'file')} again in another class{merged}, which is one image")
    if shared.count:
        images = quantity(shared.count, "image")
        usage.notes.append(f"shares {images} with other splits{shared}; remove them from all splits but one")
    return labels


FOLDERS = DataSource(open_folders, reads_classes=True)
