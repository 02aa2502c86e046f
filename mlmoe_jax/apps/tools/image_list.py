"""The images of `--images`.

`--images` takes any of these, in order; duplicates are kept, except for labeling tools:

    a.jpg               a file with any suffix, or an address such as gs://bucket/a.jpg
    photos              a folder; all files in it with an image suffix, recursively, see `folders.image_names`
    "photos/**/*.jpg"   a quoted pattern: * ? [abc], and ** for nested folders; all files that match
    @list.txt           a list with one path per line, relative to the folder of the list
    -                   a list on standard input, with paths relative to the working directory
    demo:photographs    the photographs that come with scikit-image, if it is installed

Hidden files and folders (.name) are left out of folders and patterns. Paths in a list and addresses are not checked
beforehand, because a list may have millions of paths: a missing file is an unreadable image.
"""

from __future__ import annotations

import codecs
import glob
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mlmoe_jax.data.sources.folders import IMAGE_SUFFIXES, image_names
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import DEMO, MOST_LIST, read_bytes, read_stream

# Photographs of scikit-image, which also has their licenses.
PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")


def find_images(items: Sequence[str]) -> list[str]:
    """Return the paths of all images that the items of `--images` specify, in order.

    Args:
      items: files, folders, patterns and lists, see the docstring of this module.

    Raises:
      UserError: an item specifies no image.
    """
    paths = []
    for item in items:
        images = _images_of_item(item)
        if not images:
            suffixes = ", ".join(IMAGE_SUFFIXES)
            raise UserError(
                f"--images={item} contains no images; give image files, folders with images ({suffixes}), quoted "
                "patterns, or @FILE with one path per line"
            )
        paths += images
    return paths


def _images_of_item(item: str) -> list[str]:
    if item.startswith(DEMO):
        return _photographs(item)
    if item == "-" or item.startswith("@"):
        return _read_list(item)
    if "://" in item:
        return [item]
    path = os.path.expanduser(item)
    if os.path.isdir(path):
        return [os.path.join(path, name) for name in image_names(Path(path))]
    if os.path.lexists(path):
        return [path]
    return sorted(match for match in set(glob.glob(path, recursive=True)) if not os.path.isdir(match))


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
    """Return the paths in the list of images `@FILE` or, for `-`, in the list on standard input.

    Bytes that are not valid UTF-8 are preserved, as in `os.fsdecode`.
    """
    try:
        content = read_stream(sys.stdin.buffer, MOST_LIST) if item == "-" else read_bytes(item[1:], MOST_LIST)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the list {item}: {reason_of(error)}") from error
    lines = map(os.fsdecode, content.removeprefix(codecs.BOM_UTF8).splitlines())
    folder = os.path.dirname(item[1:])
    return [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]
