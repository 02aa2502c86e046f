"""The types of config keys: how each type parses a value, and which values it allows.

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


@dataclass(frozen=True)
class Key(abc.ABC):
    """A key of the config: its type, its allowed values and its default.

    Attributes:
      allowed: the allowed values in words, such as "an integer above 0".
      default: the default value.
      doc: one sentence that describes the key.
      unit: the unit of a number; "" if it has none.
    """

    allowed: ClassVar[str]

    default: Any
    doc: str
    _: KW_ONLY
    unit: str = ""

    @abc.abstractmethod
    def parse(self, text: str) -> Any:
        """Return the value that a text of the command line stands for.

        Raises:
          ValueError, SyntaxError, KeyError: the text is not a value of this type.
        """

    @abc.abstractmethod
    def allows(self, value: Any) -> bool:
        """Return whether a value has the type of the key and is an allowed value."""

    def hint(self, value: Any) -> str:
        """Return a hint for an error message about a wrong value, such as the nearest allowed value, or ""."""
        return ""

    def format(self, value: Any) -> str:
        """Return a value as the text that `parse` accepts."""
        return format_value(value)


@dataclass(frozen=True)
class TextKey(Key):
    """A key whose value is any text, such as a name or a path."""

    allowed: ClassVar[str] = "a string"

    def parse(self, text: str) -> str:
        return text

    def allows(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class ChoiceKey(TextKey):
    """A key whose value is one of several names.

    Attributes:
      choices: the names: a tuple, a mapping from names to descriptions, or a registry.
    """

    _: KW_ONLY
    choices: tuple[str, ...] | Mapping[str, str] | Registry

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.choices)}"

    def allows(self, value: Any) -> bool:
        return value in self.choices

    def hint(self, value: Any) -> str:
        return nearest(str(value), self.choices)


@dataclass(frozen=True)
class FlagKey(Key):
    """A key whose value is true or false."""

    allowed: ClassVar[str] = "true or false"

    def parse(self, text: str) -> bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class NumberKey(Key):
    """A key whose value is a finite number within limits.

    Attributes:
      above: exclusive lower limit.
      least: inclusive lower limit.
      below: exclusive upper limit.
      most: inclusive upper limit. The default is LARGEST, because a larger number is most likely a typo.
    """

    type_name: ClassVar[str] = "a number"
    LARGEST: ClassVar[float] = 1e9

    _: KW_ONLY
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = LARGEST

    @property
    def allowed(self) -> str:
        limits = {"above": self.above, "of at least": self.least, "below": self.below, "at most": self.most}
        given = {words: limit for words, limit in limits.items() if math.isfinite(limit) and limit != self.LARGEST}
        return f"{self.type_name} {' and '.join(f'{words} {limit:,}' for words, limit in given.items())}".rstrip()

    def parse(self, text: str) -> float:
        return float(text)

    def allows(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.above < value < self.below and self.least <= value <= self.most


@dataclass(frozen=True)
class IntegerKey(NumberKey):
    """A key whose value is an integer within limits."""

    type_name: ClassVar[str] = "an integer"
    LARGEST: ClassVar[float] = 1_000_000

    _: KW_ONLY
    most: float = LARGEST

    def parse(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class AutoIntegerKey(IntegerKey):
    """A key whose value is an integer within limits, or `auto`, which lets the program choose the number.

    In a config, `auto` is stored as the integer AUTO.
    """

    AUTO: ClassVar[int] = -1

    @property
    def allowed(self) -> str:
        return f"auto or {super().allowed}"

    def parse(self, text: str) -> int:
        return self.AUTO if text == "auto" else super().parse(text)

    def allows(self, value: Any) -> bool:
        return value == self.AUTO or super().allows(value)

    def format(self, value: Any) -> str:
        return "auto" if value == self.AUTO else super().format(value)


@dataclass(frozen=True)
class _TupleKey(Key):
    """A key whose value is a tuple. Its text is a Python tuple or list, or items separated by commas."""

    def parse(self, text: str) -> tuple:
        if text[:1] not in ("(", "["):
            return tuple(self.parse_item(part) for part in text.split(",") if part)
        value = ast.literal_eval(text)
        return to_tuples(value) if isinstance(value, tuple | list) else (value,)

    def parse_item(self, text: str) -> Any:
        return text

    def allows(self, value: Any) -> bool:
        return isinstance(value, tuple | list) and all(map(self.allows_item, value))

    @abc.abstractmethod
    def allows_item(self, item: Any) -> bool:
        """Return whether `item` is an allowed item of the tuple."""


@dataclass(frozen=True)
class TextsKey(_TupleKey):
    """A key whose value is a tuple of texts, such as the names of splits."""

    allowed: ClassVar[str] = "strings separated by commas"

    def allows_item(self, item: Any) -> bool:
        return isinstance(item, str)


@dataclass(frozen=True)
class _NumbersKey(_TupleKey):
    def parse_item(self, text: str) -> float:
        return float(text)

    def allows_item(self, item: Any) -> bool:
        return isinstance(item, int | float) and abs(item) <= NumberKey.LARGEST


@dataclass(frozen=True)
class IntervalKey(_NumbersKey):
    """A key whose value is an interval (low, high), from which numbers are drawn."""

    allowed: ClassVar[str] = "two numbers above 0, the smaller one first"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and len(value) == 2 and 0 < value[0] <= value[1]


@dataclass(frozen=True)
class FractionsKey(_NumbersKey):
    """A key whose value is a tuple of one or more fractions in [0, 1)."""

    allowed: ClassVar[str] = "one or more numbers from 0 to below 1"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and len(value) > 0

    def allows_item(self, item: Any) -> bool:
        return super().allows_item(item) and 0 <= item < 1


@dataclass(frozen=True)
class RulesKey(_TupleKey):
    """A key whose value is a tuple of rules (regular expression, value) for parameter paths.

    The first rule whose expression matches a path gives the value for the path (see models.rules).

    Attributes:
      factors: whether the value of a rule is a number. If False, it is True or False.
    """

    _: KW_ONLY
    factors: bool = False

    @property
    def allowed(self) -> str:
        return f"(regex, {'number' if self.factors else 'True or False'}) pairs"

    def allows_item(self, item: Any) -> bool:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
            return False
        pattern, value = item
        try:
            re.compile(pattern)
        except re.error:
            return False
        if not self.factors:
            return isinstance(value, bool)
        return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= NumberKey.LARGEST


@dataclass(frozen=True)
class ConfigSection:
    """A section of the config: keys that belong together, and subsections.

    Attributes:
      doc: one sentence that describes the section.
      entries: name -> key or subsection.
      further: the type of keys with other names, which may be added to the section; None if no key may be added.
    """

    doc: str
    entries: Mapping[str, Key | ConfigSection] = field(default_factory=dict)
    further: Key | None = None


def section(doc: str, /, *, further: Key | None = None, **entries: Key | ConfigSection) -> ConfigSection:
    """Return a section of the config.

    Args:
      doc: one sentence that describes the section.
      further: the type of keys that may be added to the section; None if no key may be added.
      **entries: name -> key or subsection, in the order in which the help lists them.
    """
    return ConfigSection(doc, entries, further)


def walk(table: ConfigSection, prefix: str = "") -> Iterator[tuple[str, Key | ConfigSection]]:
    """Yield (dotted name, entry) for each key and each subsection of `table`, recursively.

    A subsection comes before its own entries.

    Args:
      table: the section.
      prefix: the text before each name, such as "data.".
    """
    for name, entry in table.entries.items():
        yield f"{prefix}{name}", entry
        if isinstance(entry, ConfigSection):
            yield from walk(entry, f"{prefix}{name}.")


def key_like(value: Any) -> Key:
    """Return a key of the type of `value` with `value` as its default, for an option of a config file."""
    keys = {bool: FlagKey, int: IntegerKey, float: NumberKey, tuple: TextsKey, str: TextKey}
    return keys[type(value)](value, "")


def to_tuples(value: Any) -> Any:
    """Return `value` with all lists converted to tuples, recursively."""
    return tuple(to_tuples(item) for item in value) if isinstance(value, tuple | list) else value


def format_value(value: Any) -> str:
    """Return a config value as text for the command line, such as "true" or "a,b"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and all(isinstance(item, str | float) for item in value):
        return ",".join(map(str, value))
    return str(value)
