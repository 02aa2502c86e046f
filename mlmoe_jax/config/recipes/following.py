"""Settings that follow others until they are set themselves.

A published setting may depend on another one, as the learning rate on the backbone. As a number it would stay behind if
a flag, a sweep or a line of Python changed the other setting. Here it is a lazy reference of ml_collections: it is
computed whenever it is read, a value that is set replaces the computation, and run folders store the value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FieldReference


class _Computation(NamedTuple):
    """An operation in the form in which FieldReference calls it: `fn` of its own value and of the values of `args`."""

    fn: Callable[..., Any]
    args: list[FieldReference]


def follow(config: ConfigDict, key: str, compute: Callable[..., Any], *others: str) -> None:
    """Let the dotted `key` of a whole config be `compute` of the values of the keys `others`, until `key` is set."""
    followed = [section.get_ref(leaf) for section, leaf in (_place(config, other) for other in others)]
    value = compute(*(reference.get() for reference in followed))
    section, leaf = _place(config, key)
    section[leaf] = FieldReference(value, op=_Computation(lambda _, *values: compute(*values), followed))


def _place(config: ConfigDict, key: str) -> tuple[ConfigDict, str]:
    *parents, leaf = key.split(".")
    for name in parents:
        config = config[name]
    return config, leaf
