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
import io
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
    """Return the paths of the images of all items of `--images`, only `once` each; UserError if an item has none."""
    paths = [path for item in items for path in _expand(item)]
    return list(dict.fromkeys(paths)) if once else paths


def _expand(item: str) -> list[str]:
    if not item:  # the working directory for Path, and perhaps an unset variable of a shell
        raise UserError("--images has an empty name; give image files or folders")
    if item.startswith(DEMO):
        return _photographs(item)
    if item == "-" or item.startswith("@"):
        return _read_list(item)
    with _explained(item):
        path = epath.Path(item) if "://" in item else Path(item).expanduser()
        is_folder = path.is_dir()
    if is_folder:
        if not (images := [os.fspath(entry) for entry in _below(path) if _is_image_name(entry.name)]):
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
    spec = importlib.util.find_spec("skimage")  # found without an import, which takes a second
    folders = (spec and spec.submodule_search_locations) or []
    paths = [Path(folder) / "data" / name for folder in folders for name in PHOTOGRAPHS]
    if item != f"{DEMO}photographs" or not (files := [os.fspath(path) for path in paths if path.is_file()]):
        raise UserError(
            f"there are no images {item[:100]}: {DEMO}photographs are in scikit-image; `pip install "
            "scikit-image` installs them"
        )
    return files


def _read_list(item: str) -> list[str]:
    """Return the paths of a list; invalid UTF-8 is preserved, as in all paths."""
    name = "standard input" if item == "-" else f"the list {item[1:]}"
    with _explained(name):
        stdin = sys.stdin.buffer if sys.stdin else io.BytesIO()  # None if it is closed
        content = read_stream(stdin, MOST_LIST) if item == "-" else read_bytes(item[1:], MOST_LIST)
    content = content.removeprefix(codecs.BOM_UTF8)
    separator, folder = b"\0" if b"\0" in content else b"\n", os.path.dirname(item[1:])
    lines = [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(separator)]
    if not (paths := [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]):
        raise UserError(f"{name} contains no images; write one path per line")
    return paths


def _below(folder: Path | epath.Path, above: Collection[Path] | None = None) -> Iterator[Path | epath.Path]:
    """Yield all entries below a folder in order of name, except hidden ones; links to parent folders are not followed.

    A folder with the suffix of an image counts as an image that cannot be read.
    """
    real = Path(os.path.realpath(folder))
    above = {real, *(real.parents if above is None else above)}
    with _explained(f"folder {folder}"):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            is_folder = not _is_image_name(entry.name) and entry.is_dir()
            if entry.name.startswith(".") or (is_folder and Path(os.path.realpath(entry)) in above):
                continue
            yield entry
            if is_folder:
                yield from _below(entry, above)


def _matches(pattern: str) -> list[str]:
    """Return the paths that match a pattern; unlike in glob, `**` follows no links to a folder above."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    before, after = os.sep.join(parts[:at]), parts[at + 1 :] or ["*"]
    folders = glob.glob(f"{before}{os.sep}") if at else [""]
    folders += [os.fspath(entry) for start in folders for entry in _below(Path(start)) if entry.is_dir()]
    return [path for folder in folders for path in _matches(os.path.join(glob.escape(folder), *after))]


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
