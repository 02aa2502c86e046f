"""The images of a split: in memory, rendered, in files, or as bytes of files."""

from __future__ import annotations

import abc
import hashlib
import io
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from mlmoe_jax.data.decoding import (
    ONE_FRAME,
    STRICT,
    BadImage,
    Decoding,
    has_frames,
    open_image,
    read_file,
    to_pixels,
)
from mlmoe_jax.data.usage import SHOWN_EXAMPLES
from mlmoe_jax.runtime.files import PathLike, find_file
from mlmoe_jax.runtime.text import abbreviate, quantity

MOST_OPENED, MOST_FAR = 20_000, 100  # files that are opened to see whether they have several frames


def describe_frames(names: Sequence[str]) -> str:
    """Return a sentence for `Usage.notes` about the images `names`, which have several frames."""
    count = quantity(len(names), "image")
    return f"has {count} with several frames, of which the first is used: {abbreviate(names, SHOWN_EXAMPLES)}"


class Images(abc.ABC):
    """The images of a split, by row. A subclass defines `__len__` and `open`. It can be pickled for worker processes.

    Attributes:
      are_decoded: whether reading an image includes decoding or rendering, which takes about a millisecond of CPU time.
      most_opened: the number of files that `frames_note` may open; 0 if none has several frames. It is small if to open
        an image reads much.
      of_videos: whether some are frames of videos.
    """

    are_decoded = False
    most_opened = 0
    of_videos = False

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray | Image.Image:
        """Return image `row` as `read` does, or as a Pillow image if that saves a copy."""

    def read(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        """Return image `row` as a read-only RGB array u8[h,w,3], as stored, or smaller if `decoding` allows it.

        Raises BadImage if the image cannot be read.
        """
        image = self.open(row, decoding)
        return to_pixels(image) if isinstance(image, Image.Image) else image

    def encoded(self, row: int) -> bytes:
        """Return image `row` as the bytes of an image file: the stored file if there is one, otherwise a PNG."""
        buffer = io.BytesIO()
        Image.fromarray(self.read(row)).save(buffer, "PNG")
        return buffer.getvalue()

    def problem(self, row: int, decoding: Decoding = STRICT) -> str:
        """Return the reason why image `row` cannot be read; "" if it can be read."""
        try:
            self.open(row, decoding)
        except BadImage as error:
            return str(error)
        return ""

    def name(self, row: int) -> str:
        """Return the name of image `row` for errors. It is the path of the file if the image is stored as a file."""
        return f"image {row}"

    def list_names(self) -> Iterator[str]:
        """Yield the name of each image, which is faster than to ask for each row."""
        return map(self.name, range(len(self)))

    def identities(self) -> Iterator[str]:
        """Yield the name of each image, and what tells it from an image of this name in another version of its file.

        No file is opened.
        """
        return self.list_names()

    def line(self, row: int) -> tuple[str, int] | None:
        """Return (name of the table, line number from 1) of image `row`; None if no table lists the image."""
        return None

    def missing(self) -> np.ndarray:
        """Return the rows i64[n] of the n images that have no file. No file is opened."""
        return np.zeros(0, np.int64)

    def has_frames(self, row: int) -> bool:
        """Return whether the file of image `row` has several frames, see `decoding.has_frames`."""
        return False

    def frames_note(self) -> list[str]:
        """Return sentences for `Usage.notes` about the images with several frames; [] if there is none.

        At most `most_opened` files are opened for this, or MOST_FAR in an object store, where each is read whole.
        """
        if not self.most_opened:
            return []
        candidates = (row for row, name in enumerate(self.list_names()) if not name.lower().endswith(ONE_FRAME))
        rows = list(islice(candidates, 1))
        rows += islice(candidates, (MOST_FAR if rows and "://" in self.name(rows[0]) else self.most_opened) - 1)
        with ThreadPoolExecutor() as pool:  # the files may be far away
            found = list(pool.map(self.has_frames, rows))
        several = dict.fromkeys(self.name(row) for row, has_frames in zip(rows, found, strict=True) if has_frames)
        notes = [describe_frames(list(several))] if several else []
        if unopened := sum(1 for _ in candidates):
            opened = f"{quantity(len(rows), 'file')} of {len(rows) + unopened:,} opened to see"
            notes.append(f"may have further images with several frames: {opened}")
        return notes

    def warn_of_frames(self) -> None:
        """Log a warning about the images with several frames."""
        for note in self.frames_note():
            logging.getLogger(__name__).warning(f"the input {note}")

    def digest(self, row: int) -> str:
        """Return a hash of the content of image `row`; BadImage if it cannot be read."""
        return hashlib.sha256(self.read(row).tobytes()).hexdigest()

    def stamp(self, row: int) -> str:
        """Return a text that identifies the version of image `row`: it changes if the image changes."""
        return self.digest(row)

    def take(self, rows: np.ndarray) -> Images:
        """Return the images with the row numbers `rows`, i64[n], in that order."""
        return _Subset(self, rows)


def _ask(method: str) -> Callable[..., Any]:
    """Return a method that asks the source of an image."""

    def ask(self: _Views, row: int, *options: Any) -> Any:
        images, place = self.find(row)
        return getattr(images, method)(place, *options)

    return ask


class _Views(Images):
    """Images of other sources, `parts`. A subclass defines `__len__` and `find`."""

    def __init__(self, parts: Sequence[Images]):
        self.parts = parts
        self.are_decoded = any(part.are_decoded for part in parts)
        self.of_videos = any(part.of_videos for part in parts)
        self.most_opened = min((part.most_opened for part in parts if part.most_opened), default=0)

    @abc.abstractmethod
    def find(self, row: int) -> tuple[Images, int]:
        """Return the source of image `row`, and its row there."""

    open, encoded, name, has_frames = map(_ask, ("open", "encoded", "name", "has_frames"))
    digest, stamp = map(_ask, ("digest", "stamp"))


class _Subset(_Views):
    """The images of `whole` with the row numbers `rows`, i64[n]."""

    def __init__(self, whole: Images, rows: np.ndarray):
        super().__init__([whole])
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, row: int) -> tuple[Images, int]:
        return self.parts[0], int(self.rows[row])


class InParts:
    """A mixin for images in parts. `ends` has the number of images up to the end of each part."""

    ends: Sequence[int]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, row: int) -> tuple[int, int]:
        """Return the part that has image `row`, and its number in the part; IndexError if there is no such image."""
        row = range(len(self))[row]
        part = bisect_right(self.ends, row)
        return part, row - (int(self.ends[part - 1]) if part else 0)


class JoinedImages(InParts, _Views):
    """The images of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Images]):
        super().__init__(parts)
        self.ends = list(accumulate(map(len, parts)))

    def find(self, row: int) -> tuple[Images, int]:
        part, position = self.locate(row)
        return self.parts[part], position

    def list_names(self) -> Iterator[str]:
        return chain.from_iterable(part.list_names() for part in self.parts)

    def identities(self) -> Iterator[str]:
        return chain.from_iterable(part.identities() for part in self.parts)


@dataclass(frozen=True, eq=False)
class ImageNames(Sequence[str]):
    """The names of images, each of which is made when it is used."""

    images: Images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> str:
        return self.images.name(range(len(self.images))[row])

    def __iter__(self) -> Iterator[str]:
        return self.images.list_names()


@dataclass(eq=False)
class ArrayImages(Images):
    """Images of equal size in memory, stored as u8[N,h,w,3]."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        return self.array[row]


@dataclass(eq=False)
class RenderedImages(Images):
    """`count` images, each of which the function `render` returns for its row when it is read."""

    count: int
    render: Callable[[int], np.ndarray]
    are_decoded: bool = True

    def __len__(self) -> int:
        return self.count

    def open(self, row: int, decoding: Decoding = STRICT) -> np.ndarray:
        return self.render(row)


class EncodedImages(Images):
    """Images stored as bytes of image files. A subclass defines `__len__`, `encoded` and, if useful, `name`."""

    are_decoded = True
    most_opened = MOST_OPENED

    def has_frames(self, row: int) -> bool:
        try:
            return has_frames(self.encoded(row))
        except BadImage:
            return False

    def open(self, row: int, decoding: Decoding = STRICT) -> Image.Image:
        return open_image(self.encoded(row), name=self.name(row), decoding=decoding)

    def digest(self, row: int) -> str:
        return hashlib.sha256(self.encoded(row)).hexdigest()

    def stamp(self, row: int) -> str:
        try:
            return self.digest(row)
        except BadImage:
            return "missing"


@dataclass(eq=False)
class ImageFiles(EncodedImages):
    """Files in a folder, which are opened when an image is read.

    `table` is the name of the table that lists the files; "" if there is none. `lines` has the line number of each file
    in the table; () if it has none.
    """

    folder: PathLike
    names: Sequence[str]
    table: str = ""
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return f"{self.folder}/{self.names[row]}"

    def line(self, row: int) -> tuple[str, int] | None:
        return (self.table, self.lines[row]) if self.lines else None

    def has_frames(self, row: int) -> bool:
        return has_frames(self.name(row))

    def encoded(self, row: int) -> bytes:
        return read_file(self.name(row))

    def take(self, rows: np.ndarray) -> Images:
        lines = [self.lines[row] for row in rows] if self.lines else ()
        return replace(self, names=[self.names[row] for row in rows], lines=lines)

    def missing(self) -> np.ndarray:
        if "://" in os.fspath(self.folder):
            return super().missing()  # a store is not listed
        files = [os.path.split(name) for name in self.names]
        existing = {}
        for parent in {parent for parent, _ in files}:  # each folder is listed once
            folder = os.path.join(self.folder, parent)
            existing[parent] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        absent = [row for row, (parent, name) in enumerate(files) if name not in existing[parent]]
        return np.array([row for row in absent if not os.path.lexists(find_file(self.name(row)))], np.int64)

    def stamp(self, row: int) -> str:
        return stamp_file(self.name(row))


def stamp_file(path: str) -> str:
    """Return `stamp` of an image that is stored as a file, which is not read."""
    try:
        if "://" in path:
            remote = epath.Path(path).stat()
            return f"{remote.length} {remote.mtime}"
        local = os.stat(find_file(path))
    except OSError:
        return "missing"
    return f"{local.st_size} {local.st_mtime_ns}"
