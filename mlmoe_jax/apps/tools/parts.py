"""A folder of parts: a row for each of millions of images, computed by any number of independent processes.

Part p is a file with the rows of a fixed range of the images, and appears when it is complete. RECORD says what the
parts are made from. The same command computes the parts that are missing. Worker k of n takes the parts p with
p mod n = k, and then the parts that other workers have not written, in random order. It looks for the file of a part
until it has read the images, so a part is computed twice only if two workers compute it at the same time. Both then
write the same bytes, because a batch starts at the first image of a part and has images of this part only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.image_list import find_images, includes, sample_inputs
from mlmoe_jax.apps.tools.part_files import plain, read_names
from mlmoe_jax.apps.tools.part_options import PartOptions
from mlmoe_jax.apps.tools.predict_files import Summary, stop_explained
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.errors import DONE, UserError
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import abbreviate, quantity

RECORD = "_parts.json"  # programs that read a folder as one table leave out names that start with _
_PART = re.compile(r"part-(\d+)\.\w+")
_CHECK_SECONDS = 2.0  # the period in which the file of a part is looked for once


class _WrittenByOther(Exception):
    """Another worker has written the part."""


@dataclass(frozen=True)
class PartSource:
    """A model that computes the rows of parts. A result has the attributes `image` and `error`.

    Attributes:
      task: the name of the progress bar.
      done: what an image with a result is, such as "labeled".
      settings: what the rows depend on beside the images, by name, as JSON.
      decoding: how images are decoded.
      batch_size: returns the batch size for a number of images.
      compute: yields (row, result) of some rows of images, as `Predictor.label_rows`.
      write: writes the results of a part to a file atomically.
      describe: returns the result of an image that was read as it is printed; None prints no results.
      exit_code: the exit code of the command.
    """

    task: str
    done: str
    settings: dict[str, Any]
    decoding: Decoding
    batch_size: Callable[[int], int]
    compute: Callable[..., Iterator[tuple[int, Any]]]
    write: Callable[[epath.Path, Iterable[Any]], None]
    describe: Callable[[Any], str] | None = None
    exit_code: int = DONE


@dataclass(frozen=True)
class PartFolder:
    """A folder of parts.

    Attributes:
      folder: may be in an object store.
      kind: the format of the parts, in PART_FORMATS.
      images: the images of all parts.
      size: the number of images of each part; the last part may have fewer.
      settings: as in PartSource.
    """

    folder: Folder
    kind: str
    images: Images
    size: int
    settings: dict[str, Any]

    @property
    def count(self) -> int:
        return math.ceil(len(self.images) / self.size)

    def path(self, part: int) -> epath.Path:
        return self.folder / f"part-{part:05d}.{self.kind}"

    def rows(self, part: int) -> range:
        return range(part * self.size, min(len(self.images), (part + 1) * self.size))

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """The content of RECORD: what the rows depend on, and a digest of the images of each part."""
        settings = {"part size": self.size, "format": self.kind, **self.settings}
        identities = self.images.identities()
        parts = [digest(itertools.islice(identities, self.size)) for _ in range(self.count)]
        record = {"images": len(self.images), "settings": settings, "parts": parts}
        return json.loads(dump_json(record))  # as it is read back: a tuple becomes a list

    def prepare(self) -> None:
        """Write RECORD to the folder, or compare it with the RECORD that is there.

        The stored one may have fewer images. Raises UserError if it differs in another way, or if there are other files
        in the folder, but no RECORD.
        """
        if not (self.folder / RECORD).exists():
            if names := self._names():
                raise UserError(
                    f"{self.folder} has files of other commands ({abbreviate(names)}); name a new or empty folder"
                )
        else:
            stored = self.folder.read_json(
                RECORD, lambda found: {key: type(value)(found[key]) for key, value in self.record.items()}
            )
            if stored == self.record:
                return
            self._require_extension(**stored)
            if stored["images"] % self.size:  # the last part gets more images
                self.path(len(stored["parts"]) - 1).unlink(missing_ok=True)
        self.folder.write_json(RECORD, self.record)

    def _require_extension(self, images: int, settings: dict[str, Any], parts: list[str]) -> None:
        new = self.record["settings"]
        if others := [name for name in {**new, **settings} if settings.get(name) != new.get(name)]:
            raise UserError(
                f"{self.folder} has parts with another value of {abbreviate(others)}; name another folder, or repeat "
                "the command that wrote it"
            )
        if images > len(self.images):
            raise UserError(
                f"{self.folder} has parts with {images:,} images, but --images has {len(self.images):,}; give the same "
                "images, also with more at the end, or name another folder"
            )
        complete = images // self.size
        known = self.record["parts"][:complete]
        if images % self.size:
            known.append(digest(itertools.islice(self.images.identities(), complete * self.size, images)))
        for part, (old, found) in enumerate(zip(parts, known, strict=False)):
            if old != found:
                end = min(images, (part + 1) * self.size)
                raise UserError(
                    f"images {part * self.size + 1:,} to {end:,} of --images are others than in {self.folder}; give "
                    "the same images, also with more at the end, or name another folder"
                )

    def _names(self) -> list[str]:
        """Return the sorted names of the files in the folder that are not hidden; [] if there is no folder."""
        if not self.folder.path.exists():
            return []
        return sorted(entry.name for entry in self.folder.path.iterdir() if not entry.name.startswith("."))

    def find_parts(self) -> set[int]:
        """Return the parts whose files exist. Raises UserError if there is a part of another command."""
        parts = {name: int(match[1]) for name in self._names() if (match := _PART.fullmatch(name))}
        for name, part in parts.items():
            if part >= self.count or name != self.path(part).name:
                raise UserError(f"{self.folder / name} is a part of another command; remove it")
        return set(parts.values())

    def count_written(self) -> int:
        return sum(1 for name in self._names() if _PART.fullmatch(name))

    def stopped(self) -> str:
        """Return what a KeyboardInterrupt says."""
        written = f"{self.count_written():,} of {quantity(self.count, 'part')} are in {self.folder}"
        return f"stopped; {written}, and the same command continues"

    def list_missing(self, worker: tuple[int, int]) -> list[int]:
        """Return the parts that are missing: first of this worker, and then of others in random order."""
        written = self.find_parts()
        missing = np.random.default_rng().permutation([part for part in range(self.count) if part not in written])
        own = missing % worker[1] == worker[0]
        return [*sorted(missing[own].tolist()), *missing[~own].tolist()]

    def check_files(self, worker: tuple[int, int]) -> None:
        """Raise UserError if a part of this worker has other images. Say how many parts and other files there are."""
        written = self.find_parts()
        for part in written:
            if part % worker[1] == worker[0]:
                self.require_own(part)
        if others := [name for name in self._names() if name != RECORD and not _PART.fullmatch(name)]:
            logging.getLogger(__name__).warning(
                f"{self.folder}: {quantity(len(others), 'file')} of other programs stay: {abbreviate(others)}"
            )
        if written:
            status(f"{len(written):,} of {quantity(self.count, 'part')} are in {self.folder} already")

    def require_own(self, part: int) -> None:
        """Raise UserError unless the file of a part has the names of its images."""
        names = [plain(self.images.name(row)) for row in self.rows(part)]
        if read_names(path := self.path(part)) != names:
            raise UserError(f"{path} is a part of another command, with other images; remove it")

    def write(self, part: int, source: PartSource, results: Iterable[Any]) -> None:
        """Write the file of a part; nothing if the last results are missing because another worker has written it.

        Raises UserError if another command has replaced RECORD since, see `prepare`.
        """
        with contextlib.suppress(_WrittenByOther):
            source.write(self.path(part), self._all_of(results, len(self.rows(part))))

    def _all_of(self, results: Iterable[Any], count: int) -> Iterator[Any]:
        for result in results:
            yield result
            count -= 1
        if count:
            raise _WrittenByOther
        self.prepare()  # after the last row, just before the file appears


def digest(texts: Iterable[str]) -> str:
    """Return a short hash of texts and their order."""
    return hashlib.sha256("\0".join(texts).encode(errors="backslashreplace")).hexdigest()[:16]


@dataclass(frozen=True)
class PartRows(Sequence[int]):
    """The rows of the parts in `order`, padded to `slots` rows each by −1.

    The rows of a part become −1 when its file appears.
    """

    parts: PartFolder
    order: Sequence[int]
    slots: int

    def __len__(self) -> int:
        return len(self.order) * self.slots

    def __getitem__(self, at: int) -> int:
        number, slot = divmod(at, self.slots)
        part = self.order[number]
        rows = self.parts.rows(part)
        return -1 if slot >= len(rows) or self._is_written(part) else rows[slot]

    def _is_written(self, part: int) -> bool:
        return _exists(self.parts.path(part), time.monotonic() // _CHECK_SECONDS)


@functools.lru_cache(16)
def _exists(path: epath.Path, period: float) -> bool:
    """Return whether there is a file. It is looked for once in each period, because a store takes long to answer."""
    return path.exists()


def write_parts(open_source: Callable[[Images], PartSource], options: PartOptions) -> Outcome:
    """Compute the parts that are missing, and write them.

    `open_source` opens the model for the images of `--images`, after they are found.

    Returns:
      The first images to print, and the numbers of images and parts for --json. An image that cannot be read is a row
        with an error, which the exit code does not show.

    Raises:
      UserError: the folder has other parts, or its parts would be images of the next command. Or no image of a sample
        can be read, as when a disk is not mounted.
    """
    folder = Folder(options.output)
    folder.require_creatable()
    found = find_images(options.items, column=options.column, every=options.every)
    source = open_source(found.images)
    parts = PartFolder(folder, options.kind, found.images, options.size, source.settings)
    if not found.are_paths:
        _require_outside(parts, options.items)
    _require_readable(found.images, source.decoding)
    parts.prepare()
    summary = Summary(found.usages, source.describe, source.done)
    with stop_explained(parts.stopped):
        parts.check_files(options.worker)
        _write_missing(parts, source, options.worker, summary)
    outcome = summary.outcome(str(folder), source.exit_code)
    written = {"parts": parts.count, "images_in_parts": len(found.images)}
    sentence = f"{folder} has all {quantity(parts.count, 'part')}, with {quantity(len(found.images), 'image')}"
    shown = [*outcome.parts, sentence] if summary.images else [sentence]
    return replace(outcome, parts=shown, document={**outcome.document, **written})


def _require_outside(parts: PartFolder, items: Sequence[str]) -> None:
    """Raise UserError if the parts would be among the images of `items` next time."""
    for item in items:
        if includes(item, str(parts.path(0))):
            raise UserError(f"the parts in {parts.folder} would be images of --images={item}; name another --output")


def _require_readable(images: Images, decoding: Decoding) -> None:
    """Raise UserError if no image of a sample can be read."""
    tried, errors = sample_inputs(images, decoding)
    if tried == len(errors):
        raise UserError(
            f"none of {quantity(tried, 'image')} of --images that were tried can be read, the first because {errors[0]}"
        )


def _write_missing(parts: PartFolder, source: PartSource, worker: tuple[int, int], summary: Summary) -> None:
    """Write the missing parts, also those that vanish meanwhile. UserError if one vanishes that was tried."""
    tried: set[int] = set()  # so this ends, whatever happens to the files
    while order := [part for part in parts.list_missing(worker) if part not in tried]:
        tried.update(order)
        for part, results in _compute(parts, source, order, worker[1]):
            parts.write(part, source, summary.count_results(results))
    if missing := parts.list_missing(worker):
        raise UserError(
            f"{len(missing):,} of {quantity(parts.count, 'part')} have vanished from {parts.folder}: another program "
            "removes files there; repeat this command without it"
        )
    parts.require_own(parts.count - 1)  # a command with fewer images may have ended in between


def _compute(
    parts: PartFolder, source: PartSource, order: Sequence[int], workers: int
) -> Iterator[tuple[int, Iterator[Any]]]:
    """Yield each part of `order` that is computed, and its results. The progress shows the parts of all workers."""
    longest = min(len(parts.images), parts.size)
    batch = source.batch_size(longest)
    rows = PartRows(parts, order, batch * math.ceil(longest / batch))
    progress = Progress(source.task, math.ceil(len(rows) / batch / workers), batch)
    computed = source.compute(parts.images, rows, batch_size=batch, progress=progress)
    for part, pairs in itertools.groupby(computed, key=lambda pair: pair[0] // parts.size):
        yield part, (result for _, result in pairs)
        progress.note = f"{parts.count_written():,} of {parts.count:,} parts"
