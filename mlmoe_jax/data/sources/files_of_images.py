"""Folders with a file of labels per image: its images are found, and labels are added to its files.

The file of an image is in the folder of the labels, or else beside the image.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlmoe_jax.data.image_search import is_image, list_files
from mlmoe_jax.data.sources.labeling_formats import LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import Listing
from mlmoe_jax.data.sources.source import named_files
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import find_file, read_bytes
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import compose, quantity


class TagFile(NamedTuple):
    """The file with the labels of an image.

    Attributes:
      name: its path, relative to the folder that is written.
      found: the existing files of the image. The first is changed, or copied if it is beside the image only.
      image: the absolute path of the image.
    """

    name: str
    found: list[str]
    image: str


# (path of an image, whether another image differs only in its suffix) -> possible paths of its file, a new one first
Spell = Callable[[str, bool], Sequence[str]]
Change = Callable[[TagFile, Sequence[str]], bytes]  # (file, labels) -> its content with these labels


class TagFiles:
    """The files with the labels of the images of `file`, in the folder `file.path`."""

    def __init__(self, file: LabelFile, spell: Spell, change: Change):
        self.folder, self._names, self._spell, self._change = Folder(file.path), file.names, spell, change
        self._images = {image: os.path.abspath(os.path.join(file.folder, image)) for image in file.images}
        self._stems = Counter(os.path.splitext(image)[0] for image in self._images.values())
        self._output = self._parent = os.path.abspath(file.path)
        if not all(Path(image).is_relative_to(self._output) for image in self._images.values()):
            self._parent = os.path.abspath(file.folder)
            if any(os.path.isabs(image) or ".." in Path(image).parts for image in file.images):
                self._parent = os.path.commonpath(map(os.path.dirname, self._images.values()))

    def find(self, image: str) -> TagFile:
        """Return the file of an element of `file.images`."""
        whole = self._images[image]
        name = os.path.relpath(whole, self._parent)
        is_shared = self._stems[os.path.splitext(whole)[0]] > 1
        places = (os.path.join(self._output, name), whole)
        found = existing_files(path for place in places for path in self._spell(place, is_shared))
        file = os.path.basename(found[0] if found else self._spell(name, is_shared)[0])
        return TagFile(os.path.join(os.path.dirname(name), file), found, whole)

    def require(self, separator: str) -> None:
        """Raise UserError if the files cannot hold the labels, or the folder or an existing file cannot be changed."""
        if bad := next((name for name in self._names if separator in name or name != name.strip()), None):
            raise UserError(f"files of tags cannot hold the label {bad!r}: {separator} and spaces end tags; rename it")
        if not self.folder.is_local:
            raise UserError(f"--output={self.folder} is no local folder, which files of single images need")
        self.folder.require_creatable()
        for file in map(self.find, self._images):
            if file.found:
                self._change(file, [])

    def write(self, entries: Iterable[LabelEntry]) -> str:
        """Add labels to the files, and return a sentence for the user, see `Format.write`."""
        unchanged = 0
        for entry in entries:
            if entry.labels is None:
                continue
            file = self.find(entry.image)
            content, path = partial(self._change, file, list(entry.labels)), self.folder.inside(file.name)
            if path.exists() and content() == read_bytes(path):
                unchanged += 1
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.folder.update(file.name, content)
        notes = []
        if self._parent != self._output:
            notes.append(f"copy its content over {self._parent} to put each file beside its image")
        if unchanged:
            notes.append(f"{quantity(unchanged, 'file')} had all labels already")
        return "; ".join(notes)


def existing_files(paths: Iterable[str]) -> list[str]:
    """Return the paths at which there are files or links, once each."""
    return list(filter(os.path.lexists, dict.fromkeys(map(find_file, paths))))


def list_own_images(given: Listing, names: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the sorted images, and count files that are neither images nor among the `names` of the file of one.

    Files that the config names are skipped.
    """
    path, folder, usage = given.path, given.folder, given.usage
    without = named_files(given.config)
    usage.unit = "file"
    files = list_files(folder, usage, without)
    images = sorted(file for file in files if is_image(folder / file))
    labels = [] if path.samefile(folder) else list_files(path, usage, without)
    known = {compose(name) for image in images for name in (image, *names(image))}
    for file in dict.fromkeys((*files, *labels)):
        if compose(file) not in known:
            usage.leave_out("without an image", file)
    return images
