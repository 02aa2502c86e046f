"""The images that `--images` names.

`--images` takes any of these, in the given order; duplicates are kept:

    a.jpg               a file with any suffix
    photos              a folder, searched recursively in order of name for files with the suffix of an image
    "photos/**/*.jpg"   a quoted pattern: * ? [abc], and ** for nested folders; all files that match
    @list.txt           a list with one path per line, relative to the folder of the list
    -                   a list on standard input, with paths relative to the working directory
    demo:photographs    the photographs that come with scikit-image, if it is installed

Hidden files and folders (.name) are left out of folders and patterns. Paths in a list are not checked beforehand,
because a list may have millions: a missing file is an image that cannot be read. A list that contains NUL characters
(`find -print0`) is separated by them instead of by lines.
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
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import DEMO, MOST_LIST, read_bytes, read_stream

# Photographs of scikit-image, which also has the license of each.
PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")


def find_images(given: Sequence[str]) -> list[str]:
    """Return the paths of the images that the items of `--images` name; UserError if an item names none."""
    return [path for item in given for path in _of_item(item)]


def _of_item(item: str) -> list[str]:
    if not item:  # the working directory for Path, and perhaps an unset variable of a shell
        raise UserError("--images has an empty name; give image files or folders")
    if item.startswith(DEMO):
        return _photographs(item)
    if item == "-" or item.startswith("@"):
        return _of_list(item)
    with _explained("read", item):
        path = epath.Path(item) if "://" in item else Path(item).expanduser()
        is_folder = path.is_dir()
    if is_folder:
        if not (images := _search(path)):
            raise UserError(f"folder {item} contains no images ({', '.join(IMAGE_SUFFIXES)})")
        return images
    if "://" in item or os.path.lexists(path):
        return [os.fspath(path)]
    if not any(character in item for character in "*?["):
        raise UserError(f"image or folder {item} does not exist")
    matches = sorted(dict.fromkeys(_matches(os.fspath(path))), key=lambda match: match.split(os.sep))
    if not (files := [match for match in matches if _is_image_name(match) or not os.path.isdir(match)]):
        raise UserError(f"no file matches the pattern {item}")
    return files


def _photographs(item: str) -> list[str]:
    spec = importlib.util.find_spec("skimage")  # which is not imported, because this would take a second
    folders = (spec and spec.submodule_search_locations) or []
    paths = [Path(folder) / "data" / name for folder in folders for name in PHOTOGRAPHS]
    if item != f"{DEMO}photographs" or not (files := [os.fspath(path) for path in paths if path.is_file()]):
        raise UserError(
            f"there are no images {item[:100]}: {DEMO}photographs are those of scikit-image, and `pip install "
            "scikit-image` installs it"
        )
    return files


def _of_list(item: str) -> list[str]:
    """Return the paths of a list; bytes that are not UTF-8 are preserved, as in all paths."""
    name = "standard input" if item == "-" else f"the list {item[1:]}"
    with _explained("read", f"the list of images {'on standard input' if item == '-' else item[1:]}"):
        if item == "-" and sys.stdin is None:
            raise ValueError("it is closed")
        content = read_stream(sys.stdin.buffer, MOST_LIST) if item == "-" else read_bytes(item[1:], MOST_LIST)
    content = content.removeprefix(codecs.BOM_UTF8)
    separator, folder = b"\0" if b"\0" in content else b"\n", os.path.dirname(item[1:])
    lines = [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(separator)]
    if not (paths := [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]):
        raise UserError(f"{name} contains no images; write one path per line")
    return paths


def _search(folder: Path | epath.Path, above: tuple[str, ...] = ()) -> list[str]:
    """List the images below a folder; a folder with the suffix of an image counts as an image that cannot be read."""
    real = os.path.realpath(folder)
    if real in above:  # a link to a parent folder
        return []
    images = []
    with _explained("search", f"folder {folder}"):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if _is_image_name(entry.name):
                images.append(os.fspath(entry))
            elif entry.is_dir():
                images += _search(entry, (*above, real))
    return images


def _matches(pattern: str) -> list[str]:
    """Return the paths that match a pattern; unlike glob's, a `**` follows no links to a folder above."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    before, after = os.sep.join(parts[:at]), parts[at + 1 :] or ["*"]
    starts = glob.glob(before or os.sep) if at else [""]
    folders = [folder for start in starts for folder in _folders(start)]
    return [path for folder in folders for path in _matches(os.path.join(glob.escape(folder), *after))]


def _folders(folder: str, above: Collection[str] | None = None) -> Iterator[str]:
    """Yield a folder and all below it, except hidden ones and links to a folder above."""
    real = os.path.realpath(folder or os.curdir)
    above = {str(parent) for parent in Path(real).parents} if above is None else above
    if real in above or not os.path.isdir(real):
        return
    yield folder
    with _explained("search", f"folder {folder or os.curdir}"), os.scandir(folder or os.curdir) as entries:
        below = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for name in sorted(below):
        yield from _folders(os.path.join(folder, name), {*above, real})


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


@contextlib.contextmanager
def _explained(verb: str, place: str) -> Iterator[None]:
    """Turn the errors of a place that cannot be read into a UserError, such as an unknown ~user or kind of address."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, ImportError, KeyError) as error:
        kind = "there are no addresses of this kind" if isinstance(error, KeyError) else ""
        reason = kind or getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot {verb} {place[:200]}: {reason.partition('. ')[0].rstrip('.')}") from error
