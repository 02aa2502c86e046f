"""The images to label: named by `--images` on the command line, or given as values in Python.

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
import io
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from etils import epath
from ml_collections import ConfigDict
from PIL import Image

from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import EXIF_ORIENTATION, STRICT, BadImage, Decoding, Images, open_image
from mlmoe_jax.data.sources.folders import IMAGE_SUFFIXES
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.demo import demo_images, is_demo
from mlmoe_jax.runtime.files import MOST_LIST, read_bytes, read_stream

ImageLike = str | os.PathLike | bytes | np.ndarray | Image.Image


# ------------------------------------------------------------------------------------------------- from a command line
def find_images(given: Sequence[str]) -> list[str]:
    """Return the paths of the images that the items of `--images` name; UserError if an item names none."""
    return [path for item in given for path in _of_item(item)]


def _of_item(item: str) -> list[str]:
    if not item:  # the working directory for Path, and perhaps an unset variable of a shell
        raise UserError("--images has an empty name; give image files or folders")
    if is_demo(item):
        return demo_images(item)
    if item == "-" and sys.stdin is None:
        raise UserError("cannot read the list of images on standard input: it is closed")
    if item == "-":
        with _explained("the list of images on standard input"):
            return _of_list(read_stream(sys.stdin.buffer, MOST_LIST), "", "standard input")
    if item.startswith("@"):
        with _explained(f"the list of images {item[1:]}"):
            return _of_list(read_bytes(item[1:], MOST_LIST), os.path.dirname(item[1:]), f"the list {item[1:]}")
    with _explained(item):
        path = epath.Path(item) if "://" in item else Path(item).expanduser()
        is_folder = path.is_dir()
    if is_folder:
        if not (inside := _search(path)):
            raise UserError(f"folder {item} contains no images ({', '.join(IMAGE_SUFFIXES)})")
        return inside
    if "://" in item or os.path.lexists(path):
        return [os.fspath(path)]
    if any(character in item for character in "*?["):
        return _of_pattern(os.fspath(path))
    raise UserError(f"image or folder {item} does not exist")


def _search(folder: Path | epath.Path, above: tuple[str, ...] = ()) -> list[str]:
    """List the images below a folder; a folder with the suffix of an image counts as an image that cannot be read."""
    real = os.path.realpath(folder)
    if real in above:  # a link to a parent folder
        return []
    found = []
    with _explained(f"folder {folder}", "search"):
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if _is_image_name(entry.name):
                found.append(os.fspath(entry))
            elif entry.is_dir():
                found += _search(entry, (*above, real))
    return found


def _of_pattern(pattern: str) -> list[str]:
    matches = sorted(dict.fromkeys(_matches(pattern)), key=lambda path: path.split(os.sep))
    found = [path for path in matches if _is_image_name(path) or not os.path.isdir(path)]
    if not found:
        raise UserError(f"no file matches the pattern {pattern}")
    return found


def _matches(pattern: str) -> list[str]:
    """Return the paths that match a pattern; a `**` follows links, but none to a folder above, as glob's does."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    before, after = os.sep.join(parts[:at]), parts[at + 1 :] or ["*"]
    if at:
        before = before or os.sep
    starts = glob.glob(before) if before else [""]
    folders = [folder for start in starts for folder in _folders(start)]
    return [path for folder in folders for path in _matches(os.path.join(glob.escape(folder), *after))]


def _folders(folder: str, above: Collection[str] | None = None) -> Iterator[str]:
    """Yield a folder and all below it, except hidden ones and links to a folder above."""
    real = os.path.realpath(folder or os.curdir)
    above = {str(parent) for parent in Path(real).parents} if above is None else above
    if real in above or not os.path.isdir(real):
        return
    yield folder
    with _explained(f"folder {folder or os.curdir}", "search"), os.scandir(folder or os.curdir) as entries:
        below = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    for name in sorted(below):
        yield from _folders(os.path.join(folder, name), {*above, real})


def _is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


@contextlib.contextmanager
def _explained(what: str, do: str = "read") -> Iterator[None]:
    """Turn the errors of a place that cannot be read into a UserError: also of a user who does not exist, as in ~who,
    and of an address whose library is missing."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"cannot {do} {what[:200]}: there are no addresses of this kind") from error
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot {do} {what[:200]}: {reason.partition('. ')[0].rstrip('.')}") from error


def _of_list(content: bytes, folder: str, what: str) -> list[str]:
    """Return the paths of a list, relative to `folder`; bytes that are not UTF-8 are kept, as in all paths."""
    content = content.removeprefix(codecs.BOM_UTF8)
    separator = b"\0" if b"\0" in content else b"\n"
    lines = [os.fsdecode(line.removesuffix(b"\r")) for line in content.split(separator)]
    found = [line if "://" in line else os.path.join(folder, line) for line in lines if line.strip()]
    if not found:
        raise UserError(f"{what} contains no images; write one path per line")
    return found


# --------------------------------------------------------------------------------------------------------- from Python
def is_one_image(given: ImageLike | Sequence[ImageLike]) -> bool:
    """Return whether `given` is one image: a path, bytes, an array of at most three axes, or a Pillow image."""
    if isinstance(given, np.ndarray):
        return given.ndim <= 3 and given.dtype != object
    return isinstance(given, str | os.PathLike | bytes | Image.Image)


def read_images(images: ImageLike | Sequence[ImageLike], config: ConfigDict) -> np.ndarray:
    """Return images as the model of a config gets them in evaluation, u8[B,H,W,3], before they are normalized.

    images: one image or a sequence: paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, of any size. As in
    prediction, the orientation in EXIF data is applied.

    Raises UserError (BadImage) for an image that cannot be read, and for an empty sequence.
    """
    given = GivenImages(cast("Sequence[ImageLike]", [images] if is_one_image(images) else images))
    if not len(given):
        raise UserError("read_images got no images; give at least one")
    data_config = config.data.copy_and_resolve_references()
    data_config.exif = "apply"
    reader = ImageReader.of(data_config)
    return np.stack([reader(given, row) for row in range(len(given))])


class GivenImages(Images):
    """Images given as paths, encoded bytes, u8[h,w,3] RGB arrays or Pillow images, in any mixture."""

    def __init__(self, given: Sequence[ImageLike]):
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def name(self, row: int) -> str:
        """Return the path of image `row`, or its number."""
        image = self.given[row]
        return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {row}"

    def read(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        """Return image `row` as u8[h,w,3]; BadImage if it cannot be read or is of another type."""
        return np.asarray(self.open(row, decoding))

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        """Return image `row` as an array if it is given as one, else as a Pillow image."""
        image, name = self.given[row], self.name(row)
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise BadImage(f"{name} is an array {image.dtype}{list(image.shape)} and should be uint8[h,w,3]")
            return image
        if isinstance(image, Image.Image):
            image = _encoded(image, name)
        elif not isinstance(image, str | os.PathLike | bytes):
            raise BadImage(f"{name} is a {type(image).__name__}, not a path, bytes, an array or a Pillow image")
        return open_image(image, name=name, decoding=decoding)


def _encoded(image: Image.Image, name: str) -> bytes:
    """Encode a Pillow image, so that mode, transparency and EXIF are handled as in image files."""
    buffer = io.BytesIO()
    try:
        image.load()  # also applies the orientation of a TIFF
        exif = Image.Exif()
        exif.update({tag: value for tag, value in image.getexif().items() if tag == EXIF_ORIENTATION})
        _in_png(image).save(buffer, "PNG", compress_level=0, exif=exif)
    except Exception as error:  # Pillow's decoders raise many types for damaged data
        raise BadImage(f"cannot read {name} as an image: {error or type(error).__name__}") from error
    return buffer.getvalue()


def _in_png(image: Image.Image) -> Image.Image:
    """Return an image in a mode that Pillow writes as PNG."""
    if image.mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() >= 2**16:
            raise ValueError("its pixels are not from 0 to 65,535")
        return Image.fromarray(values.astype(np.uint16))
    rgb = dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB")
    mode = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA", **rgb}.get(image.mode)
    return image.convert(mode) if mode else image
