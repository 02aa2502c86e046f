"""Ordered (regex, value) rules over parameter paths, for freezing, learning rates and weight decay."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlmoe_jax.errors import UserError

Rules = Sequence[tuple[str, Any]]

_UNMATCHED = object()


def first_match(rules: Rules, path: str, default: Any) -> Any:
    """Return the value of the first rule whose regex matches anywhere in `path` (`re.search`), or `default`.

    Raises UserError for a regex that does not compile.
    """
    for pattern, value in rules:
        try:
            match = re.search(pattern, path)
        except re.error as error:
            raise UserError(f"the rule {pattern!r} is not a regular expression: {error}") from error
        if match:
            return value
    return default


def assign(rules: Rules, paths: Iterable[str]) -> dict[str, Any]:
    """Return {path: value of the first matching rule}. Raises UserError, with all paths that match no rule."""
    values = {path: first_match(rules, path, _UNMATCHED) for path in paths}
    if unmatched := [path for path, value in values.items() if value is _UNMATCHED]:
        raise UserError(f"no rule matches {', '.join(unmatched)}; add one, or end the rules with ('.*', value)")
    return values
