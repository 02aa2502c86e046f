"""The names of splits and labels as other programs and people write them."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike
from mlmoe_jax.runtime.text import abbreviate, compose

_Name = TypeVar("_Name", bound=Hashable)
_SPELLINGS = {
    "train": ("training", "trn", "tr"),
    "val": ("valid", "validation", "dev", "devel", "development"),
    "test": ("testing", "tst"),
}
STANDARD_SPLITS = tuple(_SPELLINGS)  # a folder with such a name, see `split_key`, is no class
_KEY_OF_SPELLING = {spelling: key for key, spellings in _SPELLINGS.items() for spelling in spellings}

SEPARATORS = (",", ";", "|", "/", "+", "&", " ")  # that people write between labels

# What programs write where there is no value. None of these is a label, unless a list of classes has it.
_NO_VALUES = frozenset(
    (
        *("nan", "none", "null", "nil", "na", "n/a", "n.a", "n.a.", "<na>", "nat", "undefined", "(blank)"),
        *("(null)", "(none)", "<null>", "<none>", "\\n", "__background__", "__ignore__", "???"),
        *("-", "--", "---", "–", "—", "?", ".", "...", "…"),
        *("#n/a", "#name?", "#ref!", "#value!", "#div/0!", "#null!", "#num!"),
    )
)
_SYNTAX = re.compile(r"""[\[({]\s*['"]|['"]\s*[\])}]|^(\[.*\]|\(\s*\)|\{.*\}|set\(\))$|</\w""")  # of lists, XML
_VALUES = re.compile(  # a row of codes or decimals, or a value beside a name: dog:1, dog = 0, (dog:1.2), dog 0.93
    r"^-?[\d.]+(\s+-?([01]|\d*\.\d+))+$|[^\W\d_](:|\s?=\s?)(-?[01](\.\d+)?|true|false)\)?$|^0\.\d+\s|\s(0\.\d+|1\.0+)$",
    re.IGNORECASE,
)
_QUOTED = re.compile(  # in quotes, or with a quote at one end only; 5" is a length
    r"""^(["']).*\1$|^[“„«‘].*[”“»’]$|^["“„«][^"“”„«»]*$|^[^"“”„«»]*[^\d"“”„«»]["”]$"""
)

_NO_NAME = re.compile(  # what a line is that is no name in a list of names
    "|".join(
        (
            r"^(#|%|//|/\*|<!)\s|\s(#|//)\s",  # a comment
            r"^([-+–—>|☐☑☒✓✔✗✘]|\[[\sxX]?\])\s|^[•‣▪・*`\\]",  # an item of a list, or a row of a table
            r"^(?P<mark>[-=<_~])(?P=mark)|\]\(",  # a rule, or markup
            r"\w\s*[;|，、；،]\s*\w|\w\s[·•]\s\w|[,:/]$|\w;$|\\[nrt]",  # several names, or a heading
            r"^[\[\](){}]+[,;]?$|\{$|[\"']\s*:|:\s*[\"'[{]|^<\w\w+>|</\w",  # a line of JSON, YAML or XML
            r"\.(jpe?g|png|webp|gif|bmp|tiff?|txt)$|://|^total:|^etc\.?$",  # a file, an address, or an end
            r"^/(?!\w/[^\W\d])\S+$",  # a path, but not a name of SUN397 or Places365, such as /a/abbey
        )
    ),
    re.IGNORECASE,
)
_HEADING = re.compile(
    r"((class|label|tag|category|object|display)[\s_]?)?(name|class|classe|label|tag|category|categorie|object|"
    r"keyword|synset|description)s?"
)
# as in 0,dog, a) dog, #1 dog and n02084071 dog
_CODE = r"[a-z]{0,3}\d+\s*[.,:;=)]|([a-z]|[ivx]+)\)|#\d+\s|(\d+|[a-z]?\d{3,}|(?=\S*[/_])(?=\S*\d)\S+)\s"
_BESIDE = (  # a number or a code beside a name
    re.compile(rf"^\(?({_CODE})\s*", re.IGNORECASE),
    re.compile(r"(\s*[,:;=\t]\s*-?\d[\d.]*%?|\s+n\d{8}|\s+\d[\d.]*%|\s*[(\[]\d+[)\]]|\s[-x]\s?\d+)$"),
)
_TRANSLATION = re.compile(r"\s*(->|=>|→|\s=\s|\s[–—-]\s|:\s).+$")  # as in dog -> Hund
_FORM = (
    "which looks like a comment, a heading or a line of another kind of file; write each name alone on a line, or "
    "describe it after a tab if it is a name"
)
_BESIDE_NAME = (
    "which has a number, a code or a translation beside it; write each name alone on a line, or describe it after a tab"
)
_LONGEST = 300  # characters of a name in a list, and of a line whose form is examined


def split_key(name: str) -> str:
    """Return a key that is equal for all usual spellings of the name of a split.

    Case, spaces, hyphens and underscores do not count, nor does a word such as "set" at the end: "Training set" and
    "train" have the key "train", "valid" and "dev" the key "val".
    """
    plain = re.sub(r"[\s_-]+", "_", compose(name).strip().casefold())
    stem = re.sub(r"_?(set|split|data|images)$", "", plain)
    known = _KEY_OF_SPELLING.get(stem, stem)
    return known if known in _SPELLINGS else plain


def find_split(name: str, splits: Sequence[str]) -> str | None:
    """Return the element of `splits` that `name` spells, see `split_key`; None if none fits, or more than one."""
    if name in splits:
        return name
    same = [split for split in splits if split_key(split) == split_key(name)]
    return same[0] if len(same) == 1 else None


def is_no_value(name: str) -> bool:
    """Return whether a text is what programs write where there is no value, such as nan, None and N/A."""
    return name.casefold() in _NO_VALUES


def find_name(columns: Iterable[str], name: str) -> str | None:
    """Return the element of `columns` that is `name`, or that differs from it only in case and in spaces around it.

    Return None if there is no such element.
    """
    if name in columns:
        return name
    plain = compose(name).strip().casefold()
    return next((column for column in columns if plain and compose(column).strip().casefold() == plain), None)


def first_repeated(names: Iterable[_Name]) -> _Name | None:
    """Return the first name that occurs again; None if all names are different."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def names_problem(names: Sequence[str]) -> str:
    """Return why names cannot be labels together, as the end of a sentence; "" if they are different and printable."""
    if (repeated := first_repeated(names)) is not None:
        return f"names the class {repeated!r:.100} twice; name each class once"
    for name in names:  # lines of labels.txt, and cells of tables
        if problem := _why_unprintable(name):
            return f"has the label {name!r:.100}, {problem}"
    return ""


def require_names(names: Sequence[str], place: PathLike) -> None:
    """Raise UserError unless the labels of a file or a split have different, printable names."""
    if problem := names_problem(names):
        raise UserError(f"{place} {problem}")


def _why_unprintable(name: str) -> str:
    if not name:
        return "which is no name; write the name of a label"
    if not name.isprintable():
        return (
            "with a line break or another character that is not printable; rename it, or correct the separator or the "
            "quote before it"
        )
    return ""


def label_problem(name: str) -> str:
    """Return why a text is no name of a label, and what to do, as the end of a sentence; "" if it is a name."""
    if problem := _why_unprintable(name):
        return problem
    if _SYNTAX.search(name):
        return "which looks like a list in JSON or Python, or like XML; write each name as a label of its own"
    if _VALUES.search(name):
        return (
            "which has values; write only the names of the labels that an image has, or a column per label, or list it "
            "in data.classes with a description after a tab if it is a name"
        )
    if _QUOTED.search(name):
        return "with a quote that is not closed or around it; write the name without quotes"
    if name.casefold() in ("true", "false"):
        return "which is the value of a label; write its name, or clear data.label_column if each column is a label"
    if is_no_value(name):
        return (
            "which stands for no value; leave it out, or list all labels in the file of data.classes if it is one, and "
            "describe it there after a tab"
        )
    return ""


def find_variants(names: Sequence[str]) -> list[list[int]]:
    """Return groups of indices: names of a group differ only in case, spaces, hyphens, underscores or a final .0."""
    groups = defaultdict(list)
    for k, name in enumerate(names):
        groups[_label_key(name)].append(k)
    return [group for group in groups.values() if len(group) > 1]


def require_list(rows: Sequence[Sequence[str]], place: Callable[[int], str]) -> None:
    """Raise UserError unless each row of a list, (name, *descriptions), has the name of another label, and only that.

    A name with a description may have any form. `place` returns the position of a row for the error.
    """
    names = [name for name, *_ in rows]
    checks = (
        _find_forms(rows),
        _find_heading(rows),
        _find_columns(rows),
        _find_joined(rows),
        _find_repetitions(names, place),
    )
    for k, problem in itertools.chain(*checks):
        raise UserError(f"{place(k)} has the label {names[k]!r:.100}, {problem}")


def _find_forms(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each row whose form is not the one of a name."""
    hashed = sum(name.startswith("#") for name, *_ in rows)
    for k, (name, *descriptions) in enumerate(rows):
        if problem := _why_unprintable(name) or (not descriptions and label_problem(name)):
            yield k, problem
        is_comment = name.startswith("#") and hashed < len(rows)  # otherwise, they are hashtags
        if len(name) > _LONGEST or (not descriptions and (is_comment or _NO_NAME.search(name))):
            yield k, _FORM


def _find_heading(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Yield (0, reason) if the first of several rows has the titles of columns."""
    if len(rows) > 1 and all(_HEADING.fullmatch(cell.casefold()) for cell in rows[0]):
        yield 0, _FORM


def _find_columns(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for one row if most rows have a number, a code or a translation beside the name."""
    lines = ["\t".join(row)[:_LONGEST] for row in rows]
    rests = [[pattern.sub("", line) for line in lines] for pattern in _BESIDE]
    rests.append([line.removesuffix(f" {k}") for k, line in enumerate(lines)])  # as in dog 0, cat 1
    rests.append([line if "\t" in line else _TRANSLATION.sub("", line) for line in lines])
    for names in rests:
        found = [k for k, name in enumerate(names) if name != lines[k] and re.search(r"[^\W\d_]", name)]
        if 2 * len(found) > len(lines) and len({names[k] for k in found}) == len(found):
            yield found[0], _BESIDE_NAME


def _find_joined(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for one row if rows have several names."""
    names = [name if not descriptions else "" for name, *descriptions in rows]
    joined = names_joined_by(",", names)
    is_alone = len(rows) == 1 and re.fullmatch(r"[^\s/]+([/\t][^\s/]+){2,}", "\t".join(rows[0])[:_LONGEST])
    if is_alone or 4 * len(joined) >= len(rows) or all("," in name for name in names):
        several = "which looks like several names; write each name alone on a line"
        yield min(joined, default=0), f"{several}, or describe it after a tab if it is one name"


def _find_repetitions(names: Sequence[str], place: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for one of each two rows with names that are equal or variants, see `find_variants`."""
    for first, second, *_ in find_variants(names):
        known = f"which is {names[first]!r:.100} of {place(first)}"
        yield second, f"{known}, or differs only in case, spaces, hyphens, underscores or .0; write each label once"


def _label_key(name: str) -> str:
    if not re.search(r"\w.*\w", name):  # A and a, ^_^ and ^-^
        return name
    plain = re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name).strip().casefold())
    return re.sub(r"^(\d+)\.0+$", r"\1", plain)  # as other programs write numbers in a column with empty cells


def names_joined_by(mark: str, names: Sequence[str]) -> list[int]:
    """Return the indices of the names that probably consist of several names joined by `mark`.

    A part of a name is known if it is an element of `names`, or a part of at least two elements. A name is returned if
    all of its parts are known. For ; and |, one known part is enough, and for a comma, one part that is an element of
    `names`. For /, all parts must be known, since it also joins the levels of a hierarchy. For a space, all parts must
    be elements of `names`, and nothing is returned unless this holds for a quarter of all names, since many labels are
    two words.
    """
    parts = {k: {part.strip() for part in name.split(mark)} for k, name in enumerate(names) if mark in name}
    if mark == " ":
        joined = [k for k, own in parts.items() if own <= set(names)]
        return joined if 4 * len(joined) >= len(names) else []
    counts = Counter(itertools.chain(*parts.values()))
    known = {*names, *(part for part, count in counts.items() if count > 1)} - {""}
    enough = {",": set(names), ";": known, "|": known}.get(mark, set())
    return [k for k, own in parts.items() if known >= own or enough & own]


def doubtful_names(names: Sequence[str]) -> list[str]:
    """Return sentences about labels that are probably several names, or the name of another label."""
    joined = [names[k] for mark in SEPARATORS for k in names_joined_by(mark, names)]
    variants = [names[k] for group in find_variants(names) for k in group]
    doubts = {
        "labels that may be several names, with another separator": joined,
        "labels that differ only in case, spaces, hyphens, underscores or .0": variants,
    }
    return [f"{doubt}: {abbreviate(labels)}" for doubt, labels in doubts.items() if labels]
