"""The images of `--images`.

`--images` takes any of these, in order; images that are named again are kept, except for labeling tools:

    a.jpg               a file with any suffix, or an address such as gs://bucket/a.jpg
    photos              a folder; all images in it, at any depth, see `image_search.list_images`
    "photos/**/*.jpg"   a quoted pattern: * ? [abc], and ** for nested folders; all files that match
    @list.txt           a list with one path per line, relative to the folder of the list
    -                   a list on standard input, with paths relative to the working directory
    demo:photographs    the photographs that come with scikit-image, if it is installed

Hidden files and folders (.name) are left out of folders and patterns. A warning counts the files that are left out.
Paths in a list and addresses are not checked beforehand, because a list may have millions of paths: a missing file is
an unreadable image.
"""

from __future__ import annotations

import codecs
import glob
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from mlmoe_jax.data.image_search import list_files, list_images
from mlmoe_jax.data.usage import Usage, unused_input
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.runtime.files import DEMO, MOST_LIST, find_file, read_bytes, read_stream
from mlmoe_jax.runtime.text import quantity, unicode_forms

# Photographs of scikit-image, which also has their licenses.
PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")


class ImageList(NamedTuple):
    """The paths of images, in order, and one account for each folder or pattern of which files are left out."""

    paths: list[str]
    usages: list[Usage]


def find_images(items: Sequence[str], *, repeats: bool = True) -> ImageList:
    """Return all images that the items of `--images` specify, and log warnings about files that are not used.

    If `repeats`, an image that is named again is kept; otherwise each image is in the list once. Raises UserError if an
    item specifies no image.
    """
    paths, usages = [], []
    for item in items:
        usage = Usage(item, "file")
        images = _images_of_item(item, usage)
        if not images:
            reasons = "".join(f" ({sentence})" for sentence in usage.sentences())
            raise UserError(
                f"--images={item} contains no images{reasons}; give image files, folders with images, quoted patterns, "
                "or @FILE with one path per line"
            )
        usage.use(count=len(images))
        paths += images
        usages.append(usage)
    unique = list(dict.fromkeys(paths))
    usages.append(Usage("--images", "image", {"": len(unique)}, notes=MixedImages(unique).frames_note()))
    if again := len(paths) - len(unique):
        if repeats:
            usages[-1].notes.append(f"names {quantity(again, 'image')} again, with a row for each time")
        else:
            usages[-1].leave_out("named again", count=again)
    for sentence in unused_input(usages):
        logging.getLogger(__name__).warning(sentence)
    return ImageList(paths if repeats else unique, [usage for usage in usages if usage.sentences()])


def _images_of_item(item: str, usage: Usage) -> list[str]:
    if item.startswith(DEMO):
        return _photographs(item)
    if item == "-" or item.startswith("@"):
        return _read_list(item)
    if "://" in item:
        return [item]
    path = os.path.expanduser(item)
    file = find_file(path)
    if os.path.isdir(file):
        return [os.path.join(file, name) for name in list_images(file, usage)]
    if os.path.lexists(file):
        return [path]
    return next(filter(None, (_match(form, usage) for form in unicode_forms(path))), [])


def _match(pattern: str, usage: Usage) -> list[str]:
    """Return the sorted files that match a pattern. Folders that match are left out, and counted in `usage`.

    The files below a `**` are listed by `list_files`, because `glob.glob` would follow circular links.
    """
    above, deep, below = f"/{pattern}/".partition("/**/")
    if not deep:
        matches = glob.glob(pattern)
        for folder in filter(os.path.isdir, matches):
            usage.leave_out("for being a folder", folder)
        return sorted(match for match in matches if not os.path.isdir(match))
    parts = ["**", *filter(None, below.split("/"))]
    folders = filter(os.path.isdir, glob.glob(above[1:] or "/")) if above else [""]
    return sorted(
        os.path.join(folder, name)
        for folder in folders
        for name in list_files(folder or ".", usage)
        if _fits(name.split("/"), parts)
    )


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the parts of a path match the parts of a pattern."""
    if not (names and parts):
        return not (names or parts)
    if parts[0] == "**":
        return len(parts) == 1 or any(_fits(names[start:], parts[1:]) for start in range(len(names)))
    return fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _photographs(item: str) -> list[str]:
    spec = importlib.util.find_spec("skimage")  # found without an import, which takes a second
    folders = (spec and spec.submodule_search_locations) or []
    paths = [Path(folder) / "data" / name for folder in folders for name in PHOTOGRAPHS]
    files = [os.fspath(path) for path in paths if path.is_file()]
    if item != f"{DEMO}photographs" or not files:
        raise UserError(
            f"there are no images {item[:100]}: {DEMO}photographs are in scikit-image; `pip install "
            "scikit-image` installs them"
        )
    return files


def _read_list(item: str) -> list[str]:
    """Return the paths in a list `@FILE` or, for `-`, on standard input; invalid UTF-8 is kept as by `os.fsdecode`."""
    try:
        content = read_stream(sys.stdin.buffer, MOST_LIST) if item == "-" else read_bytes(item[1:], MOST_LIST)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the list {item}: {reason_of(error)}") from error
    if b"\0" in content:
        raise UserError(f"the list {item} is not UTF-8; save it as UTF-8, with one path per line")
    lines = map(os.fsdecode, content.removeprefix(codecs.BOM_UTF8).splitlines())
    folder = os.path.dirname(item[1:])
    return [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]
