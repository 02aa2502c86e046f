"""Corrections of the labels of the training split, a CSV that `data.corrections` names.

`--mode=data --audit` writes the suggestions, and a person fills the last column:

    image,label,given,suggested,score,accept
    beach/001.jpg,boat,0,1,0.0213,yes
    beach/002.jpg,sea,1,0,0.1408,

A row with yes (or y, true, x, 1) in `accept` gives the label of the image the code in `suggested`: 1, 0, or empty for
unknown, as in a table with one column per class. All other rows, and columns with other names, change nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from mlmoe_jax.data.sources.own_images import refuse_spreadsheet
from mlmoe_jax.data.sources.tables import CODE_OF_CELL, read_columns
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, read_bytes
from mlmoe_jax.runtime.formats import unescape_cell

COLUMNS = ("image", "label", "given", "suggested", "score", "accept")
CELL_OF = {code: cell for cell, code in reversed(CODE_OF_CELL.items())}  # of the spellings of a code, the first
_NEEDED = ("image", "label", "suggested", "accept")
_ANSWERS = {
    **dict.fromkeys(("yes", "y", "true", "x", "1", "1.0"), True),
    **dict.fromkeys(("", "no", "n", "false", "0", "0.0"), False),
}


class Correction(NamedTuple):
    """An accepted row of a file of corrections.

    Attributes:
      line: line number of the row.
      image: name of the image.
      label: name of the label.
      code: the corrected label code.
    """

    line: int
    image: str
    label: str
    code: int


def correct_labels(split: Split, path: str | os.PathLike) -> Split:
    """Return a split in which the accepted corrections of a file replace label codes.

    Raises:
      UserError: the file is missing or invalid, an accepted row names an image or a label that the split does not have,
        or two accepted rows contradict each other.
    """
    columns = {name: k for k, name in enumerate(split.classes)}
    rows = {name: row for row, name in enumerate(split.ids)}
    labels, codes = split.labels.copy(), {}
    for line, image, label, code in read_corrections(path):
        if image not in rows or label not in columns:
            unknown = f"label '{label}'" if image in rows else f"image '{image}'"
            raise UserError(
                f"{path} line {line} corrects the {unknown}, which split {split.name} does not have; write the name as "
                "the data set has it, or clear accept in this line"
            )
        if codes.setdefault((image, label), code) != code:
            raise UserError(f"{path} line {line} contradicts an earlier line about {image} and '{label}'; delete one")
        labels[rows[image], columns[label]] = code
    return replace(split, labels=labels)


def read_corrections(path: str | os.PathLike) -> list[Correction]:
    """Return the accepted rows of a file of corrections, which may be in an object store.

    Raises UserError if the file is missing or invalid.
    """
    refuse_spreadsheet(path)
    with damage_explained(path):
        # As the suggestions are written; a spreadsheet program puts a byte order mark before them.
        text = io.StringIO(read_bytes(path).decode("utf-8-sig", errors="surrogateescape"), newline="")
        return list(_read_accepted(text, path))


def _read_accepted(lines: Iterable[str], path: str | os.PathLike) -> Iterator[Correction]:
    for line, (image, label, suggested, accept) in read_columns(lines, _NEEDED, path):
        code = CODE_OF_CELL.get(suggested.strip())
        accepted = _ANSWERS.get(accept.strip().lower())
        if code is None or accepted is None:
            raise UserError(
                f"{path} line {line} has {suggested[:80]!r} under suggested, which should be 1, 0 or empty, and "
                f"{accept[:80]!r} under accept, which should be yes, no or empty; correct it"
            )
        if accepted:
            yield Correction(line, unescape_cell(image), unescape_cell(label), code)
