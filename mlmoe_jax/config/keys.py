"""The types of config keys: how each type reads a value from text, and which values it allows.

The tables in `config.tables` consist of these keys. Defaults, validation, help and the reference page come from them.
"""

from __future__ import annotations

import abc
import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from mlmoe_jax.runtime.registry import Registry, nearest

ANY = -math.inf  # the lower limit of an unlimited number


@dataclass(frozen=True)
class Key(abc.ABC):
    """One key of the config.

    Attributes:
      takes: the allowed values in words, such as "an integer above 0".
      default: the default value.
      doc: one sentence about the key.
      unit: unit of a number, empty if it has none.
    """

    takes: ClassVar[str]

    default: Any
    doc: str
    _: KW_ONLY
    unit: str = ""

    @abc.abstractmethod
    def read(self, text: str) -> Any:
        """Return the value of a text; ValueError, SyntaxError or KeyError if it is not a value of this type."""

    @abc.abstractmethod
    def allows(self, value: Any) -> bool:
        """Return whether the key allows a value."""

    def nearest(self, value: Any) -> str:
        """Return the end of an error about a wrong value: the nearest allowed value, if any."""
        return ""

    def text_of(self, value: Any) -> str:
        """Return a value as text for the command line."""
        return as_text(value)


@dataclass(frozen=True)
class Text(Key):
    """Any text, such as a name or a path."""

    takes: ClassVar[str] = "a string"

    def read(self, text: str) -> str:
        return text

    def allows(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class Choice(Text):
    """One of several names.

    Attributes:
      of: the names, a mapping from names to meanings, or a registry.
    """

    _: KW_ONLY
    of: tuple[str, ...] | Mapping[str, str] | Registry

    @property
    def takes(self) -> str:
        return f"one of {', '.join(self.of)}"

    def allows(self, value: Any) -> bool:
        return value in self.of

    def nearest(self, value: Any) -> str:
        return nearest(str(value), self.of)


@dataclass(frozen=True)
class Flag(Key):
    """True or false."""

    takes: ClassVar[str] = "true or false"

    def read(self, text: str) -> bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Number(Key):
    """A finite number with a lower limit, `above` or `least` (ANY = none), and an upper limit, `below` or `most`.

    Attributes:
      LARGEST: default limit of the magnitude. A larger number is most likely a typo.
    """

    _: KW_ONLY
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    word: ClassVar[str] = "a number"
    LARGEST: ClassVar[float] = 1e9

    @property
    def takes(self) -> str:
        if self.least == ANY:
            return f"any {self.word.split()[-1]}"
        if self.above is not None:
            upper = f" and at most {_digits(self.most)}" if self.most is not None else ""
            upper = f" and below {self.below:g}" if self.below is not None else upper
            return f"{self.word} above {self.above:g}{upper}"
        if self.most is not None:
            return f"{self.word} from {self.least:g} to {_digits(self.most)}"
        if self.below is not None:
            return f"{self.word} from {self.least:g} to below {self.below:g}"
        return f"{self.word} of at least {self.least:g}"

    def read(self, text: str) -> float:
        return float(text)

    def allows(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        enough = value >= self.least if self.least is not None else value > self.above
        most = self.LARGEST if self.most is None else self.most
        return enough and -self.LARGEST <= value <= most and (self.below is None or value < self.below)

    def nearest(self, value: Any) -> str:
        general = self.most is None and self.below is None and isinstance(value, int | float)
        return f"; the largest is {self.LARGEST:,.0f}" if general and abs(value) > self.LARGEST else ""


def _digits(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


@dataclass(frozen=True)
class Integer(Number):
    """An integer with limits."""

    word: ClassVar[str] = "an integer"
    LARGEST: ClassVar[float] = 1_000_000

    def read(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class AutoInteger(Integer):
    """An integer with limits, or `auto`, which lets the program choose. A config stores `auto` as the number AUTO."""

    AUTO: ClassVar[int] = -1

    @property
    def takes(self) -> str:
        return f"auto or {super().takes}"

    def read(self, text: str) -> int:
        return self.AUTO if text == "auto" else super().read(text)

    def allows(self, value: Any) -> bool:
        return value == self.AUTO or super().allows(value)

    def text_of(self, value: Any) -> str:
        return "auto" if value == self.AUTO else super().text_of(value)


@dataclass(frozen=True)
class _Tuple(Key):
    """Several values, written as a Python tuple or list, or separated by commas."""

    def read(self, text: str) -> tuple:
        if text[:1] not in ("(", "["):
            return tuple(self.read_one(part) for part in text.split(",") if part)
        value = ast.literal_eval(text)
        return tuples(value) if isinstance(value, tuple | list) else (value,)

    def read_one(self, text: str) -> Any:
        return text


@dataclass(frozen=True)
class Texts(_Tuple):
    """Texts, such as the names of splits."""

    takes: ClassVar[str] = "strings separated by commas"

    def allows(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


@dataclass(frozen=True)
class _Numbers(_Tuple):
    def read_one(self, text: str) -> float:
        return float(text)

    def allows(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and all(
            isinstance(one, int | float) and abs(one) <= Number.LARGEST for one in value
        )


@dataclass(frozen=True)
class Interval(_Numbers):
    """The bounds of a range to draw from."""

    takes: ClassVar[str] = "two numbers above 0, the smaller one first"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and len(value) == 2 and 0 < value[0] <= value[1]


@dataclass(frozen=True)
class Shares(_Numbers):
    """One or more fractions of a whole."""

    takes: ClassVar[str] = "one or more numbers from 0 to below 1"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and len(value) > 0 and all(0 <= one < 1 for one in value)


@dataclass(frozen=True)
class Rules(_Tuple):
    """Ordered rules over parameter paths. The first match counts (see models.rules).

    Attributes:
      factors: whether the value of a rule is a number instead of True or False.
    """

    _: KW_ONLY
    factors: bool = False

    @property
    def takes(self) -> str:
        return f"(regex, {'number' if self.factors else 'True or False'}) pairs"

    def allows(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and all(map(self._allows_rule, value))

    def _allows_rule(self, rule: Any) -> bool:
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
            return False
        try:
            re.compile(rule[0])
        except re.error:
            return False
        is_number = isinstance(rule[1], int | float) and abs(rule[1]) <= Number.LARGEST
        return is_number and isinstance(rule[1], bool) != self.factors


@dataclass(frozen=True)
class Section:
    """Keys that belong together, and subsections.

    Attributes:
      further: type of the keys that may be added; None if no key may be added.
    """

    doc: str
    entries: Mapping[str, Key | Section] = field(default_factory=dict)
    further: Key | None = None


def section(doc: str, /, *, further: Key | None = None, **entries: Key | Section) -> Section:
    """Return a section of the table. The keyword arguments are its entries, in the order of the help."""
    return Section(doc, entries, further)


def walk(table: Section, prefix: str = "") -> Iterator[tuple[str, Key | Section]]:
    """Yield each entry of a section with its dotted name. A section comes before its entries."""
    for name, entry in table.entries.items():
        yield f"{prefix}{name}", entry
        if isinstance(entry, Section):
            yield from walk(entry, f"{prefix}{name}.")


def key_like(value: Any) -> Key:
    """Return a key that reads text as the type of `value`, for an option of a config file."""
    keys = {
        bool: Flag(value, ""),
        int: Integer(value, "", least=ANY),
        float: Number(value, "", least=ANY),
        tuple: Texts(value, ""),
        str: Text(value, ""),
    }
    return keys[type(value)]


def tuples(value: Any) -> Any:
    """Return `value` with all lists, also nested lists, as tuples."""
    return tuple(tuples(item) for item in value) if isinstance(value, tuple | list) else value


def as_text(value: Any) -> str:
    """Return a value as text for the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and all(isinstance(item, str | float) for item in value):
        return ",".join(map(str, value))
    return str(value)
