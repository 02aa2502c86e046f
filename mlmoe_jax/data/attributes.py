"""Attributes: labels of which exactly one is present in an image, such as its color (`data.attributes`).

The key names columns of a table whose cells are values, such as color,weather; or a YAML file:

    color: [red, blue, white]
    weather: {values: [sunny, rain], optional: true}

The label of a value is `color: red`. In your own data, a label `red` is this label too. An optional attribute has
`none` as its last value, see `label_tree.Attribute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import yaml

from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN
from mlmoe_jax.data.label_tree import MOST_TREE, Attribute, TextLoader
from mlmoe_jax.data.names import is_no_value, label_problem
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import PathLike, damage_explained, read_text
from mlmoe_jax.runtime.text import abbreviate, compose

NONE = "none"
_FORM = "write such as `color: [red, blue]` or `weather: {values: [sunny, rain], optional: true}`"


@dataclass(frozen=True)
class AttributeValues:
    """The values of each attribute by its name; () if any cell of its column is a value.

    `optional` has the names of the optional attributes.
    """

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of all known values."""
        return tuple(f"{name}: {value}" for name, values in self.values.items() for value in values)

    @cached_property
    def _by_value(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for label in self.labels:
            found.setdefault(label.partition(": ")[2], []).append(label)
        return found

    def owns(self, label: str) -> bool:
        """Return whether a label has the name of an attribute before its value."""
        return ": " in label and label.partition(": ")[0] in self.values

    def spell(self, name: str) -> str:
        """Return the label of a value, and any other label unchanged; ValueError if it is no value, or of several."""
        if len(found := self._by_value.get(name, [])) > 1:
            raise ValueError(f"which may be {' or '.join(found)}; write one of these")
        if found:
            return found[0]
        attribute, _, value = name.partition(": ")
        if not self.owns(name) or name in self.labels:
            return name
        if known := self.values[attribute]:
            raise ValueError(f"which is no value of {attribute} ({abbreviate(known)}); correct it, or add it there")
        if is_no_value(value) or ";" in value:
            raise ValueError("which is not one value; leave a cell empty if its value is unknown")
        return name

    def read_cells(self, cells: Mapping[str, Any]) -> dict[str, int]:
        """Return label -> code for the cells of columns with the names of attributes. An empty cell is unknown."""
        codes: dict[str, int] = {}
        for name, cell in cells.items():
            value = "" if cell is None else compose(f"{cell}").strip()
            known = [] if value else self.values[name]
            codes |= {f"{name}: {value}": POSITIVE} if value else {f"{name}: {one}": UNKNOWN for one in known}
        return codes

    def known_by(self, classes: Iterable[str] | None) -> AttributeValues:
        """Return the attributes of a model with these classes, which has all values. None is no model."""
        owned = sorted(filter(self.owns, classes or ()))
        parts = [label.partition(": ") for label in owned]
        values = {name: tuple(value for own, _, value in parts if own == name) for name in self.values}
        return replace(self, values={name: known or values[name] for name, known in self.values.items()})

    def find(self, classes: Sequence[str]) -> tuple[Attribute, ...]:
        """Return the attributes as indices of their labels in `classes`; UserError if one has no two labels there."""
        index = {label: k for k, label in enumerate(classes)}
        found = []
        for name, values in self.known_by(classes).values.items():
            labels = [next((one for one in (f"{name}: {v}", v) if one in index), f"{name}: {v}") for v in values]
            if lacking := [label for label in labels if label not in index]:
                raise UserError(f"the data has no label {abbreviate(lacking)}, which data.attributes names; correct it")
            if len(labels) < 2:
                raise UserError(
                    f"the attribute {name} of data.attributes has {'one value' if labels else 'no value'} in the data, "
                    "and needs two or more; correct the name, or list the values in a YAML file"
                )
            found.append(Attribute(name, tuple(map(index.__getitem__, labels)), name in self.optional))
        return tuple(found)


NO_ATTRIBUTES = AttributeValues()


def read_attributes(path: PathLike) -> AttributeValues:
    """Return the attributes of a YAML file; UserError if it is missing or has another form."""
    with damage_explained(path):
        content = yaml.load(read_text(path, MOST_TREE), Loader=TextLoader)
        if not isinstance(content, dict) or not content:
            raise ValueError(f"it has no attributes; {_FORM}")
        entries = {name: _read_entry(name, entry) for name, entry in content.items()}
    optional = frozenset(name for name, (_, is_optional) in entries.items() if is_optional)
    return named_attributes({name: values for name, (values, _) in entries.items()}, optional, f"{path}")


def _read_entry(name: str, entry: Any) -> tuple[tuple[str, ...], bool]:
    """Return the values of an attribute from its YAML value, and whether it is optional; ValueError for other YAML."""
    stated = entry if isinstance(entry, dict) else {"values": entry}
    values, optional = stated.get("values"), stated.get("optional", "false")
    are_texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
    if not are_texts or optional not in ("true", "false") or not stated.keys() <= {"values", "optional"}:
        raise ValueError(f"its entry {name!r:.100} has another form; {_FORM}")
    is_optional = optional == "true"
    return (*values, *[NONE] * is_optional), is_optional


def named_attributes(
    values: Mapping[str, tuple[str, ...]], optional: frozenset[str] = frozenset(), source: str = "data.attributes"
) -> AttributeValues:
    """Return attributes; UserError if a name or a value is not a label, or an attribute has a value twice."""
    for name, some in values.items():
        problem = label_problem(name) or (": " in name and "which has ': '; write another name")
        if problem:
            raise UserError(f"{source} has the attribute {name!r:.100}, {problem}")
        if len(set(some)) < len(some):
            raise UserError(f"{source} has a value of {name} twice (an optional attribute has none); delete one")
        if wrong := next(((value, why) for value in some if (why := label_problem(f"{name}: {value}"))), None):
            raise UserError(f"{source} has the value {wrong[0]!r:.100} of {name}, {wrong[1]}")
    return AttributeValues(values, optional)
