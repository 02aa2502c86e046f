import math

from mlmoe_jax.runtime.text import abbreviate, compose, percent, printable, unicode_forms


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
