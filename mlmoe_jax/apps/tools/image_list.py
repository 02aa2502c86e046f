"""The images of `--images`.

`--images` takes any of these, in order; images that are named again are kept, except for labeling tools:

    a.jpg               a file with any suffix, or an address such as gs://bucket/a.jpg
    photos              a folder; all images in it, at any depth, see `image_search.list_images`
    a.mp4               a video, whose frames are the images
    x.parquet           a container, or a folder of containers, see `data.containers.catalog`
    "photos/**/*.jpg"   a quoted pattern: * ? [abc], and ** for nested folders; all files that match
    @list.txt           a list with one path per line, relative to the folder of the list
    -                   a list on standard input, with paths relative to the working directory
    demo:photographs    the photographs that come with scikit-image, if it is installed

The videos in folders and lists are used if the time between frames is given.

Hidden files and folders (.name) are left out of folders and patterns. A warning counts the files that are left out.
Paths in a list and addresses are not checked beforehand, because a list may have millions of paths: a missing file is
an unreadable image. A list stays on disk, see `path_list`.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlmoe_jax.apps.tools.path_list import STANDARD_INPUT, read_path_list
from mlmoe_jax.data.containers.catalog import open_images
from mlmoe_jax.data.containers.video import VIDEOS, is_video, open_video
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.image_search import image_suffixes, list_files, list_images
from mlmoe_jax.data.images import MOST_OPENED, ImageNames, Images, JoinedImages
from mlmoe_jax.data.split_checks import sample_images
from mlmoe_jax.data.usage import Usage, unused_input
from mlmoe_jax.errors import UserError
from mlmoe_jax.inference.inputs import MixedImages
from mlmoe_jax.runtime.files import DEMO, find_file
from mlmoe_jax.runtime.text import quantity, unicode_forms

# Photographs of scikit-image, which also has their licenses.
PHOTOGRAPHS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
MOST_HASHED = 2**22  # images whose names are compared, which takes 64 MiB


class ImageList(NamedTuple):
    """The images, in order, and one account for each folder, pattern or container of what is left out."""

    images: Images
    usages: list[Usage]
    are_paths: bool = True  # and no container


def find_images(
    items: Sequence[str], *, repeats: bool = True, column: str = "", every: Fraction | None = None
) -> ImageList:
    """Return all images that the items of `--images` specify, and log warnings about files that are not used.

    If `repeats`, an image that is named again is kept; otherwise each image is in the list once. `column` is the column
    of images in Parquet files, and `every` the seconds between frames of videos, see `open_images`.
    Raises UserError if an item specifies no image.
    """
    sources, usages = [], []
    for item in items:
        usage = Usage(item, "file")
        source = _images_of_item(item, usage, column, every)
        if not len(source):
            reasons = "".join(f" ({sentence})" for sentence in usage.sentences())
            raise UserError(
                f"--images={item} contains no images{reasons}; give image files, folders with images, quoted patterns, "
                "or @FILE with one path per line"
            )
        usage.use(count=len(source))
        sources.append(source)
        usages.append(usage)
    images: Images = JoinedImages(list(_join_paths(sources)))
    if not repeats:
        images = images.take(_first_rows(images))
    usages.append(Usage("--images", "image", {"": len(images)}, notes=images.frames_note()))
    if repeats:
        usages[-1].notes += _repeats_note(images)
    elif again := sum(map(len, sources)) - len(images):
        usages[-1].leave_out("named again", count=again)
    for sentence in unused_input(usages):
        logging.getLogger(__name__).warning(sentence)
    are_paths = not any(isinstance(source, Images) for source in sources)
    return ImageList(images, [usage for usage in usages if usage.sentences()], are_paths)


def _join_paths(sources: Iterable[Sequence[str] | Images]) -> Iterator[Images]:
    """Yield the images of each source in turn. Paths that follow each other in lists become one source."""
    for is_list, group in itertools.groupby(sources, key=lambda source: isinstance(source, list)):
        if is_list:
            yield MixedImages(list(itertools.chain.from_iterable(group)))
        else:
            yield from (source if isinstance(source, Images) else MixedImages(source) for source in group)


def _first_rows(images: Images) -> np.ndarray:
    """Return the rows i64[n] of the n images whose name no earlier image has."""
    rows: dict[str, int] = {}
    for row, name in enumerate(ImageNames(images)):
        rows.setdefault(name, row)
    return np.fromiter(rows.values(), np.int64, len(rows))


def _repeats_note(images: Images) -> list[str]:
    """Return a sentence about the images that are named again; [] if there is none."""
    if len(images) > MOST_HASHED:
        return [f"names more than {MOST_HASHED:,} images, so images that are named again are not counted"]
    hashes = np.fromiter(map(hash, ImageNames(images)), np.int64, len(images))
    again = len(hashes) - len(np.unique(hashes))
    return [f"names {quantity(again, 'image')} again, with a row for each time"] if again else []


def _images_of_item(item: str, usage: Usage, column: str, every: Fraction | None) -> Sequence[str] | Images:
    """Return the images of a container, or the paths of images. The address of an image is not checked."""
    if item.startswith(DEMO):
        return _photographs(item)
    open_any = partial(open_images, usage=usage, column=column, every=every)
    open_listed = partial(_open_listed_video, usage=usage, every=every)
    if item == STANDARD_INPUT or item.startswith("@"):
        return _open_paths(read_path_list(item), open_listed) if every else read_path_list(item)
    path = os.path.expanduser(item)
    file = find_file(path)
    if not _is_image_address(item) and (images := open_any(file)) is not None:
        return images
    if os.path.isdir(file):
        names = list_images(file, usage, suffixes=VIDEOS if every else ())
        return _open_paths([os.path.join(file, name) for name in names], open_listed)
    if "://" in item or os.path.lexists(file):
        return [path]
    matches = filter(None, map(partial(_match, usage=usage), unicode_forms(path)))
    return _open_paths(next(matches, []), open_any)


def _open_listed_video(path: str, usage: Usage, every: Fraction | None) -> Images | None:
    return open_video(path, usage, every) if is_video(path) else None


def _is_image_address(item: str) -> bool:
    return "://" in item and os.path.splitext(item)[1].lower() in image_suffixes()


def _open_paths(paths: Sequence[str], open_container: Callable[[str], Images | None]) -> Sequence[str] | Images:
    """Return the images of the containers among `paths`, and the other paths; `paths` if none is a container."""
    opened = [open_container(path) for path in paths]
    if all(images is None for images in opened):
        return paths
    sources = ([path] if images is None else images for path, images in zip(paths, opened, strict=True))
    return JoinedImages(list(_join_paths(sources)))


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


def includes(item: str, path: str) -> bool:
    """Return whether an item of `--images` would include a file at `path`, in a folder or by a pattern."""
    names, parts = (
        place.rstrip("/").split("/") if "://" in place else os.path.realpath(os.path.expanduser(place)).split("/")
        for place in (path, item)
    )
    return names[: len(parts)] == parts or _fits(names, parts)


def sample_inputs(images: Images, decoding: Decoding) -> tuple[int, list[str]]:
    """Return `sample_images` of `--images`, which warns if they are nearly black; in containers of the first images."""
    if 0 < images.most_opened < MOST_OPENED:
        images = images.take(np.arange(min(len(images), images.most_opened)))
    return sample_images(images, "--images", decoding)


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
