"""The images of `--images`.

`--images` takes any of these, in order; duplicates are kept, except for labeling tools:

    a.jpg               a file with any suffix
    photos              a folder, searched recursively in order of name for files with the suffix of an image
    "photos/**/*.jpg"   a quoted pattern: * ? [abc], and ** for nested folders; all files that match
    @list.txt           a list with one path per line, relative to the folder of the list
    -                   a list on standard input, with paths relative to the working directory
    demo:photographs    the photographs that come with scikit-image, if it is installed

Hidden files and folders (.name) are left out of folders and patterns. Paths in a list are not checked beforehand,
because a list may have millions of paths: a missing file is an unreadable image. A list that contains NUL characters
(`find -print0`) is separated by NUL characters instead of lines.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from etils import epath

from mlmoe_jax.data.sources.folders import IMAGE_SUFFIXES
from mlmoe_jax.errors import UserError, reason_of
from mlmoe_jax.runtime.files import DEMO, MOST_LIST, read_bytes, read_stream

# Photographs of scikit-image, which also has their licenses.
PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")


def find_images(items: Sequence[str], once: bool = False) -> list[str]:
    """Return the paths of the images that `--images` names.

    Args:
      items: the items of `--images`.
      once: leave out repeated images.

    Raises:
      UserError: an item has no images.
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
    return list(dict.fromkeys(paths)) if once else paths


def _images_of_item(item: str) -> list[str]:
    if not item:  # the working directory for Path, and perhaps an unset variable of a shell
        return []
    if item.startswith(DEMO):
        return _photographs(item)
    if item == "-" or item.startswith("@"):
        return _read_list(item)
    with _explained(item):
        path = epath.Path(item) if "://" in item else Path(item).expanduser()
        is_folder = path.is_dir()
    if is_folder:
        return [os.fspath(entry) for entry in _entries(path) if _is_image_name(entry.name)]
    if "://" in item or os.path.lexists(path):
        return [os.fspath(path)]
    if not any(character in item for character in "*?["):
        raise UserError(f"image or folder {item} does not exist")
    return _files_of_pattern(os.fspath(path))


def _files_of_pattern(pattern: str) -> list[str]:
    matches = sorted(set(_matches(pattern)), key=lambda match: match.split(os.sep))
    return [match for match in matches if _is_image_name(match) or not os.path.isdir(match)]


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
    """Return the paths of the list `@FILE` or `-`; invalid UTF-8 is preserved, as in all paths."""
    name = "standard input" if item == "-" else f"the list {item[1:]}"
    with _explained(name):
        content = _read_standard_input() if item == "-" else read_bytes(item[1:], MOST_LIST)
    content = content.removeprefix(codecs.BOM_UTF8)
    separator = b"\0" if b"\0" in content else b"\n"
    lines = [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(separator)]
    folder = os.path.dirname(item[1:])
    return [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]


def _read_standard_input() -> bytes:
    return read_stream(sys.stdin.buffer, MOST_LIST) if sys.stdin else b""  # None if it is closed


def _entries(folder: Path | epath.Path, parents: Collection[Path] | None = None) -> Iterator[Path | epath.Path]:
    """Yield all entries at any depth below a folder in order of name, without hidden ones.

    Links to a folder above are not followed. A folder with the suffix of an image counts as an image that cannot be
    read.

    Args:
      folder: the folder.
      parents: the folders above, without links; by default those of the path.
    """
    real = Path(os.path.realpath(folder))
    parents = {real, *(real.parents if parents is None else parents)}
    with _explained(f"folder {folder}"):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            is_folder = not _is_image_name(entry.name) and entry.is_dir()
            is_cycle = is_folder and Path(os.path.realpath(entry)) in parents
            if entry.name.startswith(".") or is_cycle:
                continue
            yield entry
            if is_folder:
                yield from _entries(entry, parents)


def _matches(pattern: str) -> list[str]:
    """Return the paths that match a pattern. Unlike in `glob`, `**` follows no links to a folder above."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    tops = glob.glob(os.sep.join(parts[:at]) + os.sep) if at else [""]
    folders = [os.fspath(entry) for top in tops for entry in _entries(Path(top)) if entry.is_dir()]
    below = parts[at + 1 :] or ["*"]
    return [path for folder in [*tops, *folders] for path in _matches(os.path.join(glob.escape(folder), *below))]


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


@contextlib.contextmanager
def _explained(place: str) -> Iterator[None]:
    """Turn the errors of an unreadable place into a UserError, such as an unknown ~user or kind of address."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, ImportError, KeyError) as error:
        reason = "there are no addresses of this kind" if isinstance(error, KeyError) else reason_of(error)
        raise UserError(f"cannot read {place[:200]}: {reason}") from error
