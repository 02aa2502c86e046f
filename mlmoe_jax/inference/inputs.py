"""The pictures that a user names for prediction: on a command line by `--images`, in Python as values.

`--images` takes any of these, in the order given; a picture that is named twice is there twice:

    a.jpg               a file, whatever its name ends in
    photos              a folder, searched in depth and by name for files that are named like pictures
    "photos/**/*.jpg"   a pattern in quotes: * ? [abc], and ** for folders in depth; every file that it matches
    @list.txt           a list, a path a line; paths in it are relative to the folder of the list
    -                   a list on standard input, its paths relative to the working directory

Hidden files and folders (.name) are left out of folders and patterns. Paths in a list are taken as they stand and not
looked for beforehand, since a list may have millions: a missing one is a picture that cannot be read. A list with NUL
characters in it (`find -print0`) is separated by them instead of by lines.
"""

from __future__ import annotations

import glob
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from etils import epath
from PIL import Image

from mlmoe_jax.data.images import EXIF_ORIENTATION, BadImage, Images, open_image
from mlmoe_jax.data.sources.folders import IMAGE_SUFFIXES
from mlmoe_jax.errors import UserError

ImageLike = str | os.PathLike | bytes | np.ndarray | Image.Image


# ------------------------------------------------------------------------------------------------- from a command line
def find_pictures(given: Sequence[str]) -> list[str]:
    """Return the paths of the pictures that the items of `--images` stand for; UserError where there are none."""
    return [path for item in given for path in _of_item(item)]


def _of_item(item: str) -> list[str]:
    if item == "-":
        return _of_list(sys.stdin.buffer.read(), "", "standard input")
    if item.startswith("@"):
        return _of_list(_list_file(item[1:]), os.path.dirname(item[1:]), f"the list {item[1:]}")
    path = epath.Path(item) if "://" in item else Path(item).expanduser()
    if path.is_dir():
        if not (inside := _search(path)):
            raise UserError(f"folder {item} holds no pictures ({', '.join(IMAGE_SUFFIXES)})")
        return inside
    if "://" in item or os.path.lexists(path):
        return [os.fspath(path)]
    if any(character in item for character in "*?["):
        return _of_pattern(os.fspath(path))
    raise UserError(f"there is no picture or folder {item}")


def _search(folder: Path | epath.Path, above: tuple[str, ...] = ()) -> list[str]:
    """List the pictures below a folder. What is named like a picture is one, even a folder, which cannot be read."""
    real = os.path.realpath(folder)
    if real in above:  # a link that leads back up
        return []
    found = []
    try:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if _is_picture_name(entry.name):
                found.append(os.fspath(entry))
            elif entry.is_dir():
                found += _search(entry, (*above, real))
    except OSError as error:
        raise UserError(f"cannot search folder {folder}: {error.strerror or error}") from error
    return found


def _of_pattern(pattern: str) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True), key=lambda path: path.split(os.sep))
    found = [path for path in matches if _is_picture_name(path) or not os.path.isdir(path)]
    if not found:
        raise UserError(f"no file matches the pattern {pattern}")
    return found


def _is_picture_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _list_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the list of pictures {path}: {error.strerror or error}") from error


def _of_list(content: bytes, folder: str, what: str) -> list[str]:
    """Return the paths of a list, relative to `folder`; bytes that are no UTF-8 come through as in any path."""
    separator = b"\0" if b"\0" in content else b"\n"
    lines = [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(separator)]
    found = [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]
    if not found:
        raise UserError(f"{what} names no pictures; write one path a line")
    return found


# --------------------------------------------------------------------------------------------------------- from Python
class GivenImages(Images):
    """Pictures given as paths, encoded bytes, u8[h,w,3] arrays in RGB or pictures of Pillow's, in any mixture."""

    def __init__(self, given: Sequence[ImageLike]):
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def name(self, row: int) -> str:
        """Return the path of picture `row`, or its number."""
        picture = self.given[row]
        return os.fspath(picture) if isinstance(picture, str | os.PathLike) else f"image {row}"

    def read(self, row: int, at_least: int = 0) -> np.ndarray:
        """Return picture `row` as u8[h,w,3]; BadImage where it cannot be read or is nothing that could be."""
        return np.asarray(self.open(row, at_least))

    def open(self, row: int, at_least: int = 0) -> np.ndarray | Image.Image:
        """Return picture `row` as an array, where it is given as one, or as Pillow's picture."""
        picture, name = self.given[row], self.name(row)
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
                raise BadImage(f"{name} is an array {picture.dtype}{list(picture.shape)} and should be uint8[h,w,3]")
            return picture
        if isinstance(picture, Image.Image):
            picture = _encoded(picture, name)
        elif not isinstance(picture, str | os.PathLike | bytes):
            raise BadImage(f"{name} is a {type(picture).__name__}, no path, bytes, array or picture of Pillow's")
        return open_image(picture, name=name, at_least=at_least)


def _encoded(picture: Image.Image, name: str) -> bytes:
    """Return a picture of Pillow's as a file, so that mode, transparency and EXIF are treated as those of files are."""
    buffer = io.BytesIO()
    try:
        picture.load()  # which turns a TIFF upright
        exif = Image.Exif()
        exif.update({tag: value for tag, value in picture.getexif().items() if tag == EXIF_ORIENTATION})
        in_png = picture.convert("RGB") if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV") else picture
        in_png.save(buffer, "PNG", compress_level=0, exif=exif)
    except Exception as error:  # Pillow's decoders raise many kinds on damaged data
        raise BadImage(f"cannot read {name} as an image: {error or type(error).__name__}") from error
    return buffer.getvalue()
