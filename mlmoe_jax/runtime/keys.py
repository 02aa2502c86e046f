"""The types of config keys: how each type parses a value, which values it allows, and what a key means.

A key is declared once, beside the part of the program that reads it. Defaults, validation, help, the reference page,
warnings about keys without an effect, names of run folders, resuming, and what a shared model keeps follow from its
declaration. `config/table.py` lists the sections.
"""

from __future__ import annotations

import abc
import ast
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import PurePath
from typing import Any, ClassVar

from mlmoe_jax.runtime.registry import Registry, nearest
from mlmoe_jax.runtime.stages import STAGES

KeyValues = Sequence[tuple[str, str]]  # pairs of a dotted key and the text of its value
# What happens if a key has changed when a run resumes.
ON_RESUME = {
    "fixed": "the run does not resume, since its results would differ",
    "reported": "the run resumes with a message, since its results can differ slightly",
    "free": "the run resumes, since its results do not depend on the key",
    "at_start": "the run resumes, since only its start reads the key, which is a part of its name",
}
# What a shared model keeps of a value, and who reads it. Of a path, only the last part is kept.
SHARED = {
    "value": "the value, which is a part of the model or of its preprocessing",
    "record": "the value, for people alone: the program that opens the model takes the default",
    "default": "nothing",
}


@dataclass(frozen=True)
class Others:
    """The values of a key other than `values`, for a condition of `only_if`."""

    values: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return value not in self.values


def others(*values: Any) -> Others:
    """Return a condition that holds for all values of a key but `values`."""
    return Others(values)


Conditions = Mapping[str, Collection[Any] | Others]
BY_STEPS: Conditions = {"train.fit": ("steps",)}  # of keys that a fit to convergence does not read


@dataclass(frozen=True)
class Meaning:
    """What a key or a section is for. A key inherits what it does not give from the sections around it.

    Attributes:
      only_if: key -> values, the settings without which the key has no effect. A name without a dot is a key in the
        same section. The conditions of the sections around a key apply as well.
      stages: the stages that read the key, names in STAGES; () inherits.
      on_resume: a name in ON_RESUME; "" inherits. The whole config has "fixed".
      shared: a name in SHARED; "" inherits. The whole config has "record".
    """

    _: KW_ONLY
    only_if: Conditions = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    on_resume: str = ""
    shared: str = ""

    def __post_init__(self):
        given = [(stage, STAGES) for stage in self.stages]
        given += [(self.on_resume, ON_RESUME), (self.shared, SHARED)]
        for name, known in given:
            if name and name not in known:
                raise ValueError(f"'{name}' is none of {', '.join(known)}")


@dataclass(frozen=True)
class Key(Meaning, abc.ABC):
    """A key of the config: its type, its allowed values, its default and its meaning.

    Attributes:
      allowed: the allowed values in words, such as "an integer above 0".
      doc: one sentence that describes the key.
      unit: the unit of a number; "" if it has none.
      required: whether each stored config has the key, since the current default would be wrong for an older run.
    """

    allowed: ClassVar[str]

    default: Any
    doc: str
    _: KW_ONLY
    unit: str = ""
    required: bool = False

    @abc.abstractmethod
    def parse(self, text: str) -> Any:
        """Return the value of a text of the command line; ValueError, SyntaxError or KeyError for a wrong type."""

    @abc.abstractmethod
    def allows(self, value: Any) -> bool:
        """Return whether a value has the type of the key and is an allowed value."""

    def hint(self, value: Any) -> str:
        """Return a hint for an error message about a wrong value, such as the nearest allowed value, or ""."""
        return ""

    def format(self, value: Any) -> str:
        """Return a value as the text that `parse` accepts."""
        return format_value(value)

    def portable(self, value: Any) -> Any:
        """Return what a shared model keeps of a value."""
        return self.default if self.shared == "default" else value

    def trusted(self, value: Any) -> Any:
        """Return what a program takes from a shared model, whose value may be hostile."""
        return self.portable(value) if self.shared == "value" else self.default


@dataclass(frozen=True)
class TextKey(Key):
    """A key whose value is any text, such as a name."""

    allowed: ClassVar[str] = "a string"

    def parse(self, text: str) -> str:
        return text

    def allows(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class PathKey(TextKey):
    """A key whose value is a path on this machine, which a shared model does not keep.

    `words` are values that are no paths.
    """

    _: KW_ONLY
    words: tuple[str, ...] = ()
    shared: str = "default"

    def portable(self, value: str) -> str:
        return value if value in self.words else PurePath(super().portable(value)).name


@dataclass(frozen=True)
class ChoiceKey(TextKey):
    """A key whose value is one of `choices`: a tuple, a mapping from names to descriptions, or a registry."""

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
    """A key whose value is a finite number > `above`, ≥ `least`, < `below` and ≤ `most`.

    The default of `most` is LARGEST, because a larger number is most likely a typo.
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
    """A key whose value is an integer within limits, or `auto`, stored as AUTO: the program chooses it."""

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
    """A key whose value is a tuple. Its text is a Python tuple or list, or items with a separator between them.

    Attributes:
      separator: the separator. It is "+" for an option of a config file, since commas separate these options.
    """

    _: KW_ONLY
    separator: str = ","

    def parse(self, text: str) -> tuple:
        if text[:1] not in ("(", "["):
            return tuple(self.parse_item(part) for part in text.split(self.separator) if part)
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

    @property
    def allowed(self) -> str:
        return f"strings separated by {'commas' if self.separator == ',' else self.separator}"

    def format(self, value: tuple[str, ...]) -> str:
        return self.separator.join(value)

    def allows_item(self, item: Any) -> bool:
        return isinstance(item, str)


@dataclass(frozen=True)
class ChoicesKey(TextsKey):
    """A key whose value is a tuple of one or more of the names `choices`, each once."""

    _: KW_ONLY
    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one or more of {', '.join(self.choices)}, each once"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and 0 < len(value) == len(set(value)) and set(value) <= set(self.choices)

    def hint(self, value: Any) -> str:
        return next((nearest(str(item), self.choices) for item in value if item not in self.choices), "")


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
class ColorKey(_NumbersKey):
    """A key whose value is a color: red, green and blue in [0, 1]."""

    allowed: ClassVar[str] = "three numbers from 0 to 1"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and len(value) == 3 and 0 <= min(value) <= max(value) <= 1


@dataclass(frozen=True)
class RulesKey(_TupleKey):
    """A key whose value is a tuple of rules (regular expression, value) for parameter paths.

    The first rule whose expression matches a path gives the value for the path (see models.rules). The value is a
    number if `factors`, otherwise True or False.
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
class ConfigSection(Meaning):
    """A section of the config: keys that belong together, and subsections.

    Attributes:
      doc: one sentence that describes the section.
      entries: name -> key or subsection.
      further: the type of keys with other names, which may be added to the section; None if no key may be added.
      optional: whether only the configs that use the section have it.
    """

    doc: str
    entries: Mapping[str, Key | ConfigSection] = field(default_factory=dict)
    further: Key | None = None
    optional: bool = False


def section(
    doc: str,
    /,
    *,
    further: Key | None = None,
    optional: bool = False,
    only_if: Conditions | None = None,
    stages: tuple[str, ...] = (),
    on_resume: str = "",
    shared: str = "",
    **entries: Key | ConfigSection,
) -> ConfigSection:
    """Return a section of the config, with its entries in the order in which the help lists them.

    A name without a dot in `only_if` is a key beside the section. `stages`, `on_resume` and `shared` apply to entries
    without their own. See `Meaning` and `ConfigSection`.
    """
    meaning = {"only_if": only_if or {}, "stages": stages, "on_resume": on_resume, "shared": shared}
    return ConfigSection(doc, entries, further, optional, **meaning)


def resolve(entry: Key | ConfigSection, name: str, around: Meaning) -> Key | ConfigSection:
    """Return `entry` with the meaning that it inherits, and a section with all its entries resolved.

    Names of keys in `only_if` become dotted names. `name` is the dotted name of `entry`, "" for the whole config.
    `around` is the resolved section around it.
    """
    place = name.rpartition(".")[0]
    own = {key if "." in key else f"{place}.{key}".lstrip("."): values for key, values in entry.only_if.items()}
    resolved = replace(
        entry,
        only_if={**around.only_if, **own},
        stages=entry.stages or around.stages,
        on_resume=entry.on_resume or around.on_resume,
        shared=entry.shared or around.shared,
    )
    if not isinstance(resolved, ConfigSection):
        return resolved
    prefix = f"{name}." if name else ""
    entries = {last: resolve(inner, f"{prefix}{last}", resolved) for last, inner in resolved.entries.items()}
    further = resolved.further and resolve(resolved.further, f"{prefix}NAME", resolved)
    return replace(resolved, entries=entries, further=further)


def walk(table: ConfigSection, prefix: str = "") -> Iterator[tuple[str, Key | ConfigSection]]:
    """Yield (dotted name, entry) for each key and each subsection of `table`, recursively.

    A subsection comes before its own entries. `prefix` is the text before each name, such as "data.".
    """
    for name, entry in table.entries.items():
        yield f"{prefix}{name}", entry
        if isinstance(entry, ConfigSection):
            yield from walk(entry, f"{prefix}{name}.")


def keys_of(registry: Registry, choice: str) -> dict[str, Key | ConfigSection]:
    """Return the keys that the entries of a registry declare. Each has the condition that an entry with it is chosen.

    `choice` is the key in the same section whose values are the names of the registry. Entries may share a key object.
    Raises ValueError if two entries declare different key objects with one name, or if an entry `FAMILY:NAME` declares
    keys, see `Registry`.
    """
    declared: dict[str, Key | ConfigSection] = {}
    users: dict[str, list[str]] = {}
    for name in registry:
        if ":" in name and registry.component(name).keys:
            raise ValueError(f"the family {name} declares keys, and no value of {choice} is {name}")
        for key, entry in registry.component(name).keys.items():
            if declared.setdefault(key, entry) is not entry:
                raise ValueError(f"{users[key][0]} and {name} declare different keys {key}; share one")
            users.setdefault(key, []).append(name)
    return {
        key: replace(entry, only_if={choice: tuple(users[key]), **entry.only_if}) for key, entry in declared.items()
    }


def key_like(value: Any) -> Key:
    """Return a config key of the type of `value` with `value` as its default, for an option of a config file."""
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
