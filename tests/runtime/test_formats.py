"""Tables that a spreadsheet opens."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmoe_jax.runtime.formats import guarded, join_names, plain, read_rows, row_writer, split_names

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "'=1", "''+1")
HARMLESS = ("cat", "", "a=b", "'t Hooft", "'", "x-y", " =1", "é")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_written_as_text(text):
    assert guarded(text) == f"'{text}"
    assert plain(guarded(text)) == text


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_is_unchanged(text):
    assert guarded(text) == text
    assert plain(text) == text


@pytest.mark.parametrize("number", [-1, -0.5, 3, None])
def test_numbers_are_unchanged(number):
    assert guarded(number) is number


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
