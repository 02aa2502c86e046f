"""Formats of files: strict JSON, npz and XML files from untrusted sources, and the cells of CSV tables.

`numpy.load` would unpack a file of 2 MB to 2 GB, so the unpacked size is checked against the size of the file first.

Spreadsheets evaluate a cell that begins with = + - or @, also after a tab or a carriage return. Names of labels and
images are untrusted, so such a cell is written with an apostrophe before it, which `unescape_cell` removes.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO
from xml.etree import ElementTree

from mlmoe_jax.runtime.files import MIB

if TYPE_CHECKING:
    import numpy as np

# Any array file may unpack to this many bytes, because labels, mostly zeros, compress far.
UNPACKED_BYTES = 256 * MIB
MOST_HEADER = 100_000_000  # bytes, as in the library safetensors
UNPACK_RATIO = 100  # a larger array file may unpack to this many times its size
_START = r"[=+\-@\t\r＝＋－＠]"  # the last four are full-width, as spreadsheets also read them
_FORMULA = re.compile(f"'*{_START}")  # a text that begins with apostrophes gets one more
_ESCAPED = re.compile(f"'+{_START}")
_LITERAL = re.compile(  # text in parentheses is a name unless it has a quote or a comma
    r"""\[.*\]|\{.*\}|\((.*['",].*)?\)|(["']).*\2|[\w.]*(array|set|list|tuple|Index)\(.*\)""", re.DOTALL
)


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as strict JSON. A float that is not finite, such as an undefined mAP, becomes null."""

    def strict(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: strict(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [strict(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(strict(value), indent=indent, allow_nan=False)


def read_npz(file: BinaryIO, *, usual: int = UNPACKED_BYTES, ratio: int = UNPACK_RATIO) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file, open in binary mode, by name. Pickled objects are refused.

    The arrays may have `usual` bytes or `ratio` times the size of the file, whichever is larger. Call this
    function inside `files.damage_explained`, because it raises exceptions of any type if the file is damaged or too
    large.
    """
    import numpy as np  # `--help` needs the other functions, and not numpy

    most = max(usual, ratio * file.seek(0, os.SEEK_END))
    with zipfile.ZipFile(file) as archive:
        if (unpacked := sum(member.file_size for member in archive.infolist())) > most:
            raise ValueError(f"it would unpack to {unpacked:,} bytes, more than {most:,}")
    file.seek(0)
    # Memory for the size in a header is only reserved: an array that is longer than its member raises an error.
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    for name, array in arrays.items():
        is_plain = isinstance(array, np.ndarray) and array.dtype.fields is None
        # An axis beside an axis of size 0 needs no memory, but makes lists and loops as long as its size.
        if not is_plain or math.prod(side or 1 for side in array.shape) > most:
            raise ValueError(f"its member {name[:100]!r} is not an array of numbers or text")
    return arrays


def read_metadata(content: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file by name. Call it inside `files.damage_explained`."""
    return read_header(io.BytesIO(content)).get("__metadata__", {})


def read_header(file: BinaryIO, *, most: int = MOST_HEADER) -> dict[str, Any]:
    """Return the header of a safetensors file: the names of its tensors and "__metadata__", with what they are.

    It may have `most` bytes. Call it inside `files.damage_explained`.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > most:
        raise ValueError(f"its header has {length:,} bytes")
    return json.loads(file.read(length))


def read_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; ValueError if it has another value."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def refuse_doctype(*declared: object) -> None:
    """Raise ValueError, for a document type declaration in XML. Its entities could expand without a bound."""
    raise ValueError("it has a document type, which is not read")


class _XmlBuilder(ElementTree.TreeBuilder):
    doctype = refuse_doctype


def parse_xml(file: BinaryIO) -> ElementTree.Element:
    """Return the root of an XML document; ParseError if it is malformed, ValueError for a document type declaration."""
    parser = ElementTree.XMLParser(target=_XmlBuilder())
    return ElementTree.parse(file, parser).getroot()


def escape_cell(cell: Any) -> Any:
    """Return the value to write into a CSV cell.

    A text that a spreadsheet would evaluate as a formula gets an apostrophe at its start. nan becomes "". Any other
    value is returned unchanged.
    """
    if cell != cell:  # only nan differs from itself
        return ""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def unescape_cell(cell: str) -> str:
    """Return the original text of a cell that `escape_cell` returned."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def row_writer(file: TextIO) -> Callable[[Iterable[Any]], None]:
    """Return a function that writes one row of cells to a CSV file, with `escape_cell` applied to each cell."""
    line = io.StringIO(newline="")
    table = csv.writer(line, lineterminator="\r\n")  # csv then quotes "\r" and "\n"; with "\n" it leaves "\r" bare

    def write(cells: Iterable[Any]) -> None:
        table.writerow([escape_cell(cell) for cell in cells])
        file.write(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()

    return write


def read_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of a table of `row_writer` as column -> text; csv.Error or ValueError if it is damaged."""
    rows = [[unescape_cell(cell) for cell in row] for row in csv.reader(lines, strict=True)]
    heading = rows[0] if rows else []
    return [dict(zip(heading, row, strict=True)) for row in rows[1:]]


def join_names(names: Sequence[str]) -> str:
    r"""Join names with `;` to the text of one cell. `;` and `\` in a name are escaped by a backslash, as in `a\;b`."""
    return ";".join(name.replace("\\", r"\\").replace(";", r"\;") for name in names)


def split_names(cell: str, separator: str = ";") -> list[str]:
    """Split the text of a cell into names: the inverse of `join_names`. A backslash before another character stays."""
    if "\\" not in cell:
        return cell.split(separator)
    names, escaped = [""], re.escape(separator)
    for part in re.split(rf"(\\\\|\\{escaped}|{escaped})", cell):
        if part == separator:
            names.append("")
        else:
            names[-1] += part[1:] if part in ("\\\\", f"\\{separator}") else part
    return names


def read_cell_names(cell: str, separator: str = ";") -> list[str]:
    """Return the names in a cell.

    The cell has names joined by `separator`, or a list as JSON, Python or NumPy writes it. The list may also be the
    value of the key `choices` of an object, as Label Studio writes it. Names keep spaces around them, and can be empty.
    Raises ValueError if the cell has the form of a literal that is not a list of names.
    """
    text = cell.strip()
    if not _LITERAL.fullmatch(text):
        return split_names(cell, separator)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(re.sub(r"""(?<=['"])\s+(?=['"])""", ", ", text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError("a literal that cannot be read") from error
    if isinstance(value, dict) and list(value) == ["choices"]:
        value = value["choices"]
    names = split_names(value, separator) if isinstance(value, str) else value
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        raise ValueError("a literal that is not a list of names")
    return sorted(names) if isinstance(names, set) else list(names)
