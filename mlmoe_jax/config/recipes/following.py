"""Settings that are computed from other settings, until they are set themselves."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference


class _Computation(NamedTuple):
    """An operation for FieldReference, which calls `fn` with its own value and the values of `args`."""

    fn: Callable[..., Any]
    args: list[FieldReference]


def follow(config: ConfigDict, key: str, compute: Callable[..., Any], *sources: str) -> None:
    """Compute the value of a key from the values of other keys, until the key is set.

    A published setting may depend on another setting, such as the learning rate on the backbone. The key becomes a lazy
    reference of ml_collections. It is computed at each reading, so it follows later changes by a flag, a sweep or a
    line of Python. Run folders store the value.

    Args:
      config: a whole config, which changes.
      key: the dotted key to set.
      compute: function of the values of `sources`.
      *sources: dotted keys.
    """
    references = [section.get_ref(leaf) for section, leaf in (_section_and_leaf(config, source) for source in sources)]
    value = compute(*(reference.get() for reference in references))
    section, leaf = _section_and_leaf(config, key)
    section[leaf] = FieldReference(value, op=_Computation(lambda _, *values: compute(*values), references))


def _section_and_leaf(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    *parents, leaf = key.split(".")
    for name in parents:
        config = config[name]
    return config, leaf
