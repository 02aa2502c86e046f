"""Overrides given in Python, in the form of the command line: the config reads every value in one way."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlmoe_jax.errors import UserError

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def as_pairs(overrides: Overrides | None) -> list[tuple[str, str]]:
    """Return the pairs (dotted key, text) that overrides stand for.

    Raises UserError for None and for a section, neither of which a key can be set to.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, _text(key, value)) for key, value in pairs]


def _text(key: str, value: Any) -> str:
    if value is None or isinstance(value, Mapping):
        raise UserError(f"config key '{key}' cannot be set to {value!r}; give a value, or one key for each value")
    return repr(tuple(value)) if isinstance(value, list | tuple) else str(value)
