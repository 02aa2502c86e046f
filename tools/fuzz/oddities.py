"""What is not plain in the tables and folders of users; see given.py.

Each function changes a draft and returns the oddity, or None if the draft has no place for it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

from tools.fuzz.given import (
    LABELS,
    LISTS,
    SPLITS,
    TABLES,
    Draft,
    Entry,
    Meaning,
    Oddity,
    Raw,
    nfc,
    nfd,
    picture,
)

Change = Callable[[Draft], Oddity | None]
CHANGES: dict[str, list[Change]] = {}
NONE = (frozenset(), frozenset())  # no positive label, and no unknown label
UNKNOWN_LABELS = (frozenset(), frozenset(LABELS))
ALIASES = {
    "train": ("training", "Training", "trn", "TRAIN", "Train", " train", "train ", "Train "),
    "val": ("valid", "Valid", "validation", "Validation", "VAL", "Val", "val ", "dev"),
    "test": ("testing", "Test", "TEST", " test", "tst", "Testing"),
}
NO_VALUES = ("nan", "NaN", "None", "N/A", "n/a", "null", "NULL", "NA", "<NA>", "#N/A", "none", "NaT")
JUNK_FILES = ("Thumbs.db", ".DS_Store", "desktop.ini", "ehthumbs.db", ".directory", "._0.jpg", ".0.jpg", "Icon\r")
JUNK_FOLDERS = ("__MACOSX", "@eaDir", "lost+found", ".ipynb_checkpoints", "$RECYCLE.BIN", "System Volume Information")
JUNK_FOLDERS += ("#recycle", "@Recycle", ".thumbnails", ".Trash-1000", ".git")
# Suffixes of images that Pillow reads, and others.
SUFFIXES = (".jpe", ".mpo", ".JPG", ".Jpeg", ".jfif", ".PNG", "", ".jpg.png", ".png.jpg", ".jpg_large", ".apng", ".JPE")
SUFFIXES += (".png~", ".jpg.part", ".dib", ".pnm", ".jpg_original", ".tmp", ".image")
OTHERS = (".svg", ".psd", ".dng", ".nef", ".pdf", ".heic", ".zip", ".mp4", ".txt", ".json", ".xml", ".csv.bak")


def change(*kinds: str) -> Callable[[Change], Change]:
    """Return a decorator that adds a change for kinds of input."""

    def add(function: Change) -> Change:
        for kind in kinds:
            CHANGES.setdefault(kind, []).append(function)
        return function

    return add


# -------------------------------------------------------------------------------------------------------------- splits
@change(*TABLES)
def splits_spelled_otherwise(draft: Draft) -> Oddity | None:
    if not draft.has_splits:
        return None
    split = draft.random.choice(SPLITS)
    spelling = draft.random.choice(ALIASES[split])
    members = [entry for entry in draft.entries if entry.split == split]
    members = members if draft.random.random() < 0.5 else members[:1]
    for entry in members:
        entry.split = spelling
        if spelling == "dev" and draft.meanings[entry.number].splits:
            draft.meanings[entry.number].splits = {"val", "test"}
    return Oddity(f"split {spelling!r}", spelling.strip(), {entry.number for entry in members})


@change(*TABLES)
def unknown_split(draft: Draft) -> Oddity | None:
    if not draft.has_splits:
        return None
    name = draft.random.choice(("trian", "unlabeled", "0", "fold2", "?", "holdout", "nan", "None", "unused", "extra"))
    members = draft.some()
    for entry in members:
        entry.split = name
        draft.meanings[entry.number].splits = set()
    pattern = rf"\b{name}\b" if name.isalnum() else r"\?"
    return Oddity(f"unknown split {name!r}", pattern, {entry.number for entry in members})


@change(*TABLES)
def empty_split(draft: Draft) -> Oddity | None:
    if not draft.has_splits:
        return None
    text, members = draft.random.choice(("", " ", "\t")), draft.some()
    for entry in members:
        entry.split = text
    words = r"empty|blank|without a split|no split|names? the splits? of some|split ''"
    return Oddity("empty split", words, {entry.number for entry in members})


# -------------------------------------------------------------------------------------------------------------- labels
def _unwritten(entries: list[Entry]) -> list[Entry]:
    """Return the entries that have labels, in the usual form."""
    return [entry for entry in entries if entry.cell is None and entry.labels is not None]


def _literal(draft: Draft, labels: list[str]) -> tuple[str, list]:
    """Return labels as the text of a literal, and the meanings that it may have."""
    listed, bare = list(labels), [(frozenset(labels), frozenset())]
    kinds = {
        "json": json.dumps(listed, ensure_ascii=draft.random.random() < 0.5),
        "python": repr(listed),
        "tuple": repr(tuple(listed)),
        "set": "{" + ", ".join(map(repr, listed)) + "}" if listed else "set()",
        "choices": json.dumps({"choices": listed}),
        "numpy": "[" + " ".join(map(repr, listed)) + "]",
        "bare": "[" + ", ".join(listed) + "]",
        "codes": json.dumps({name: 1 for name in listed}),
        "spaced": f" {json.dumps(listed)} ",
        "nested": json.dumps([listed]),
        "quoted": json.dumps(json.dumps(listed)),
        "one": json.dumps(listed[0]) if len(listed) == 1 else json.dumps(listed),
    }
    kind = draft.random.choice(list(kinds))
    if kind == "codes":
        bare += [(frozenset(labels), frozenset(LABELS) - frozenset(labels))]
    return kinds[kind], bare


@change("csv", "sidecar")
def literals(draft: Draft) -> Oddity | None:
    members = _unwritten(draft.entries if draft.random.random() < 0.5 else draft.some())
    if not members:
        return None
    for entry in members:
        text, meanings = _literal(draft, entry.labels or [])
        entry.cell, draft.meanings[entry.number].labels = text, meanings
    words = r"[\[{]|\('|JSON|literal|bracket|quot"
    return Oddity(f"literals such as {members[0].cell}", words, {entry.number for entry in members})


@change("csv", "sidecar")
def no_values(draft: Draft) -> Oddity:
    word, members = draft.random.choice(NO_VALUES), _unwritten(draft.some())
    for entry in members:
        whole = draft.random.random() < 0.7
        glue = ", " if draft.kind == "sidecar" else ";"
        entry.cell = word if whole else glue.join([*(entry.labels or []), word])
        if whole:
            draft.meanings[entry.number].labels = [NONE, UNKNOWN_LABELS]
    return Oddity(
        f"the cell {word}", rf"['\"(\s]{_escaped(word)}(?!\w)", {entry.number for entry in members}, classes={word}
    )


@change("csv", "sidecar")
def other_separator(draft: Draft) -> Oddity | None:
    glue = draft.random.choice((", ", "|", "/", " | ", ",", "\t")) if draft.kind == "csv" else "; "
    members = [entry for entry in _unwritten(draft.entries) if len(entry.labels or []) > 1]
    members = members if draft.random.random() < 0.5 else members[:1]
    if not members:
        return None
    for entry in members:
        entry.cell = glue.join(entry.labels)
    joined = {nfc(entry.cell) for entry in members}
    words = "separator|joined|printable|" + "|".join(map(_escaped, joined))
    numbers = {entry.number for entry in members}
    return Oddity(f"labels joined by {glue!r}", words, numbers, classes=joined, by_check=draft.kind == "csv")


@change("csv", "sidecar")
def sloppy_cells(draft: Draft) -> Oddity:
    glue = ", " if draft.kind == "sidecar" else ";"
    for entry in _unwritten(draft.entries):
        names = list(entry.labels or [])
        forms = (
            glue.join(names) + glue,
            glue + glue.join(names),
            f" {glue} ".join(names),
            glue.join(names + names),
            (glue * 2).join(names),
            f"  {glue.join(names)} ",
        )
        entry.cell = draft.random.choice(forms)
    return Oddity("spaces, empty and repeated names in cells")


@change("csv", "jsonl", "sidecar", "wide", "coco_json")
def invisible_letters(draft: Draft) -> Oddity | None:
    """A label with a letter that nobody sees: it is not another class, or it is said."""
    mark = draft.random.choice(("\u200b", "\u00a0", "\ufeff", "\u00ad", "\u200e", "\u2060"))
    members, name = _unwritten(draft.some()), "sea"
    if not members:
        return None
    entry = members[0]
    odd = draft.random.choice((name + mark, mark + name))
    words = rf"printable|{mark}|\\u{ord(mark):04x}|\\x{ord(mark):02x}|invisible"
    if draft.kind in ("wide", "coco_json"):
        draft.header[name] = odd
        return Oddity(f"class {odd!r}", words, draft.numbers(), classes={odd})
    names = sorted({name, *(entry.labels or [])})
    draft.meanings[entry.number].labels = [(frozenset(map(nfc, names)), frozenset())]
    written = [odd if label == name else label for label in names]
    entry.labels = written
    return Oddity(f"label {odd!r}", words, {entry.number}, classes={odd})


@change("csv", "jsonl", "sidecar", "wide", "coco_json")
def decomposed_labels(draft: Draft) -> Oddity:
    """Labels in NFD, all or some: they are the composed labels."""
    if draft.kind in ("wide", "coco_json"):
        draft.header["Événement"] = nfd("Événement")
        return Oddity("a class in NFD")
    for entry in draft.entries:
        if entry.labels and draft.random.random() < 0.6:
            entry.labels = [nfd(name) for name in entry.labels]
    return Oddity("labels in NFD")


@change("csv", "jsonl", "coco_json", "sidecar", "folders")
def other_case(draft: Draft) -> Oddity | None:
    """A label in another case is said, whether or not it is another class."""
    if draft.kind == "coco_json":
        return None
    entry = draft.some(1, 1)[0]
    if "sea" not in (entry.labels or []):
        return None
    if draft.kind == "folders":
        if "/sea/" not in f"/{entry.file}":
            return None
        entry.file = f"/{entry.file}".replace("/sea/", "/Sea/")[1:]
    entry.labels = ["Sea" if name == "sea" else name for name in entry.labels]
    return Oddity("label 'Sea' beside 'sea'", "Sea", {entry.number}, classes={"Sea"}, by_check=True)


# ------------------------------------------------------------------------------------------------------ rows of tables
@change(*LISTS)
def one_row_per_label(draft: Draft) -> Oddity | None:
    members = [entry for entry in draft.entries if len(entry.labels) > 1]
    if not members or draft.kind in ("wide", "coco_json"):
        return None
    for entry in members:
        place = draft.entries.index(entry)
        rows = []
        for name in entry.labels:
            row = copy.copy(entry)
            row.labels = [name]
            rows.append(row)
        draft.entries[place : place + 1] = rows
    words = r"again|twice|one row per|several rows|merged|per label"
    return Oddity("one row per label", words, {entry.number for entry in members})


@change(*LISTS)
def listed_twice(draft: Draft) -> Oddity | None:
    """An image once more, under another spelling of its path: one image with the labels of both rows."""
    entry = draft.some(1, 1)[0]
    twin = copy.copy(entry)
    spellings = (
        f"./{entry.path}",
        entry.path.replace("/", "//") if "/" in entry.path else f".//{entry.path}",
        f"b/../{entry.path}",
        entry.path,
        f" {entry.path}",
        nfd(entry.path),
    )
    twin.path = draft.random.choice(spellings)
    (draft.files.setdefault("b/keep.txt", b"")) if draft.kind != "sidecar" else None
    draft.entries.insert(draft.random.randint(0, len(draft.entries)), twin)
    if draft.random.random() < 0.5 and draft.kind != "wide":
        twin.labels = draft.random.sample(LABELS, 1)
        both = frozenset(twin.labels) | frozenset(entry.labels)
        draft.meanings[entry.number].labels = [(both, frozenset())]
    return Oddity(
        f"{twin.path} beside {entry.path}",
        "again|twice|same|merged|one image|two values|no file|cannot be found",
        {entry.number},
    )


@change(*LISTS)
def odd_paths(draft: Draft) -> Oddity:
    members = draft.some() if draft.random.random() < 0.7 else draft.entries
    form = draft.random.choice(list(PATHS))
    for entry in members:
        entry.path = PATHS[form](entry.path)
    words = "no file|without a file|cannot be (found|read)|path|below|backslash"
    changed = {entry.number for entry in members if entry.path != entry.file}
    return Oddity(f"paths with {form}", words, changed)


PATHS: dict[str, Callable[[str], str]] = {
    "./": lambda path: f"./{path}",
    "backslashes": lambda path: path.replace("/", "\\"),
    "another case": lambda path: path.upper(),
    "a space at the end": lambda path: f"{path} ",
    "a space at the start": lambda path: f" {path}",
    "a slash at the start": lambda path: f"/{path}",
    "a parent": lambda path: f"x/../{path}",
    "file://": lambda path: f"file://{path}",
    "no suffix": lambda path: path.rpartition(".")[0],
}


@change(*LISTS)
def absolute_paths(draft: Draft) -> Oddity:
    for entry in draft.entries if draft.random.random() < 0.5 else draft.some():
        entry.path = f"ROOT/{entry.path}"
    return Oddity("absolute paths")


@change(*LISTS, "sidecar", "folders", "listing")
def decomposed_paths(draft: Draft) -> Oddity:
    """File names in NFD on the disk or in the table, as the zip of a Mac has them."""
    numbers = [entry.number for entry in draft.entries]
    for entry in draft.entries:
        if draft.random.random() < 0.7 and entry.path == entry.file and numbers.count(entry.number) == 1:
            if draft.random.random() < 0.5 or draft.kind not in LISTS:
                entry.file = "/".join((*map(nfd, entry.file.split("/")[:-1]), nfd("é" + entry.file.split("/")[-1])))
                entry.path = nfc(entry.file)
            else:
                entry.path = nfd(entry.file)
    return Oddity("file names in NFD")


@change(*LISTS)
def missing_files(draft: Draft) -> Oddity:
    members = draft.some(1, 2)
    draft.unlisted |= {entry.number for entry in members}
    words = "no file|without a file|cannot be found"
    return Oddity("rows without a file", words, {entry.number for entry in members})


@change(*LISTS)
def in_two_splits(draft: Draft) -> Oddity | None:
    if not draft.has_splits or draft.setting != "splits" or draft.kind == "coco_json":
        return None
    entry = draft.some(1, 1)[0]
    twin = copy.copy(entry)
    twin.split = "test"
    draft.entries.append(twin)
    draft.meanings[entry.number].splits = {"train", "test"}
    words = r"shares|again|twice|two splits|also in"
    return Oddity("an image in two splits", words, {entry.number})


@change("csv")
def odd_lines(draft: Draft) -> Oddity:
    """Lines that are no rows."""
    columns = 3 + draft.has_splits
    lines = {"": False, "   ": True, "," * (columns - 1): True, "# a comment": True, "0.png": True, "a,b,c,d,e,f": True}
    text = draft.random.choice(list(lines))
    draft.lines.append(text)
    return Oddity(f"the line {text!r}", r"line \d+|blank|empty" if lines[text] else "", set(), files=1, must_say=False)


# -------------------------------------------------------------------------------------------------------------- quotes
@change("csv")
def unclosed_quote(draft: Draft) -> Oddity:
    """A quote that swallows the lines up to the next quote, or to the end."""
    first, second = sorted(draft.random.sample(range(len(draft.entries)), 2))
    opening, closing = draft.entries[first], draft.entries[second]
    column = draft.random.choice(("note", "note", "labels", "image"))
    match column:
        case "note":
            opening.note = Raw('"big')
        case "labels":
            opening.cell = Raw('"' + ";".join(opening.labels))
        case _:
            opening.path = Raw('"' + opening.path)
    if draft.random.random() < 0.7:
        closing.note = Raw(draft.random.choice(('"fine"', 'so"', '"')))
    else:
        second = len(draft.entries) - 1
    lines = set(range(1, second - first + 3))
    words = rf"quot|no file|line ({'|'.join(str(n) for n in range(first + 2, len(draft.entries) + 3))})\b"
    return Oddity(f"an unclosed quote in {column}", words, draft.numbers(), counts=lines | {len(draft.entries) - first})


# ------------------------------------------------------------------------------------------------- files and folders
@change("folders", "sidecar", "listing")
def junk_files(draft: Draft) -> Oddity:
    for name in draft.random.sample(JUNK_FILES, 2):
        folder = draft.random.choice(_folders(draft))
        draft.files[f"{folder}{name}"] = picture(62) if name.startswith(".") else b"junk"
    return Oddity("files of an operating system")


@change("folders", "sidecar", "listing")
def junk_folders(draft: Draft) -> Oddity:
    name, folder = draft.random.choice(JUNK_FOLDERS), draft.random.choice(_folders(draft))
    inner = draft.random.choice(("", f"{folder}sea/", "train/sea/", "sea/"))
    file = draft.random.choice(("._0.png", "0.png", "x.jpg"))
    draft.files[f"{folder}{name}/{inner}{file}"] = picture(62)
    return Oddity(f"the folder {folder}{name}", _escaped(name), {62})


def _folders(draft: Draft) -> list[str]:
    """Return the folders of a draft, each with a slash at its end, the root first."""
    folders = {""}
    for entry in draft.entries:
        parts = entry.file.split("/")[:-1]
        folders |= {"".join(f"{part}/" for part in parts[: k + 1]) for k in range(len(parts))}
    return sorted(folders)


@change("folders", "sidecar", "listing")
def odd_suffixes(draft: Draft) -> Oddity | None:
    touched = {number for oddity in draft.oddities for number in oddity.images}
    suffix, members = draft.random.choice(SUFFIXES), [entry for entry in draft.some() if entry.number not in touched]
    if not members:
        return None
    for entry in members:
        entry.file = entry.file.rpartition(".")[0] + suffix
    if suffix in (".JPG", ".PNG", ".Jpeg", ".jfif", ".jpg.png", ".png.jpg"):
        return Oddity(f"the suffix {suffix}")
    words = rf"{_escaped(suffix)}" if suffix else "without a? ?suffix|no suffix"
    return Oddity(f"the suffix {suffix!r}", words or "suffix", {entry.number for entry in members})


@change("folders", "listing", "sidecar")
def no_images(draft: Draft) -> Oddity:
    suffix = draft.random.choice(OTHERS)
    if draft.kind == "sidecar" and suffix == ".txt":
        return text_without_image(draft)
    folder = draft.random.choice([folder for folder in _folders(draft) if folder or draft.kind != "folders"])
    draft.files[f"{folder}other{suffix}"] = b"no image"
    return Oddity(f"a file {folder}other{suffix}", rf"{_escaped(suffix)}|not an image|no image", files=1)


@change("folders")
def outside_classes(draft: Draft) -> Oddity:
    """An image beside the folders of classes or of splits."""
    folder = "" if draft.flat else draft.random.choice(("", "train/", "val/"))
    draft.files[f"{folder}stray.png"] = picture(draft.further())
    return Oddity(f"{folder}stray.png", "stray|outside|class", files=1)


@change("folders")
def further_folder(draft: Draft) -> Oddity | None:
    """A folder beside the folders of splits."""
    if draft.flat:
        return None
    name = draft.random.choice(("extra", "unlabeled", "holdout", "train_old", "new"))
    draft.files[f"{name}/sea/more.png"] = picture(draft.further())
    return Oddity(f"the folder {name}", name, files=1)


@change("folders")
def folders_of_splits(draft: Draft) -> Oddity | None:
    """Folders of splits in other spellings, also if the config opens the training split only."""
    if draft.flat:
        if draft.files:  # they would have to move, too
            return None
        draft.flat = False
        for entry in draft.entries:
            entry.file = f"train/{entry.file}"
        for name in ("val", "test"):
            spelling = draft.random.choice((name, *ALIASES[name])).strip()
            draft.files[f"{spelling}/sea/more.png"] = picture(draft.further())
            draft.oddities.append(Oddity(f"the folder {spelling}", rf"\b{spelling}|\b{name}", files=1))
    renamed = {}
    for split in SPLITS:
        if draft.random.random() < 0.6:
            renamed[split] = draft.random.choice(ALIASES[split]).strip()
    members = set()
    for entry in draft.entries:
        split, _, rest = entry.file.partition("/")
        if split in renamed:
            entry.file = f"{renamed[split]}/{rest}"
            members.add(entry.number)
            if renamed[split] == "dev":
                draft.meanings[entry.number].splits = {"val", "test"}
    words = "|".join([*map(_escaped, renamed.values()), "no folder"])
    return Oddity(f"folders of splits {renamed}", words, members)


@change("folders")
def wrapped_folder(draft: Draft) -> Oddity | None:
    """A folder around all others, as an archive is unpacked."""
    if draft.files:  # they would have to move, too
        return None
    name = draft.random.choice(("photos", "dataset", "images"))
    for entry in draft.entries:
        entry.file = f"{name}/{entry.file}"
    return Oddity(f"the folder {name} around all", name, set(range(64)), classes={name})


@change("folders")
def decomposed_folders(draft: Draft) -> Oddity:
    for entry in draft.entries:
        if draft.random.random() < 0.5:
            entry.file = entry.file.replace("Événement", nfd("Événement"))
    return Oddity("folders of classes in NFD")


@change("folders")
def one_photograph_in_two_classes(draft: Draft) -> Oddity | None:
    """Equal files in two classes are one image with two labels; equal names alone are not."""
    entry = draft.some(1, 1)[0]
    if draft.oddities:  # which may rename one of the two
        return None
    *above, name = entry.file.split("/")
    other = draft.random.choice([label for label in LABELS if label not in entry.labels])
    twin = "/".join([*(other if nfc(part) in LABELS else part for part in above), name])
    if draft.random.random() < 0.4:  # another photograph of the same name
        number, splits = draft.further(), set(draft.meanings[entry.number].splits)
        draft.files[twin] = picture(number)
        draft.meanings[number] = Meaning(splits, [(frozenset({other}), frozenset())])
        return Oddity("equal names in two classes")
    if draft.random.random() < 0.3:
        twin = f"{twin.rpartition('/')[0]}/copy{twin[-4:]}"
    draft.files[twin] = picture(entry.number, twin)
    draft.meanings[entry.number].labels = [(frozenset({*entry.labels, other}), frozenset())]
    return Oddity("one photograph in two classes", r"same|twice|equal|also|duplicate|both", {entry.number})


@change("folders")
def class_in_one_split(draft: Draft) -> Oddity | None:
    """A class that only a split for evaluation has."""
    if draft.flat:
        return None
    number = draft.further()
    draft.files["val/moon/0.png"] = picture(number)
    draft.meanings[number] = Meaning({"val"} & draft.opened, [(frozenset({"moon"}), frozenset())])
    return Oddity("the class moon in val only", "moon", {number}, classes={"moon"})


# ------------------------------------------------------------------------------------------------------- jsonl, sidecar
@change("jsonl")
def no_value_among_labels(draft: Draft) -> Oddity:
    word, members = draft.random.choice(NO_VALUES), _unwritten(draft.some())
    for entry in members:
        entry.labels = [word] if draft.random.random() < 0.7 else [*(entry.labels or []), word]
        if entry.labels == [word]:
            draft.meanings[entry.number].labels = [NONE, UNKNOWN_LABELS]
    words = rf"['\"(\s]{_escaped(word)}(?!\w)"
    return Oddity(f"the label {word}", words, {entry.number for entry in members}, classes={word})


@change("sidecar")
def no_text(draft: Draft) -> Oddity:
    members = _unwritten(draft.some())
    for entry in members:
        entry.labels = None
    return Oddity("images without text", "without labels|no labels|no text|unlabeled", {e.number for e in members})


@change("sidecar")
def text_without_image(draft: Draft) -> Oddity:
    draft.files["orphan.txt"] = b"sea"
    return Oddity("a text without image", r"\.txt|text|orphan", files=1)


@change("sidecar")
def one_text_for_two(draft: Draft) -> Oddity | None:
    members = _unwritten(draft.some())
    if not members:
        return None
    entry = members[0]
    entry.cell = ", ".join(entry.labels)  # so that no other change has the text of one of the two only
    number = draft.further()
    draft.files[f"{entry.file.rpartition('.')[0]}.webp"] = picture(number)
    draft.meanings[number] = Meaning({"train", "val"}, list(draft.meanings[entry.number].labels))
    return Oddity("two images with one text", entry.file.rpartition("/")[2].partition(".")[0], {number, entry.number})


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in r".^$*+?{}[]\|()" else letter for letter in text)
