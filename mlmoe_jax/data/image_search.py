"""Find the image files of a folder: which files are images, and the account of those that are left out."""

from __future__ import annotations

import contextlib
import functools
import mimetypes
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path

from PIL import Image

from mlmoe_jax.data.decoding import HEIC, IMAGE_FORMATS, open_metered, readable_formats
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.runtime.files import PathLike, file_sha256, find_file
from mlmoe_jax.runtime.text import compose

# What operating systems, storage devices and Python put into folders, in lower case; names with a dot are hidden.
_SYSTEM_NAMES = frozenset(
    (
        *("__macosx", "@eadir", "#recycle", "@recycle", "#snapshot", "lost+found", "found.000", "$recycle.bin"),
        *("recycler", "recycled", "system volume information", "network trash folder", "temporary items"),
        *("__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    )
)
_HEIC_SUFFIXES = (".heic", ".heics", ".heif", ".heifs", ".hif")  # found even if they cannot be read
_TAIL = 4096  # bytes at the end of a file, in which photographs of equal size differ


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Return the suffixes of image files in lower case: those that Pillow knows for IMAGE_FORMATS, and HEIC."""
    formats = (*IMAGE_FORMATS, "MPO")  # MPO: several JPEGs in a file, as some cameras write; the first one is read
    known = Image.registered_extensions().items()
    return frozenset((*(suffix for suffix, name in known if name in formats), *_HEIC_SUFFIXES))


@functools.cache
def _other_suffixes() -> frozenset[str]:
    return frozenset(mimetypes.MimeTypes().types_map[True]) - image_suffixes()


def is_image(path: PathLike) -> bool:
    """Return whether a local file is an image: by its suffix if the suffix is known, otherwise by its content.

    The known suffixes are `image_suffixes` and those of other types of files. A file with one of them is not opened, so
    a damaged image counts as an image. A file with no suffix or an unknown one is opened, and is an image if its
    content starts as one. TIFF with an unknown suffix is the exception: it is taken for a raw photograph, such as .dng
    or .cr2, which is not an image.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in image_suffixes() or suffix in _other_suffixes():
        return suffix in image_suffixes()
    try:
        with open_metered(path) as file:
            if file.read(12).startswith(HEIC, 4):
                return True
            with Image.open(file, formats=readable_formats()) as image:
                return image.format != "TIFF" or not suffix
    except Image.DecompressionBombError:
        return True
    except Exception:  # Pillow raises many types for other content
        return False


def is_skipped(name: str) -> bool:
    """Return whether files and folders with this name are hidden, or belong to the system."""
    return name.startswith(".") or name.casefold() in _SYSTEM_NAMES


def list_images(
    folder: PathLike, usage: Usage | None = None, without: Collection[str] = (), suffixes: Sequence[str] = ()
) -> list[str]:
    """Return the sorted paths, relative to a folder, of all images, and all files with `suffixes`, at any depth.

    `usage` counts the other files, and what `list_files` counts. `without` is as in `list_files`.
    """
    images, start, usage = [], os.path.join(folder, ""), usage or Usage("", "file")
    for path in list_files(folder, usage, without):
        if path.lower().endswith(tuple(suffixes)) or is_image(start + path):
            images.append(path)
        else:
            usage.leave_out("in no image format", path)
    return sorted(images)


def list_files(folder: PathLike, usage: Usage | None = None, without: Collection[str] = ()) -> list[str]:
    """Return the paths, relative to a folder, of all files at any depth that are not skipped, see `is_skipped`.

    Links are followed. `usage` counts images that are skipped, links to a folder that contains the link, and folders
    that cannot be read. Files and folders directly in `folder` with a name in `without` are neither listed nor counted.
    """
    files: list[str] = []
    _search(os.fspath(folder), "", usage or Usage("", "file"), files, without)
    return files


def _search(folder: str, prefix: str, usage: Usage, files: list[str] | None, without: Collection[str] = ()) -> None:
    """Add the paths of the files in a folder, with `prefix` before each, to `files`.

    If `files` is None, the folder is hidden or of the system, and `usage` counts its images as left out.
    """
    try:
        entries = sorted(os.scandir(folder), key=attrgetter("name"))
    except OSError:
        if files is not None:
            usage.leave_out("in folders that cannot be read", prefix or folder)
        return
    for entry in entries:
        if entry.name in without:
            continue
        path, found = prefix + entry.name, None if is_skipped(entry.name) else files
        if is_folder(entry):
            if entry.is_symlink() and _leads_above(Path(entry.path)):
                usage.leave_out("behind links to a folder above them", path)
            else:
                _search(entry.path, f"{path}/", usage, found)
        elif found is not None:
            found.append(path)
        elif os.path.splitext(path)[1].lower() in image_suffixes():
            usage.leave_out("hidden or in folders of the system", path)


def is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder, or a link to one; False if it cannot be read, as a link to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _leads_above(link: Path) -> bool:
    """Return whether a link leads to a folder above it, or cannot be followed."""
    try:
        return any(link.samefile(above) for above in link.absolute().parents)
    except OSError:
        return True


def find_unlisted(files: Iterable[str]) -> list[str]:
    """Return the sorted paths of images that are not in `files`, but in the folder of one of these local files."""
    listed = {compose(os.path.abspath(file)) for file in files}
    images = []
    for folder in sorted(set(map(os.path.dirname, listed))):
        with contextlib.suppress(OSError), os.scandir(find_file(folder)) as entries:
            images += [
                entry.path
                for entry in entries
                if compose(entry.path) not in listed
                and not is_skipped(entry.name)
                and os.path.isfile(entry.path)
                and is_image(entry.path)
            ]
    return sorted(images)


def find_copies(folder: PathLike, kinds: Mapping[str, Hashable]) -> list[list[str]]:
    """Return the groups of files with equal content whose files are of two or more kinds.

    `kinds` maps the path of each file, relative to the folder, to its kind, such as its class. The files of a group
    have the order of `kinds`. Only files of equal size are read: first their last bytes, and whole only if these agree.
    """
    groups = [list(kinds)]
    for digest in (_size, _hash_tail, file_sha256):
        groups = [part for group in groups for part in _divide(group, folder, kinds, digest)]
    return groups


def _divide(
    names: Sequence[str], folder: PathLike, kinds: Mapping[str, Hashable], digest: Callable[[str], Hashable]
) -> Iterator[list[str]]:
    """Yield the groups of files with an equal digest and several kinds. Files that cannot be read are left out."""
    parts, start = defaultdict(list), os.path.join(folder, "")
    for name in names:
        try:
            parts[digest(start + name)].append(name)
        except OSError:
            continue
    yield from (part for part in parts.values() if len(part) > 1 and len({kinds[name] for name in part}) > 1)


def _size(path: str) -> int | str:
    return os.stat(path).st_size or path  # an empty file is no copy of another


def _hash_tail(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return blake2b(file.read(_TAIL), digest_size=16).digest()
