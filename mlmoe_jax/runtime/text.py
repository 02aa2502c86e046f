"""Format names and numbers as text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence


def abbreviate(names: Sequence[str], most: int = 8, *, separator: str = ", ") -> str:
    """Join the first `most` names of a list. If there are more names, append … and the total number."""
    more = [f"… ({len(names)})"] if len(names) > most else []
    return separator.join([*names[:most], *more])


def printable(text: str, most: int = 2000) -> str:
    """Return an untrusted text as one line of at most `most` characters, with control characters escaped."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return line if len(line) <= most else f"{line[:most]} …"


def compose(text: str) -> str:
    """Return a text in Unicode's form NFC, in which equal texts have equal characters.

    Other programs write é as one character or as e and an accent, and a Mac names files in the second form.
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def unicode_forms(text: str) -> list[str]:
    """Return a text as it is, then composed (NFC) and decomposed (NFD), without repetition."""
    return list(dict.fromkeys((text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFD")))))


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, such as "1 image" and "1,200 images"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(value: float | None, digits: int = 2, *, sign: str = "-") -> str:
    """Return a fraction as text in percent, with `digits` decimals and no percent sign; "–" for None and nan.

    `sign` is as in format specifications: "+" also writes the sign of positive numbers.
    """
    return "–" if value is None or math.isnan(value) else f"{100 * value:{sign}.{digits}f}"
