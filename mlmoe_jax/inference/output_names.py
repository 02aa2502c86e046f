"""The names of labels in the output of a prediction: renamed, joined or left out (`--rename`, `--leave-out`).

A list of names to leave out has a name per line. A table of new names has a name and a new name per line, with a tab or
a comma between. A name may be a pattern (* ? [abc]) for all labels that match. In a table of new names, a line with the
name of a label counts before patterns, and the first of several patterns counts.

Labels with the same new name are joined: their score is the highest, and their threshold the lowest of theirs.
"""

from __future__ import annotations

import csv
import fnmatch
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mlmoe_jax.data.label_tree import Attribute, LabelTree
from mlmoe_jax.data.names import names_problem
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.array_types import Ints
from mlmoe_jax.runtime.files import MIB, PathLike, damage_explained, read_text
from mlmoe_jax.runtime.formats import unescape_cell
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.text import abbreviate, compose, quantity

MOST_NAMES = 8 * MIB  # bytes of a file
_PATTERN = re.compile(r"[*?]|\[[^\]]+\]")


@dataclass(frozen=True, eq=False)
class OutputNames:
    """The J names in the output for the K labels of a model.

    Attributes:
      sources: i64[K], the index of the name of each label; −1 if the label is left out.
    """

    names: tuple[str, ...]
    sources: Ints

    @classmethod
    def of(cls, labels: Sequence[str | None]) -> OutputNames:
        """Return the names of K labels, None for a label that is left out."""
        names = tuple(dict.fromkeys(name for name in labels if name is not None))
        index = {name: number for number, name in enumerate(names)}
        return cls(names, np.array([-1 if name is None else index[name] for name in labels], np.int64))

    @cached_property
    def kept(self) -> Ints:
        """The indices i64[n] of the labels that are not left out, in the order of their names."""
        order = np.argsort(self.sources, kind="stable")
        return order[self.sources[order] >= 0]

    @property
    def are_joined(self) -> bool:
        return len(self.kept) > len(self.names)

    def join(self, values: Any, ufunc: np.ufunc = np.maximum) -> Any:
        """Return [...,J], the highest of the values [...,K] of the labels of each name, or what `ufunc` reduces to."""
        if len(self.names) == len(self.sources):
            return values
        starts = np.searchsorted(self.sources[self.kept], np.arange(len(self.names)))
        return ufunc.reduceat(values[..., self.kept], starts, axis=-1)

    def prune(self, tree: LabelTree) -> LabelTree:
        """Return a tree of the names. A label implies what the labels imply that are left out between.

        A value that is left out is −1 in its attribute. Raises UserError if joined labels imply each other in a circle,
        or are values of one attribute.
        """
        above: dict[int, list[int]] = {}
        pairs = {}
        for label, parents in tree.parents.items():
            own = int(self.sources[label])
            implied = [name for parent in parents for name in above[parent]]
            above[label] = [own] if own >= 0 else implied
            pairs |= dict.fromkeys((own, name) for name in implied if own not in (-1, name))
        pruned = LabelTree(tuple(pairs))
        if problem := pruned.find_contradiction(self.names):
            raise UserError(f"labels of a tree are joined so that {problem}; give them other names with --rename")
        return replace(pruned, attributes=tuple(map(self._rename, tree.attributes)))

    def _rename(self, attribute: Attribute) -> Attribute:
        labels = tuple(self.sources[list(attribute.labels)].tolist())
        if joined := [k for k in labels if k >= 0 and np.count_nonzero(self.sources == k) > 1]:
            raise UserError(
                f"a value of the attribute {attribute.name} is joined with another label to '{self.names[joined[0]]}'; "
                "give it a name of its own with --rename"
            )
        return replace(attribute, labels=labels)


def read_output_names(names: Sequence[str], rename: PathLike = "", leave_out: PathLike = "") -> OutputNames:
    """Return the names in the output for the labels `names`, by a table of new names and a list of names to leave out.

    "" is no file. The list may have old and new names. Names that are not labels are counted in a warning. Raises
    UserError if a file is damaged, a pattern or all names match nothing, or no label is left.
    """
    labels: list[str | None] = list(names)
    if rename:
        for row, new in _match(names, "--rename", rename, _read_table(rename)).items():
            labels[row] = new
    if leave_out:
        lines = dict.fromkeys(_read_lines(leave_out))
        for row in _match([*names, *labels], "--leave-out", leave_out, lines):
            labels[row % len(names)] = None
        count = labels.count(None)
        if count == len(labels):
            raise UserError(f"--leave-out={leave_out} leaves no label; remove the names that should stay")
        status(f"{count:,} of {quantity(len(labels), 'label')} are left out")
    _say_joined(names, labels)
    output = OutputNames.of(labels)
    if problem := names_problem(output.names):
        raise UserError(f"--rename={rename} {problem}")
    return output


def _match(labels: Sequence[str], flag: str, path: PathLike, lines: Mapping[str, Any]) -> dict[int, Any]:
    """Return row of a label -> value of the line with its name, or of the first line with a pattern that it matches."""
    rows: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(compose(label), []).append(row)
    values: dict[int, Any] = {}
    unknown = []
    for line in sorted(lines, key=lambda line: line not in rows):  # names, then patterns
        found = [line] if line in rows else fnmatch.filter(rows, line)
        unknown += [] if found else [line]
        for row in itertools.chain.from_iterable(map(rows.get, found)):
            values.setdefault(row, lines[line])
    if pattern := next(filter(_PATTERN.search, unknown), ""):
        raise UserError(f"{flag}={path} has the pattern {pattern!r:.100}, which no label matches; correct it")
    if not values:
        raise UserError(
            f"{flag}={path} has only names of no label ({abbreviate(unknown)}); the labels are {abbreviate([*rows])}"
        )
    if unknown:
        logging.getLogger(__name__).warning(
            f"{flag}={path} has {quantity(len(unknown), 'name')} of no label: {abbreviate(unknown)}"
        )
    return values


def _say_joined(names: Sequence[str], labels: Sequence[str | None]) -> None:
    members: dict[str | None, list[str]] = {}
    for name, new in zip(names, labels, strict=True):
        members.setdefault(new, []).append(name)
    joined = [f"{new} ({abbreviate(some)})" for new, some in members.items() if new and len(some) > 1]
    if joined:
        status(
            f"labels are joined to {quantity(len(joined), 'name')}, with their highest score and their lowest "
            f"threshold: {abbreviate(joined)}"
        )


# --------------------------------------------------------------------------------------------------------------- files
def _read_lines(path: PathLike) -> list[str]:
    with damage_explained(path):
        lines = [compose(line.strip()) for line in read_text(path, MOST_NAMES).splitlines()]
    if not any(lines):
        raise UserError(f"{path} has no names; write one per line")
    return list(filter(None, lines))


def _read_table(path: PathLike) -> dict[str, str]:
    """Return name or pattern -> new name."""
    lines, news = _read_lines(path), {}
    with damage_explained(path):
        rows = list(csv.reader(lines, delimiter="\t" if all("\t" in line for line in lines) else ","))
    for line, row in zip(lines, rows, strict=False):
        names = [unescape_cell(cell.strip()) for cell in row]
        if len(names) != 2 or not all(names):
            raise UserError(
                f"{path} has the line {line!r:.100} and should be a table of names and new names; write two names per "
                "line, with a tab or a comma between"
            )
        old, new = names
        if news.setdefault(old, new) != new:
            raise UserError(
                f"{path} gives {old!r:.100} two new names, {news[old]!r:.100} and {new!r:.100}; give it one"
            )
    return news
