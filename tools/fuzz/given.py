"""Tables and folders of images as users have them, with the meaning of each image.

A draft begins as plain input, which is used completely. Then it gets oddities (oddities.py), each with the images that
it touches and the words by which a sentence about it is recognized.
"""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from PIL import Image

LABELS = ("sea", "sand", "Événement", "sun set")  # composed (NFC), as each class should be
SPLITS = ("train", "val", "test")
TABLES = ("csv", "wide", "jsonl")
LISTS = (*TABLES, "coco_json")  # kinds with a file that lists the images
KINDS = (*LISTS, "folders", "sidecar", "listing")

# Keys of the config. "plain" trains on all rows and evaluates nothing else, as the shipped config does.
SETTINGS = {
    "plain": {"val_split": "", "test_splits": ()},
    "held out": {"val_split": "val", "val_fraction": 0.25, "test_splits": ()},
    "splits": {"val_split": "val", "test_splits": ("test",)},
}


class Raw(str):
    """Text that a table contains as it is, without quotes around it."""


@dataclass
class Meaning:
    """What an image means.

    Attributes:
      splits: the splits to which it may belong; empty if no split of the config can be meant.
      labels: its possible labels, each a pair of sets: positive and unknown labels.
    """

    splits: set[str]
    labels: list[tuple[frozenset[str], frozenset[str]]]


@dataclass
class Oddity:
    """A part of the input that is not plain.

    Attributes:
      name: a description.
      words: a regular expression for a sentence about the oddity, in any case. "" means that the input has one meaning,
        which has to be used.
      images: the numbers of the images that may be left out, or have other labels, if this is said.
      files: the number of further files or rows without a meaning, which are left out.
      must_say: whether `files` has to be said.
      classes: further classes that are acceptable if they are said.
      counts: further numbers by which the sentence may count, such as lines instead of images.
      by_check: whether it is enough that `mlmoe data` says it.
    """

    name: str
    words: str = ""
    images: set[int] = field(default_factory=set)
    files: int = 0
    must_say: bool = True
    classes: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    by_check: bool = False


@dataclass
class Entry:
    """An image as the input lists it.

    Attributes:
      number: number of the image, which is its color.
      file: path of the file below the root.
      path: path as it is written in a table.
      labels: names of the positive labels.
      split: name of the split as it is written; None = not written.
      cell: value of the cell or key of labels; None = the labels in the usual form.
      note: cell of a column that is not used.
    """

    number: int
    file: str
    path: str
    labels: list[str]
    split: str | None
    cell: object = None
    note: str = "ok"


@dataclass
class Draft:
    """Input in the making.

    Attributes:
      random: source of all choices.
      kind: one of KINDS.
      setting: a key of SETTINGS.
      entries: the images.
      meanings: number of an image -> its meaning.
      oddities: what is not plain.
      files: further files: path below the root -> content.
      header: column -> its written name.
      flat: for folders, whether the classes lie in the root, without folders of splits.
      unlisted: numbers of the images of which no file is written.
      lines: further lines of the table, in its middle.
      most: the largest number of an image without an entry.
    """

    random: Random
    kind: str
    setting: str
    entries: list[Entry] = field(default_factory=list)
    meanings: dict[int, Meaning] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=lambda: {"image": "image", "labels": "labels", "split": "split"})
    flat: bool = False
    unlisted: set[int] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    most: int = 40

    @property
    def opened(self) -> set[str]:
        """Names of the splits that are opened."""
        return {"plain": {"train"}, "held out": {"train", "val"}, "splits": set(SPLITS)}[self.setting]

    @property
    def has_splits(self) -> bool:
        return any(entry.split is not None for entry in self.entries)

    def some(self, least: int = 1, most: int = 3) -> list[Entry]:
        """Return a few entries of the training split, so that other splits stay complete."""
        training = [entry for entry in self.entries if entry.split in (None, "train")] or self.entries
        return self.random.sample(training, min(len(training), self.random.randint(least, most)))

    def numbers(self) -> set[int]:
        return {entry.number for entry in self.entries}

    def further(self) -> int:
        """Return the number of an image that has no entry, and that was not returned before."""
        self.most += 1
        return self.most


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# -------------------------------------------------------------------------------------------------------------- images
def color(number: int) -> tuple[int, int, int]:
    """Return the color of an image; images of different numbers differ by at least 60 in a channel."""
    return tuple(30 + 60 * ((number + 1) // 4**place % 4) for place in range(3))


def number_of(pixels) -> int:
    """Return the number of an image from its pixels u8[H,W,3]."""
    mean = pixels.reshape(-1, 3).mean(0)
    return sum(round((value - 30) / 60) * 4**place for place, value in enumerate(mean)) - 1


def picture(number: int, file: str = ".png") -> bytes:
    """Return the content of an image file, a JPEG if the name of the file says so, otherwise a PNG."""
    jpeg = file.lower().endswith((".jpg", ".jpeg", ".jpe", ".mpo", ".jfif"))
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), color(number)).save(buffer, "JPEG" if jpeg else "PNG", quality=95)
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------------------- drafts
def plain(random: Random, kind: str) -> Draft:
    """Return input without oddities: every split has every label, and some images have none."""
    setting = random.choice(list(SETTINGS))
    draft = Draft(random, kind, setting)
    draft.flat = kind == "folders" and setting != "splits"
    with_splits = setting == "splits" or (kind != "folders" and random.random() < 0.3)
    if kind in ("coco_json", "sidecar", "listing"):  # a file or folder without splits
        draft.setting, with_splits = random.choice(("plain", "held out")), False
    suffix = random.choice((".png", ".jpg"))
    number = 0
    for split in SPLITS if with_splits else ("train",):
        for k in range(4 if split != "train" else random.randint(12, 14) if draft.setting == "held out" else 6):
            labels = [LABELS[k % 4]]
            if kind != "folders":
                labels = [] if k == 4 and kind != "coco_json" else [*labels, *random.sample(LABELS, 1)]
            file = f"{random.choice(('', 'b/', 'é/'))}{number}{suffix}"
            if kind == "folders":
                file = f"{'' if draft.flat else split + '/'}{labels[0]}/{random.choice(('', '2020/'))}{number}{suffix}"
            labels = sorted(set(labels))
            draft.entries.append(Entry(number, file, file, labels, split if with_splits else None))
            draft.meanings[number] = Meaning({split}, [(frozenset(labels), frozenset())])
            number += 1
    if draft.has_splits:
        _explain_unopened(draft)
    return draft


def _explain_unopened(draft: Draft) -> None:
    """Add an oddity per split that the config does not open, or does not read because it holds out images."""
    used = set(SPLITS) if draft.setting == "splits" else {"train"}
    for split in set(SPLITS) - used:
        numbers = {entry.number for entry in draft.entries if entry.split == split}
        draft.oddities.append(Oddity(f"split {split} is not opened", rf"\b{split}", numbers))
        for number in numbers:
            draft.meanings[number].splits = set()


def write(draft: Draft, root: Path) -> dict[str, object]:
    """Write the input to a folder; return the keys of `config.data`."""
    for entry in draft.entries:
        if entry.number not in draft.unlisted:
            _put(root, entry.file, picture(entry.number, entry.file))
    for path, content in draft.files.items():
        _put(root, path, content)
    keys: dict[str, object] = {"name": "csv" if draft.kind == "wide" else draft.kind, "root": str(root), "images": ""}
    keys |= SETTINGS[draft.setting] | {"bad_images": "skip"}
    if draft.kind in WRITERS:
        keys["table"] = "labels.csv"
        keys["label_column"] = "" if draft.kind == "wide" else "labels"
        lines = WRITERS[draft.kind](draft)
        lines[3:3] = draft.lines
        _put(root, keys["table"], ("\n".join(lines).replace("ROOT", str(root)) + "\n").encode())
    elif draft.kind == "sidecar":
        keys["table"] = "."
        for entry in draft.entries:
            if entry.cell is not None:
                _put(root, str(Path(entry.file).with_suffix(".txt")), entry.cell.encode())
            elif entry.labels is not None:
                _put(root, str(Path(entry.file).with_suffix(".txt")), ", ".join(entry.labels).encode())
    return keys


def _put(root: Path, path: str, content: bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


def _cell(text: str) -> str:
    if isinstance(text, Raw) or not any(mark in text for mark in (",", '"', "\n", "\r")):
        return text
    return '"' + text.replace('"', '""') + '"'


def _csv_lines(draft: Draft, names: Iterable[str], cells: Callable[[Entry], list[str]]) -> list[str]:
    header = [draft.header["image"], *names, *([draft.header["split"]] if draft.has_splits else []), "note"]
    if draft.kind == "wide":
        header.pop()
    lines = [",".join(header)]
    for entry in draft.entries:
        row = [entry.path, *cells(entry), *([entry.split or ""] if draft.has_splits else []), entry.note]
        lines.append(",".join(map(_cell, row[: len(header)])))
    return lines


def _csv(draft: Draft) -> list[str]:
    def cells(entry: Entry) -> list[str]:
        return [";".join(entry.labels) if entry.cell is None else entry.cell]

    return _csv_lines(draft, [draft.header["labels"]], cells)


def _wide(draft: Draft) -> list[str]:
    def cells(entry: Entry) -> list[str]:
        return [str(int(name in entry.labels)) for name in LABELS]

    return _csv_lines(draft, [draft.header.get(name, name) for name in LABELS], cells)


def _jsonl(draft: Draft) -> list[str]:
    lines = []
    for entry in draft.entries:
        record = {draft.header["image"]: entry.path, draft.header["labels"]: entry.labels, "note": entry.note}
        if entry.split is not None:
            record[draft.header["split"]] = entry.split
        lines.append(json.dumps(record, ensure_ascii=draft.random.random() < 0.5))
    return lines


def _coco(draft: Draft) -> list[str]:
    names = [draft.header.get(name, name) for name in LABELS]
    document = {
        "images": [{"id": entry.number, "file_name": entry.path} for entry in draft.entries],
        "annotations": [
            {"id": n, "image_id": entry.number, "category_id": LABELS.index(name) + 1}
            for n, (entry, name) in enumerate((entry, name) for entry in draft.entries for name in entry.labels)
        ],
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(names)],
    }
    return [json.dumps(document)]


WRITERS = {"csv": _csv, "wide": _wide, "jsonl": _jsonl, "coco_json": _coco}
