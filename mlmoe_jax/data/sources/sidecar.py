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
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from mlmoe_jax.data.image_search import is_image, list_files
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile
from mlmoe_jax.data.sources.rows import ImageRow, LabelInput, LabelRows
from mlmoe_jax.data.sources.source import named_files
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MIB, PathLike, damage_explained, find_file, read_text
from mlmoe_jax.runtime.formats import read_rows
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.text import compose, quantity

TAGS = "selected_tags.csv"
MOST_TAGS = MIB  # bytes of a text file
_BOX = re.compile(  # a line of YOLO, DOTA, KITTI or ICDAR, but not a line of tags that are small numbers
    r"(?=.*(\s|\d\.\d|\d{3}))[^\s,]+((\s+|,(?=\S))[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?){4,}([\s,]\S.*)?", re.IGNORECASE
)
_SHORTEST = 3  # in tags with at most this many letters, such as ^_^, the taggers keep the _


def _read(given: LabelInput, *, listed: bool) -> LabelRows:
    names = _read_tags(given.path / TAGS) if listed else None
    name_of_spelling = {spelling: name for name in reversed(names or ()) for spelling in _spellings(name)}
    name_of_spelling |= {name: name for name in names or ()}
    classes = given.classes if given.config.classes else ()
    name_of_number = {str(number): name for number, name in enumerate(classes)}
    images = find_images(given, lambda image: (TAGS, f"{os.path.splitext(image)[0]}.txt"))
    return (_row(given.path, image, name_of_spelling, name_of_number) for image in images), names


def find_images(given: LabelInput, sidecars: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the sorted images, and count files that are neither images nor `sidecars` of one.

    Files that the config names are skipped.
    """
    path, folder, usage = given.path, given.folder, given.usage
    without = named_files(given.config)
    usage.unit = "file"
    files = list_files(folder, usage, without)
    images = sorted(file for file in files if is_image(folder / file))
    tags = [] if path.samefile(folder) else list_files(path, usage, without)
    known = {compose(name) for image in images for name in (image, *sidecars(image))}
    for file in dict.fromkeys((*files, *tags)):
        if compose(file) not in known:
            usage.leave_out("without an image", file)
    return images


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


def _read_tags(path: Path) -> tuple[str, ...]:
    with damage_explained(path):
        text = io.StringIO(read_text(path), newline="")
        return tuple(dict.fromkeys(row["name"] for row in read_rows(text)))


class _TextFiles:
    """The text files of the images of `file`, in the folder `file.path`, which may have the images too."""

    def __init__(self, file: LabelFile):
        self.folder, self.output = file.folder, os.path.abspath(file.path)
        images = [os.path.abspath(os.path.join(file.folder, image)) for image in file.images]
        is_inside = all(Path(image).is_relative_to(self.output) for image in images)
        self.parent = self.output if is_inside else common_parent(file.images)

    def find(self, image: str) -> tuple[str, str]:
        """Return the path of the text file of an image, relative to the output, and the path beside the image."""
        whole = os.path.splitext(os.path.join(self.folder, image))[0] + ".txt"
        name = os.path.relpath(whole, self.parent) if self.parent else os.path.splitext(image)[0] + ".txt"
        return os.path.relpath(find_file(os.path.join(self.output, name)), self.output), whole


def _require(file: LabelFile) -> None:
    if bad := next((name for name in file.names if "," in name or name != name.strip()), None):
        raise UserError(f"a text file of tags cannot hold the label {bad!r}, because commas separate tags; rename it")
    if "://" in os.fspath(file.path):
        raise UserError(f"--output={file.path} is no local folder, which text files of tags need")
    file.require_stems()
    Folder(file.path).require_creatable()
    files = _TextFiles(file)
    for image in file.images:
        name, beside = files.find(image)
        _read_existing(file.path / name, beside)
    if (file.path / TAGS).exists():
        _read_counts(file.path / TAGS)


def _read_existing(*paths: PathLike) -> str:
    """Return the text of the first of the files that exists; UserError if it is no text of tags."""
    for path in map(find_file, paths):
        if os.path.exists(path):
            with damage_explained(path):
                text = read_text(path, MOST_TAGS)
            if any(map(_BOX.fullmatch, map(str.strip, text.splitlines()))):
                raise UserError(f"{path} has boxes, to which no tags can be added; name another --output")
            return text
    return ""


def _append_tags(text: str, labels: Sequence[str]) -> tuple[str, list[str]]:
    """Return a text of tags with labels at its end, and the labels that it did not have in any spelling."""
    known = set(map(compose, split_tags(text)))
    new = [label for label in labels if known.isdisjoint((compose(label), *map(compose, _spellings(label))))]
    if text and not new:
        return text, new
    kept = text.rstrip().rstrip(",").rstrip()
    separator = "\n" if "\n" in kept and "," not in kept else ", "
    return separator.join([*filter(None, [kept]), *new]) + "\n", new


def _read_counts(path: PathLike) -> list[dict[str, str]]:
    with damage_explained(path):
        rows = read_rows(io.StringIO(read_text(path), newline=""))
        return [{**row, "tag_id": int(row["tag_id"]), "count": int(row["count"])} for row in rows if row["name"]]


def _write(file: LabelFile, entries: Iterable[LabelEntry], *, listed: bool) -> str:
    files, folder, counts, unchanged = _TextFiles(file), Folder(file.path), Counter[str](), 0
    has_counts = folder.inside(TAGS).exists()
    for entry in entries:
        if entry.labels is None:
            continue
        name, beside = files.find(entry.image)
        path, labels = folder.inside(name), list(entry.labels)
        _, new = _append_tags(_read_existing(path, beside), labels)
        counts.update(new if has_counts else labels)
        if path.exists() and not new:
            unchanged += 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.update(name, partial(_tagged, path, beside, labels))
    if listed:
        _add_counts(folder, file.names, counts)
    place = files.parent or file.folder or "the working directory"
    is_beside = files.parent == files.output
    notes = [] if is_beside else [f"copy its content over {place} to put each file beside its image"]
    notes += [f"{quantity(unchanged, 'text file')} had all labels already"] if unchanged else []
    return "; ".join(notes)


def _tagged(path: PathLike, beside: PathLike, labels: Sequence[str]) -> bytes:
    return _append_tags(_read_existing(path, beside), labels)[0].encode()


def _add_counts(folder: Folder, names: Sequence[str], counts: Counter[str]) -> None:
    """Write the list of all tags to a folder: the tags that it has, in their order, and further ones."""
    path = folder.inside(TAGS)
    rows = _read_counts(path) if path.exists() else []
    known = {row["name"] for row in rows}
    columns = list(rows[0]) if rows else ["tag_id", "name", "category", "count"]
    rows = [{**row, "count": row["count"] + counts[row["name"]]} for row in rows]
    first = 1 + max((row["tag_id"] for row in rows), default=-1)
    for number, name in enumerate((name for name in names if name not in known), first):
        rows.append({"tag_id": number, "name": name, "category": 0, "count": counts[name]})
    folder.write_csv(TAGS, columns, [[row.get(column, "") for column in columns] for row in rows])


def common_parent(images: Sequence[str]) -> str:
    """Return the deepest folder of all images, absolute; "" if all are relative to the folder of the images."""
    if not any(os.path.isabs(image) or ".." in Path(image).parts for image in images):
        return ""
    return os.path.commonpath([os.path.dirname(os.path.abspath(image)) for image in images])


SIDECAR, WD_TAGGER = (
    Format("", partial(_read, listed=listed), partial(_write, listed=listed), require=_require)
    for listed in (False, True)
)
