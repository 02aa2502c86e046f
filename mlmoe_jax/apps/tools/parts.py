"""`mlmoe predict --output=FOLDER/`: label a corpus in parts, by any number of independent processes.

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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import numpy as np
from etils import epath

from mlmoe_jax.apps.tools.image_list import find_images
from mlmoe_jax.apps.tools.part_files import plain, read_names, write_part
from mlmoe_jax.apps.tools.part_options import PART_SIZE
from mlmoe_jax.apps.tools.predict_files import ResultRows, Summary
from mlmoe_jax.config.table import KEYS, keys_read
from mlmoe_jax.data.decoding import Decoding
from mlmoe_jax.data.images import Images
from mlmoe_jax.data.split_checks import sample_images
from mlmoe_jax.errors import DONE, OUTDATED, UserError
from mlmoe_jax.inference.predictor import LabeledImage, Predictor
from mlmoe_jax.models.params import fingerprint
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.progress import Progress, status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.text import abbreviate, quantity
from mlmoe_jax.runtime.version import __version__

RECORD = "_labels.json"  # programs that read a folder as one table leave out names that start with _
_PART = re.compile(r"part-(\d+)\.\w+")
_CHECK_SECONDS = 2.0  # between two checks whether the file of a part exists


class _WrittenByOther(Exception):
    """Another worker has written the part."""


@dataclass(frozen=True)
class PartFolder:
    """A folder of parts.

    Attributes:
      folder: may be in an object store.
      kind: the format of the parts, in PART_FORMATS.
      images: the images of all parts.
      size: the number of images of each part; the last part may have fewer.
    """

    folder: Folder
    kind: str
    images: Images
    size: int

    @property
    def count(self) -> int:
        return math.ceil(len(self.images) / self.size)

    def path(self, part: int) -> epath.Path:
        return self.folder / f"part-{part:05d}.{self.kind}"

    def rows(self, part: int) -> range:
        return range(part * self.size, min(len(self.images), (part + 1) * self.size))

    def digest(self, rows: range) -> str:
        """Return a hash of the names of the images `rows`."""
        return _digest(self.images.name(row) for row in rows)

    def record(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the content of RECORD: what the rows depend on (`settings`), and a digest of the names per part."""
        settings = {"part size": self.size, "format": self.kind, **settings}
        parts = [self.digest(self.rows(part)) for part in range(self.count)]
        record = {"images": len(self.images), "settings": settings, "parts": parts}
        return json.loads(dump_json(record))  # as it is read back: a tuple becomes a list

    def prepare(self, record: dict[str, Any]) -> None:
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
                RECORD, lambda found: {key: type(value)(found[key]) for key, value in record.items()}
            )
            if stored == record:
                return
            self._require_extension(stored, record)
            if stored["images"] % self.size:  # the last part gets more images
                self.path(len(stored["parts"]) - 1).unlink(missing_ok=True)
        self.folder.write_json(RECORD, record)

    def _require_extension(self, stored: dict[str, Any], record: dict[str, Any]) -> None:
        old, new = stored["settings"], record["settings"]
        if others := [name for name in {**new, **old} if old.get(name) != new.get(name)]:
            raise UserError(
                f"{self.folder} has labels with another value of {', '.join(others)}; name another folder, or repeat "
                "the command that wrote it"
            )
        if stored["images"] > len(self.images):
            raise UserError(
                f"{self.folder} has labels of {stored['images']:,} images, but --images has {len(self.images):,}; give "
                "the same images, also with more at the end, or name another folder"
            )
        for part, digest in enumerate(stored["parts"]):
            rows = range(part * self.size, min(stored["images"], (part + 1) * self.size))
            if self.digest(rows) != digest:
                raise UserError(
                    f"images {rows.start + 1:,} to {rows.stop:,} of --images are not those that {self.folder} has "
                    "labels of; give the same images, also with more at the end, or name another folder"
                )

    def _names(self) -> list[str]:
        """Return the sorted names of the files in the folder that are not hidden; [] if there is no folder."""
        if not self.folder.path.exists():
            return []
        return sorted(entry.name for entry in self.folder.path.iterdir() if not entry.name.startswith("."))

    def find_parts(self) -> set[int]:
        """Return the parts whose files exist.

        Logs a warning about files that are no parts. Raises UserError if there is a part of another command.
        """
        parts = {name: int(match[1]) for name in self._names() if (match := _PART.fullmatch(name))}
        for name, part in parts.items():
            if part >= self.count or name != self.path(part).name:
                raise UserError(f"{self.folder / name} is a part of another command; remove it")
        if others := [name for name in self._names() if name not in {*parts, RECORD}]:
            logging.getLogger(__name__).warning(
                f"{self.folder}: {quantity(len(others), 'file')} of other programs stay: {abbreviate(others)}"
            )
        return set(parts.values())

    def count_written(self) -> int:
        return sum(1 for name in self._names() if _PART.fullmatch(name))

    def require_own(self, part: int) -> None:
        """Raise UserError unless the file of a part has the names of its images."""
        if _digest(read_names(path := self.path(part))) != self.digest(self.rows(part)):
            raise UserError(f"{path} is a part of another command, with other images; remove it")

    def write(self, part: int, rows: ResultRows, results: Iterable[LabeledImage]) -> None:
        """Write the file of a part; nothing if the last results are missing because another worker has written it.

        Raises UserError if a later command has given the last part more images.
        """
        count = self.folder.read_json(RECORD, lambda record: int(record["images"]))
        if count != len(self.images):
            raise UserError(f"another command labels {count:,} images into {self.folder} now; repeat that command")
        with contextlib.suppress(_WrittenByOther):
            write_part(self.path(part), rows, _all_of(results, len(self.rows(part))))


def _all_of(results: Iterable[LabeledImage], count: int) -> Iterator[LabeledImage]:
    for result in results:
        yield result
        count -= 1
    if count:
        raise _WrittenByOther


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(map(plain, names)).encode()).hexdigest()[:16]


@dataclass
class PartRows(Sequence[int]):
    """The rows of the parts in `order`, padded to `slots` rows each by −1.

    The rows of a part become −1 when its file appears.
    """

    parts: PartFolder
    order: Sequence[int]
    slots: int
    checks: dict[int, tuple[float, bool]] = field(default_factory=dict)  # part -> time, and if it was there

    def __len__(self) -> int:
        return len(self.order) * self.slots

    def __getitem__(self, at: int) -> int:
        number, slot = divmod(at, self.slots)
        part = self.order[number]
        rows = self.parts.rows(part)
        return -1 if slot >= len(rows) or self._is_written(part) else rows[slot]

    def _is_written(self, part: int) -> bool:
        checked, written = self.checks.get(part, (-math.inf, False))
        if not written and time.monotonic() - checked > _CHECK_SECONDS:
            written = self.parts.path(part).exists()
            self.checks[part] = time.monotonic(), written
        return written


def describe_settings(predictor: Predictor, top_k: int | None, gates: bool) -> dict[str, Any]:
    """Return what the rows depend on beside the images, as JSON. With equal settings, equal devices give equal rows."""
    run = predictor.run
    calibration, preprocess = run.scores.calibration, run.preprocess
    keys = [key for stage in ("image", "score") for key in keys_read(stage) if KEYS[key].on_resume != "free"]
    return {
        "version": __version__,
        "weights": fingerprint({**run.values, **run.frozen}),
        "model": _digest([run.config.model.to_json()]),
        "preprocessing": [preprocess.image_size, *map(float, (*preprocess.mean, *preprocess.std))],
        "label names": list(predictor.names),
        "--rename and --leave-out": _digest(map(str, predictor.output.sources)),
        "thresholds": _digest(map(str, predictor.thresholds)),
        "calibration": _digest(map(str, np.ravel([calibration.scale, calibration.offset]))),
        "--top-k": top_k,
        "--gates": gates,
        **{key: functools.reduce(getattr, key.split("."), run.config) for key in keys},
    }


def label_parts(
    open_predictor: Callable[[], Predictor],
    items: Sequence[str],
    output: str,
    kind: str,
    *,
    size: int = PART_SIZE,
    worker: tuple[int, int] = (0, 1),
    batch_size: int | None = None,
    top_k: int | None = None,
    gates: bool = False,
    column: str = "",
    every: Fraction | None = None,
) -> Outcome:
    """Label images, and write their rows to a folder of parts.

    Args:
      output: the folder, which may be in an object store.
      kind: the format of the parts, in PART_FORMATS.
      size: the number of images of a part.
      worker: the index of this process among all processes of this command, and their number.
      items, batch_size, top_k, gates, column, every: as in `predict_files`.

    Returns:
      The labels of the first images to print, and the numbers of images and parts for --json. An image that cannot be
        read is a row with an error, which the exit code does not show.
    """
    folder = Folder(output)
    folder.require_creatable()
    found = find_images(items, column=column, every=every)
    predictor = open_predictor()
    attributes = [item.name for item in predictor.tree.attributes]
    rows = ResultRows(predictor.names, top_k, of_videos=found.images.of_videos, attributes=attributes)
    _require_parts_possible(predictor, rows, kind, gates=gates)
    sample_images(found.images, "--images", Decoding.from_config(predictor.run.config.data))
    parts = PartFolder(folder, kind, found.images, size)
    parts.prepare(parts.record(describe_settings(predictor, top_k, gates)))
    run = _PartRun(parts, rows, worker)
    summary = Summary(found.usages)
    with run.stops_explained():
        for part, results in run.label(predictor, batch_size, gates):
            parts.write(part, rows, summary.count_results(results))
            run.report()
    outcome = summary.outcome(str(folder), OUTDATED if predictor.run.outdated else DONE)
    written = {"parts": parts.count, "images_in_parts": len(found.images)}
    sentence = f"{folder} has all {quantity(parts.count, 'part')}, with {quantity(len(found.images), 'image')}"
    shown = [*outcome.parts, sentence] if summary.images else [sentence]
    return replace(outcome, parts=shown, document={**outcome.document, **written})


def _require_parts_possible(predictor: Predictor, rows: ResultRows, kind: str, *, gates: bool) -> None:
    """Raise UserError if the options do not fit together, or the labels depend on all images."""
    if predictor.ranked:
        raise UserError(
            "an untrained model compares all images to assign labels, which parts cannot; set a threshold, as with "
            "--config.eval.threshold=0.1, or write one file, --output=FILE.csv"
        )
    predictor.check_options(rows.top_k, gates)
    if gates and kind != "jsonl":
        raise UserError("--gates needs JSON lines; add --format=jsonl")
    rows.require_columns(kind)


class _PartRun:
    """The work of one process on a folder of parts."""

    def __init__(self, parts: PartFolder, rows: ResultRows, worker: tuple[int, int]):
        self.parts, self.top_k, self.workers = parts, rows.top_k, worker[1]
        written = parts.find_parts()
        for part in written:
            if part % worker[1] == worker[0]:
                parts.require_own(part)
        missing = np.random.default_rng().permutation([part for part in range(parts.count) if part not in written])
        own = missing % worker[1] == worker[0]
        self.order = [*sorted(missing[own].tolist()), *missing[~own].tolist()]
        self.first, self.started = len(written), time.monotonic()
        self.progress: Progress | None = None
        if written:
            status(f"{len(written):,} of {quantity(parts.count, 'part')} are in {parts.folder} already")

    def label(
        self, predictor: Predictor, batch_size: int | None, gates: bool
    ) -> Iterator[tuple[int, Iterator[LabeledImage]]]:
        """Yield each part that is computed, and its results."""
        if not self.order:
            return
        longest = min(len(self.parts.images), self.parts.size)
        batch = predictor.even_batch(longest, batch_size)
        rows = PartRows(self.parts, self.order, batch * math.ceil(longest / batch))
        self.progress = Progress("predict", math.ceil(len(rows) / batch / self.workers), batch)
        labeled = predictor.label_rows(
            self.parts.images, rows, batch_size=batch, top_k=self.top_k, gates=gates, progress=self.progress
        )
        for part, pairs in itertools.groupby(labeled, key=lambda pair: pair[0] // self.parts.size):
            yield part, (result for _, result in pairs)

    def report(self) -> None:
        """Show in the progress how many parts all workers have written, and how long they still need."""
        written, count = self.parts.count_written(), self.parts.count
        seconds = (time.monotonic() - self.started) / max(1, written - self.first) * (count - written)
        self.progress.note = f"{written:,} of {count:,} parts, {timedelta(seconds=round(seconds))} left for all workers"

    @contextlib.contextmanager
    def stops_explained(self) -> Iterator[None]:
        """Say in a KeyboardInterrupt that the same command continues."""
        try:
            yield
        except KeyboardInterrupt as error:
            parts = self.parts
            raise KeyboardInterrupt(
                f"stopped; {parts.count_written():,} of {quantity(parts.count, 'part')} are in {parts.folder}, and the "
                "same command continues"
            ) from error
