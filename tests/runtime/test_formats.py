"""Arrays of npz files, and tables that a spreadsheet opens."""

import csv
import io
import random

import numpy as np
import pytest

from mlmoe_jax.runtime.formats import (
    UNPACKED_BYTES,
    escape_cell,
    join_names,
    read_npz,
    read_rows,
    row_writer,
    split_names,
    unescape_cell,
)


# ----------------------------------------------------------------------------------------------------------------- npz
@pytest.mark.parametrize(
    ("array", "usual"),
    [
        *((array, 0) for array in (np.array(5), np.array(["a", "größe"]), np.array([b"x"]), np.zeros((0, 3), np.int8))),
        *((np.asarray([[1, 2], [3, 4]], np.float32, order=order), 0) for order in "CF"),
        (np.zeros(1_000_000, np.int8), UNPACKED_BYTES),  # far more than its size, but little
    ],
)
def test_arrays_are_read_as_numpy_reads_them(array, usual):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=array)
    found = read_npz(buffer, usual=usual)["a"]
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.flags.writeable) == (array.dtype, True)


# ---------------------------------------------------------------------------------------------------------- CSV cells
@pytest.mark.parametrize(
    "text", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "'=1", "''+1", *"＝＋－＠"]
)
def test_a_formula_is_written_as_text(text):
    assert escape_cell(text) == f"'{text}"
    assert unescape_cell(escape_cell(text)) == text


@pytest.mark.parametrize("cell", ["cat", "", "a=b", "'t Hooft", "'", "x-y", " =1", "é", -1, -0.5, 3, None])
def test_other_cells_are_unchanged(cell):
    assert escape_cell(cell) is cell
    assert not isinstance(cell, str) or unescape_cell(cell) == cell
    assert escape_cell(np.float32("nan")) == ""


# Short texts of characters that mean something in a table, and of others.
DRAW = random.Random(0)
CHARACTERS = "=+-@'\"\\,;\t\r\n\x1f\x85\u2028\ud800 aé\U0001f600"
TEXTS = ["".join(DRAW.choices(CHARACTERS, k=DRAW.randrange(5))) for _ in range(1000)]


def test_a_table_is_read_back_unchanged():
    rows, file = list(zip(TEXTS[::2], TEXTS[1::2], strict=True)), io.StringIO(newline="")
    write = row_writer(file)
    write(["=a", "b"])
    for row in rows:
        write(row)
    for row in csv.reader(io.StringIO(file.getvalue(), newline="")):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)
    assert read_rows(io.StringIO(file.getvalue(), newline="")) == [{"=a": a, "b": b} for a, b in rows]


def test_joined_names_are_split_again():
    for count in (1, 2, 5):
        for first in range(0, len(TEXTS), count):
            names = TEXTS[first : first + count]
            assert split_names(join_names(names)) == names


@pytest.mark.parametrize("separator", [", ", "|", "::"])
def test_another_separator_can_be_escaped_too(separator):
    assert split_names(rf"a{separator}b\{separator}c;d", separator) == ["a", f"b{separator}c;d"]


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("a;b", ["a", "b"]),
        (r"a\;b;c", ["a;b", "c"]),
        (r"a\b", [r"a\b"]),
        (r"a\\;b", ["a\\", "b"]),
        ("", [""]),
        (";", ["", ""]),
        ("a\\", ["a\\"]),
    ],
)
def test_cells_of_other_programs_are_split(cell, names):
    assert split_names(cell) == names
