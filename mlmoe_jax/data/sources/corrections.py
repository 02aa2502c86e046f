"""Corrections of the labels of the training split, a CSV that `data.corrections` names.

`mlmoe data --audit` writes the suggestions, and a person fills the column `accept`:

    image,label,given,suggested,score,accept
    beach/001.jpg,boat,0,1,0.021300,yes
    beach/002.jpg,sea,1,0,0.140800,no

A row with yes (or y, true, x, 1) in `accept` replaces the label code of the image by the code in `suggested`: 1, 0, or
empty for unknown, as in a table with one column per class. All other rows, and columns with other names, change
nothing. A later audit keeps the rows that a person has edited, and does not repeat a suggestion that has an answer.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.label_tree import Attribute
from mlmoe_jax.data.names import first_repeated
from mlmoe_jax.data.sources.tables import CODE_OF_CELL, find_column
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, read_text
from mlmoe_jax.runtime.formats import unescape_cell
from mlmoe_jax.runtime.text import compose

COLUMNS = ("image", "label", "given", "suggested", "score", "accept")
_CELL_OF = {code: cell for cell, code in reversed(CODE_OF_CELL.items())}  # of the spellings of a code, the first
_NEEDED = ("image", "label", "suggested", "accept")
_ANSWERS = {
    **dict.fromkeys(("yes", "y", "true", "x", "1", "1.0"), True),
    **dict.fromkeys(("", "no", "n", "false", "0", "0.0"), False),
}
_SEPARATORS = ",;\t"  # spreadsheet programs in other languages write semicolons

_Key = tuple[str, str, int | str]  # image, label and suggested code; a code that is none stays text


class Suggestion(NamedTuple):
    """A row of a file of suggestions. The columns of `cells` have the order of the file."""

    line: int
    cells: dict[str, Any]

    @classmethod
    def of(cls, image: str, label: str, codes: tuple[int, int], score: float) -> Suggestion:
        """Return a row that nobody has answered.

        Args:
          image: the id of the image.
          label: the name of the label.
          codes: the given and the suggested label code.
          score: the predicted probability of the given label code.
        """
        given, suggested = (_CELL_OF[code] for code in codes)
        return cls(0, dict(zip(COLUMNS, (image, label, given, suggested, f"{score:.6f}", ""), strict=True)))

    @property
    def key(self) -> _Key:
        """The image and the label in composed Unicode, and the suggested code."""
        suggested = self.cells["suggested"].strip()
        names = compose(self.cells["image"]), compose(self.cells["label"])
        return *names, CODE_OF_CELL.get(suggested, suggested)

    @property
    def answer(self) -> str:
        """The text in the column `accept`; "" if nobody has answered."""
        return self.cells["accept"].strip()

    @property
    def is_edited(self) -> bool:
        """Whether a person has edited or written the row: it has an answer, a text in a further column, or no score."""
        further = any(self.cells[name].strip() for name in self.cells.keys() - set(COLUMNS))
        return bool(self.answer) or further or not self.cells.get("score", "").strip()


def correct_labels(split: Split, path: PathLike, attributes: Sequence[Attribute] = ()) -> Split:
    """Return a split in which the accepted corrections of a file replace label codes.

    A value that becomes positive replaces the given value of its attribute.

    Raises UserError if the file is missing or invalid, an accepted row names an image or a label that the split does
    not have, or two rows answer differently for one image and label.
    """
    columns = {name: k for k, name in enumerate(split.classes)}
    rows = {compose(name): row for row, name in enumerate(split.ids)}
    values = {column: item.labels for item in attributes for column in item.labels}
    usage = Usage(os.fspath(path), "row")
    changed: dict[tuple[int, int], int] = {}
    replaced: dict[tuple[int, int], int] = {}
    for row in _list_accepted(path, usage):
        image, label, code = row.key
        if image not in rows or label not in columns:
            unknown = f"label '{label}'" if image in rows else f"image '{image}'"
            raise UserError(
                f"{path} line {row.line} corrects the {unknown}, which split {split.name} does not have; write the "
                "name as the data set has it, or clear accept in this line"
            )
        place = rows[image], columns[label]
        changed[place] = code
        if code == POSITIVE:
            replaced |= {(place[0], other): NEGATIVE for other in values.get(place[1], ())}
    return replace(split, labels=split.labels.replace({**replaced, **changed}), usage=(*split.usage, usage))


def _list_accepted(path: PathLike, usage: Usage) -> list[Suggestion]:
    """Return the accepted rows of a file of corrections, whose account is `usage`; UserError if two contradict."""
    decided: dict[_Key, bool] = {}
    accepted: dict[tuple[str, str], Suggestion] = {}
    for row, answer in read_answers(path):
        if answer is None:
            usage.leave_out("without an answer in the column accept", f"line {row.line}")
            continue
        usage.use()
        image, label, _ = key = row.key
        first = accepted.setdefault((image, label), row) if answer else row
        if decided.setdefault(key, answer) != answer or first.key != key:
            raise UserError(
                f"{path} line {row.line} contradicts an earlier line about {image} and '{label}'; delete one"
            )
    return list(accepted.values())


def read_answers(path: PathLike) -> list[tuple[Suggestion, bool | None]]:
    """Return (row, whether it is accepted) for each row of a file of corrections; None stands for no answer.

    Raises UserError if the file is missing or invalid.
    """
    answers = []
    for row in read_suggestions(path):
        accepted = _ANSWERS.get(row.answer.lower())
        if accepted is None or isinstance(row.key[-1], str):
            column, words = ("accept", "yes, no") if accepted is None else ("suggested", "1, 0")
            raise UserError(
                f"{path} line {row.line} has {row.cells[column].strip()[:80]!r} under {column}, which should be "
                f"{words} or empty; correct it"
            )
        answers.append((row, accepted if row.answer else None))
    return answers


def read_suggestions(path: PathLike) -> list[Suggestion]:
    """Return the rows of a file of suggestions, which may be in an object store.

    A program for spreadsheets may have written it: with a byte order mark, another separator, or without the empty
    cells at the end of a row. Raises UserError if the file is missing or invalid.
    """
    with damage_explained(path):
        text = read_text(path)
        heading = next(filter(str.strip, io.StringIO(text)), "")
        separator = max(_SEPARATORS, key=heading.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = [unescape_cell(name.strip()) for name in next(filter(any, reader), [])]
        for name in _NEEDED:
            header[header.index(find_column(header, name, "its format", path))] = name
        header = [name or f"column {number}" for number, name in enumerate(header, 1)]
        if repeated := first_repeated(header):
            raise UserError(f"{path} has two columns '{repeated}'; rename one")
        rows = []
        for cells in filter(any, reader):
            if len(cells) > len(header):
                raise UserError(
                    f"{path} line {reader.line_num} has {len(cells)} cells, but there are {len(header)} columns; "
                    "enclose cells that contain a comma in double quotes"
                )
            shown = map(unescape_cell, cells)
            rows.append(Suggestion(reader.line_num, dict(itertools.zip_longest(header, shown, fillvalue=""))))
        return rows
