"""npz files that ask for more memory than they may, and tables that a spreadsheet opens."""

import csv
import io
import resource
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import formats
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import (
    escape_cell,
    join_names,
    read_npz,
    read_rows,
    row_writer,
    split_names,
    unescape_cell,
)


# ----------------------------------------------------------------------------------------------------------------- npz
def stored(**arrays) -> io.BytesIO:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    "array",
    [np.float32([[1, 2], [3, 4]]), np.array(5), np.array(["a", "größe"]), np.array([b"x"]), np.zeros((0, 3), np.int8)],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_numpy_reads_them(array, order):
    array = np.asarray(array, order=order)
    found = read_npz(stored(a=array))["a"]
    np.testing.assert_array_equal(found, np.load(stored(a=array))["a"])
    assert (found.dtype, found.flags.writeable) == (array.dtype, True)


def member(header: str, content: bytes) -> io.BytesIO:
    """Return an npz with one array of this header."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + content)
    return buffer


HEADER = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"


@pytest.mark.parametrize(
    ("descr", "shape"),
    [
        ("'<f4'", "(1000000000000,)"),
        ("'<f4'", "(10**23,)"),
        ("'<f4'", "(" * 3000),
        ("'<f4'", "(-4,)"),
        ("'<f4'", "(0, 1000000000000)"),
        ("'<f4'", "(3,)"),  # more than there is
        ("'|O'", "(1,)"),
        ("'<U999999999'", "()"),
        ("[('a', '<f4')]", "(1,)"),
    ],
)
def test_a_header_that_does_not_fit_is_one_sentence_and_takes_no_memory(descr, shape, refusal):
    def read():
        with damage_explained("scores.npz"):
            read_npz(member(HEADER.format(descr, shape), b"\0" * 8))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(read).startswith("scores.npz is damaged: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000, "in KB"


def test_a_member_that_is_no_array_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.npy", b"")
    with pytest.raises(ValueError, match="'a' is not an array"):
        read_npz(buffer)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(monkeypatch):
    bomb = stored(a=np.zeros(1_000_000, np.int8))
    assert read_npz(bomb)["a"].nbytes == 1_000_000
    monkeypatch.setattr(formats, "UNPACKED_BYTES", 0)
    with pytest.raises(ValueError, match="would unpack to 1,000,128 bytes"):
        read_npz(bomb, usual=0)
    noise = np.random.default_rng(0).bytes(5000)
    assert read_npz(stored(a=np.frombuffer(noise, np.uint8)), usual=0)["a"].tobytes() == noise


def test_a_flipped_bit_is_found():
    content = bytearray(stored(a=np.arange(1000)).getvalue())
    content[len(content) // 2] ^= 1
    with pytest.raises(UserError, match="a is damaged"), damage_explained("a"):
        read_npz(io.BytesIO(content))


# ---------------------------------------------------------------------------------------------------------- CSV cells
@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "'=1", "''+1"])
def test_a_formula_is_written_as_text(text):
    assert escape_cell(text) == f"'{text}"
    assert unescape_cell(escape_cell(text)) == text


@pytest.mark.parametrize("cell", ["cat", "", "a=b", "'t Hooft", "'", "x-y", " =1", "é", -1, -0.5, 3, None])
def test_other_cells_are_unchanged(cell):
    assert escape_cell(cell) is cell
    assert not isinstance(cell, str) or unescape_cell(cell) == cell


@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan")])
def test_an_undefined_number_is_an_empty_cell(nan):
    file = io.StringIO(newline="")
    row_writer(file)(["cat", nan, 0.5, None])
    assert file.getvalue() == "cat,,0.5,\n"


@given(st.lists(st.lists(st.text(st.characters(exclude_characters="\x00")), min_size=2, max_size=2), max_size=4))
def test_a_table_is_read_back_unchanged(rows):
    file = io.StringIO(newline="")
    write = row_writer(file)
    write(["=a", "b"])
    for row in rows:
        write(row)
    for row in csv.reader(io.StringIO(file.getvalue(), newline="")):
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)
    assert read_rows(io.StringIO(file.getvalue(), newline="")) == [{"=a": a, "b": b} for a, b in rows]


@pytest.mark.parametrize("text", ['"open', "a,b\n1\n", "a\n1,2\n"])
def test_a_damaged_table_is_an_error(text):
    with pytest.raises((csv.Error, ValueError)):
        read_rows(io.StringIO(text, newline=""))


@given(st.lists(st.text(), min_size=1))
def test_joined_names_are_split_again(names):
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
