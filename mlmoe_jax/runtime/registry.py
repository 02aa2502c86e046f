"""Tables from names to objects in other modules, such as heads and losses."""

import difflib
import importlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mlmoe_jax.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """An entry of a registry: the place of an object, and the config keys that it reads.

    Attributes:
      place: "package.module:attribute".
      doc: one sentence that describes the entry, if it has a config section of its own; otherwise "".
      keys: name -> key or section of the config, see `runtime.keys`. They are known without importing the object.
    """

    place: str
    doc: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)


def component(place: str, doc: str = "", /, **keys: Any) -> Component:
    """Return an entry with config keys: its place, its sentence, and name -> key or section."""
    return Component(place, doc, keys)


class Registry(Generic[T]):
    """A mapping from names to objects. An object is imported when it is first used.

    The names are known without imports, so they can be choices of a config key:

        LOSSES = Registry("loss", {"bce": "mlmoe_jax.models.losses:binary_cross_entropy"})
        list(LOSSES)   # ["bce"]
        LOSSES["bce"]  # imports mlmoe_jax.models.losses and returns its binary_cross_entropy

    Args:
      kind: what an entry is, for error messages, such as "loss".
      entries: name -> "package.module:attribute", or a `Component` with config keys. The dict is not copied, so entries
        that are added later are included. An entry `FAMILY:NAME` stands for all names that begin with `FAMILY:`.
    """

    def __init__(self, kind: str, entries: Mapping[str, str | Component]):
        self.kind, self.entries = kind, entries

    def component(self, name: str) -> Component:
        """Return the entry `name`, without importing its object; UserError as in `__getitem__`."""
        if name not in self:
            raise UserError(f"there is no {self.kind} '{name}'{suggestion(name, self.entries)}")
        entry = self.entries[_entry(name, self.entries)]
        return entry if isinstance(entry, Component) else Component(entry)

    def __getitem__(self, name: str) -> T:
        """Import and return the object `name`; UserError with the nearest known name if there is no such entry."""
        module, _, attribute = self.component(name).place.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _entry(name, self.entries) in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _entry(name: str, entries: Container[str]) -> str:
    """Return the entry `FAMILY:NAME` if `name` belongs to such a family, otherwise `name`."""
    family, _, member = name.partition(":")
    return f"{family}:NAME" if member and f"{family}:NAME" in entries else name


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown `name`: the nearest known name, or all if none is similar."""
    known = list(known)
    return nearest(name, known) or (f"; there are {', '.join(known)}" if known else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error that suggests the nearest known name; "" if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
