import csv
import json
import math

import pytest

from mlmoe_jax.runtime.table import Column, Outcome, Table
from mlmoe_jax.runtime.text import abbreviate, compose, percent, printable, unicode_forms


@pytest.fixture
def table():
    columns = [Column("label", align="<"), Column("images", "{:,}".format), Column("AP, %", percent, width=8)]
    rows = [["=cat|dog", 1200, 0.123456], ["x", None, math.nan], ["y", "none"]]
    return Table(columns, rows, title="val", notes=["one note", "another"])


def test_text_is_aligned_and_a_short_row_ends_in_free_text(table):
    assert table.text().split("\n") == [
        "val",
        "label     images     AP, %",
        "=cat|dog   1,200     12.35",
        "x                        –",
        "y         none",
        "one note",
        "another",
    ]
    rows = [["", "a", "bcd"], ["name", "10000000", "2"], ["x", "a long failure"], [""], ["y", "1", ""]]
    assert Table(["", "a", "bcd"], rows[1:]).text().split("\n") == [
        "             a  bcd",
        "name  10000000    2",
        "x     a long failure",
        "",
        "y            1",
    ]


def test_long_notes_are_wrapped():
    lines = Table(["a"], [["b"]], notes=["word " * 50]).text().splitlines()
    assert max(map(len, lines)) <= 120
    assert [line.startswith("  ") for line in lines[2:]] == [False, True, True]


def test_columns_without_names_have_no_heading():
    assert Table(["", ""], [["seen", 3], ["b", 12]]).text() == "seen   3\nb     12"
    assert Table([], []).text() == ""


def test_markdown_has_a_heading_whole_rows_and_a_list_of_notes(table):
    assert table.markdown().split("\n") == [
        "# val",
        "",
        "| label | images | AP, % |",
        "|---|---:|---:|",
        r"| =cat\|dog | 1,200 | 12.35 |",
        "| x |  | – |",
        "| y | none |  |",
        "",
        "* one note",
        "* another",
        "",
    ]
    assert Table(["a"], [["b"]]).markdown() == "| a |\n|---|\n| b |\n"


def test_csv_has_values_with_all_digits_and_no_formulas(table):
    head, first, *rest = csv.reader(table.csv().splitlines())
    assert head == ["label", "images", "AP, %"]
    assert first == ["'=cat|dog", "1200", "0.123456"]
    assert rest == [["x", "", ""], ["y", "none"]]


def test_json_is_the_rows_or_the_document(table):
    first, second, third = json.loads(table.json())
    assert first == {"label": "=cat|dog", "images": 1200, "AP, %": 0.123456}
    assert second == {"label": "x", "images": None, "AP, %": None}
    assert third == {"label": "y", "images": "none"}
    assert Table(["a"], [[1]], document={"a": math.nan}).json() == '{\n  "a": null\n}'


def test_an_outcome_is_its_parts_as_text_and_one_document_as_json(table):
    other = Table(["a"], [[1]])
    assert Outcome([other, "end"]).text() == "a\n1\n\nend"
    assert Outcome().text() == ""
    assert Outcome(["begin", other, table]).json() == other.json()
    assert Outcome([other], document=[]).json() == "[]"
    assert Outcome(["only a sentence"]).json() == "only a sentence"


# ------------------------------------------------------------------------------------------------------------ text
def test_some_names():
    assert abbreviate(["a", "b"]) == "a, b"
    assert abbreviate(list("abcde"), 3) == "a, b, c, … (5)"


def test_percent():
    assert percent(0.12345) == "12.35"
    assert percent(0.12345, 0) == "12"
    assert percent(0.5, sign="+") == "+50.00"
    assert percent(None) == percent(math.nan) == "–"


def test_a_text_of_others_is_one_line_without_control_characters():
    assert printable("no file \x1b[31mred\nline\ud800") == r"no file \x1b[31mred\nline\ud800"
    assert printable("größe …") == "größe …"
    assert printable("x" * 11, most=10) == "x" * 10 + " …"


def test_the_forms_of_a_text():
    composed, decomposed = "\u00e9\u00e8.png", "e\u0301e\u0300.png"
    assert compose(decomposed) == compose(composed) == composed
    assert unicode_forms("\u00e9e\u0300.png") == ["\u00e9e\u0300.png", composed, decomposed]
    assert unicode_forms("a.png") == ["a.png"]
