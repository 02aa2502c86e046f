"""Overrides given in Python, converted to the text form of the command line, so that values are read in one way."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlmoe_jax.errors import UserError

Overrides = Mapping[str, Any] | Sequence[tuple[str, Any]]


def as_pairs(overrides: Overrides | None) -> list[tuple[str, str]]:
    """Return overrides as pairs (dotted key, text); UserError for the value None and for a whole section."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    return [(key, _text(key, value)) for key, value in pairs]


def _text(key: str, value: Any) -> str:
    if value is None or isinstance(value, Mapping):
        raise UserError(f"config key '{key}' cannot be set to {value!r}; give a value, or one key for each value")
    return repr(tuple(value)) if isinstance(value, list | tuple) else str(value)
