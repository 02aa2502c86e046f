"""The options of a measurement: the fields of its dataclass `Options`, as flags of a command line."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from mlmoe_jax.errors import UserError

T = TypeVar("T")
SEEDS, RATES = (0, 1, 2), (3e-4, 1e-3, 3e-3, 1e-2)  # of most measurements


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


READ = {tuple[int, ...]: integers, tuple[float, ...]: numbers}


def parse(kind: type[T], words: Sequence[str], program: str, about: str) -> T:
    """Return the options that a command line gives, or end with a message about a wrong one.

    A field without a default must be given. Numbers of a tuple are separated by commas; its texts and paths are words.

    Args:
      kind: the dataclass.
      words: the command line.
      program: the name of the program.
      about: the text of --help, which explains the options.
    """
    parser = argparse.ArgumentParser(program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one, given in zip(fields(kind), typing.get_type_hints(kind).values(), strict=True):
        flag: dict[str, Any] = {"required": one.default is MISSING, "default": one.default}
        if given is bool:
            parser.add_argument(f"--{one.name}", action="store_true")
            continue
        if given not in READ and typing.get_origin(given) is tuple:
            given, flag["nargs"] = typing.get_args(given)[0], "+"
        if choices := typing.get_args(given) if typing.get_origin(given) is typing.Literal else ():
            given, flag["choices"] = str, choices
        default = "" if flag["required"] else f"default: {one.default}"
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=READ.get(given, given), help=default, **flag)
    values = vars(parser.parse_args(words))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def require_known(flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for a name that an option does not have."""
    for name in names:
        if name not in known:
            raise UserError(f"--{flag}: {name!r} is none of {'; '.join(known)}")
