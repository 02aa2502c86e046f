"""A text file of tags per image, as the taggers and trainers of kohya and the booru sites write them.

    photos/beach/001.jpg
    photos/beach/001.txt       # sea, sand

Files of YOLO, with the class number and four or more other numbers of a box or polygon per line, are also read. The
class number, from 0, is the position of the name in the file `data.classes`. An empty file means no labels.

Labels are added to the files that exist, in the output or beside the images, after their tags. No tag is repeated.

`wd_tagger` is such a folder with the list of all tags that the taggers of SmilingWolf have, selected_tags.csv with the
columns tag_id, name, category and count. In its text files a tag may be written with spaces for _ and with \\( and \\).
"""

import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.files_of_images import TagFile, TagFiles, list_own_images
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import ImageRow, LabelRows, Listing
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, damage_explained, find_file, read_bytes, read_text
from mlmoe_jax.runtime.formats import read_rows
from mlmoe_jax.runtime.text import compose

TAGS = "selected_tags.csv"
MOST_TAGS = MIB  # bytes of a text file
_BOX = re.compile(  # a line of YOLO, DOTA, KITTI or ICDAR, but not a line of tags that are small numbers
    r"(?=.*(\s|\d\.\d|\d{3}))[^\s,]+((\s+|,(?=\S))[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?){4,}([\s,]\S.*)?", re.IGNORECASE
)
_SHORTEST = 3  # in tags with at most this many letters, such as ^_^, the taggers keep the _


def _read(given: Listing, *, listed: bool) -> LabelRows:
    names = tuple(_read_tags(given.path / TAGS)) if listed else None
    name_of_spelling = {spelling: name for name in reversed(names or ()) for spelling in _spellings(name)}
    name_of_spelling |= {name: name for name in names or ()}
    classes = given.classes if given.config.classes else ()
    name_of_number = {str(number): name for number, name in enumerate(classes)}
    images = list_own_images(given, lambda image: (TAGS, f"{os.path.splitext(image)[0]}.txt"))
    return (_row(given.path, image, name_of_spelling, name_of_number) for image in images), names


def _row(folder: Path, image: str, name_of_spelling: dict[str, str], name_of_number: dict[str, str]) -> ImageRow:
    path = Path(find_file(folder / Path(image).with_suffix(".txt")))
    if not path.exists():
        return ImageRow(image, None)
    with damage_explained(path):
        text = read_text(path, MOST_TAGS)
    lines = list(filter(None, map(str.strip, text.splitlines())))
    if any(map(_BOX.fullmatch, lines)):
        return ImageRow(image, dict.fromkeys(_read_boxes(lines, name_of_number, path), POSITIVE))
    return ImageRow(image, {name_of_spelling.get(tag, tag): POSITIVE for tag in split_tags(text)})


def split_tags(text: str) -> list[str]:
    """Return the tags in a text, between commas or in lines."""
    return list(filter(None, map(str.strip, re.split("[,\n]", text))))


def _read_boxes(lines: Sequence[str], name_of_number: dict[str, str], path: Path) -> list[str]:
    """Return the class of each box of a file of YOLO; UserError if a line is another text."""
    numbers = [line.split()[0] if _BOX.fullmatch(line) else "" for line in lines]
    if wrong := [line for line, number in zip(lines, numbers, strict=True) if number not in name_of_number]:
        raise UserError(
            f"{path} has boxes and {wrong[0]!r:.60}; write the names of labels, or for boxes of YOLO set data.classes "
            "to the file of their names, one per line, in the order of their numbers, such as classes.txt"
        )
    return [name_of_number[number] for number in numbers]


def _spellings(name: str) -> list[str]:
    spaced = name.replace("_", " ") if len(name) > _SHORTEST else name
    return [re.sub(r"([()])", r"\\\1", spelling) for spelling in (name, spaced)] + [spaced]


def _read_tags(path: Path) -> dict[str, dict[str, Any]]:
    """Return tag -> its row in the list of all tags."""
    with damage_explained(path):
        rows = read_rows(io.StringIO(read_text(path), newline=""))
        return {row["name"]: {**row, **{name: int(row.get(name, 0)) for name in ("tag_id", "count")}} for row in rows}


def _text_files(file: LabelFile) -> TagFiles:
    return TagFiles(file, lambda image, _: [f"{os.path.splitext(image)[0]}.txt"], _tag_file)


def _require(file: LabelFile) -> None:
    file.require_stems()
    _text_files(file).require(",")
    if (file.path / TAGS).exists():
        _read_tags(file.path / TAGS)


def _tag_file(file: TagFile, labels: Sequence[str]) -> bytes:
    """Return the text file of an image with the labels that it does not have at its end."""
    content = _read_existing(file)
    new = _absent(content, labels)
    if file.found and not new:
        return content
    kept = content.rstrip().rstrip(b",").rstrip()
    separator = "\n" if b"\n" in kept and b"," not in kept else ", "
    return kept + (separator * bool(kept) + separator.join(new) + "\n").encode()


def _read_existing(file: TagFile) -> bytes:
    """Return the content of the text file of an image, or nothing; UserError if it is no text of tags."""
    for path in file.found[:1]:
        with damage_explained(path):
            text = read_text(path, MOST_TAGS)
        if any(map(_BOX.fullmatch, map(str.strip, text.splitlines()))):
            raise UserError(f"{path} has boxes, to which no tags can be added; name another --output")
        return read_bytes(path)
    return b""


def _absent(content: bytes, labels: Iterable[str]) -> list[str]:
    """Return the labels that are not tags of a text in any spelling."""
    known = set(map(compose, split_tags(content.decode("utf-8-sig"))))
    return [label for label in labels if known.isdisjoint((compose(label), *map(compose, _spellings(label))))]


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    return _text_files(file).write(entries)


def _write_listed(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    """Write the text files, and the list of all tags: those that it has, in their order, and further ones."""
    files, counts = _text_files(file), Counter[str]()
    path = files.folder.inside(TAGS)
    rows = _read_tags(path) if path.exists() else {}

    def counted() -> Iterator[LabelEntry]:
        for entry in entries:
            counts.update(_absent(_read_existing(files.find(entry.image)) if rows else b"", entry.labels or ()))
            yield entry

    note = files.write(counted())
    numbers = itertools.count(1 + max((row["tag_id"] for row in rows.values()), default=-1))
    for name in file.names:
        if name not in rows:
            rows[name] = {"tag_id": next(numbers), "name": name, "category": 0, "count": 0}
        rows[name]["count"] += counts[name]
    columns = list(next(iter(rows.values())))
    files.folder.write_csv(TAGS, columns, [[row.get(column, "") for column in columns] for row in rows.values()])
    return note


SIDECAR = Format("", partial(_read, listed=False), _write, require=_require)
WD_TAGGER = Format("", partial(_read, listed=True), _write_listed, require=_require)
