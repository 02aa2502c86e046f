"""The names of labels in the output of a prediction: renamed, joined or left out (`--rename`, `--leave-out`).

A list of names to leave out has a name per line. A table of new names has a name and a new name per line, with a tab or
a comma between. A name may be a pattern (* ? [abc]) for all labels that match. In a table of new names, a line with the
name of a label counts before patterns, and the first of several patterns counts.

Labels with the same new name are joined: their score is the highest, and their threshold the lowest of theirs.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
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

    "" is no file. The list may have old and new names. Names that are no label are counted in a warning. Raises
    UserError if a file is damaged, a pattern matches nothing, or no label is left.
    """
    labels: list[str | None] = list(names)
    rows = _read_table(rename) if rename else []
    found = _Matches(names, "--rename", rename, [old for old, _ in rows])
    for number, new in reversed(list(enumerate(new for _, new in rows))):  # the first counts
        for label in found.patterns[number]:
            labels[label] = new
    for number, (_, new) in enumerate(rows):
        for label in found.exact[number]:
            labels[label] = new
    if leave_out:
        lines = _read_lines(leave_out)
        given = _Matches([*names, *labels], "--leave-out", leave_out, lines)
        for label in {label % len(names) for some in (*given.exact, *given.patterns) for label in some}:
            labels[label] = None
        count = labels.count(None)
        if count == len(labels):
            raise UserError(f"--leave-out={leave_out} leaves no label; remove the names that should stay")
        status(f"{count:,} of {quantity(len(labels), 'label')} are left out")
    _say_joined(names, labels)
    output = OutputNames.of(labels)
    if problem := names_problem(output.names):
        raise UserError(f"--rename={rename} {problem}")
    return output


class _Matches:
    """For each of the `lines` of a file, the labels with that name (`exact`) and those that match it (`patterns`)."""

    def __init__(self, labels: Sequence[str], flag: str, path: PathLike, lines: Sequence[str]):
        rows: dict[str, list[int]] = {}
        for row, label in enumerate(labels):
            rows.setdefault(compose(label), []).append(row)
        self.exact = [rows.get(compose(line), []) for line in lines]
        self.patterns = [
            [] if exact or not _PATTERN.search(line) else _match(compose(line), rows)
            for line, exact in zip(lines, self.exact, strict=True)
        ]
        unknown = [line for line, *some in zip(lines, self.exact, self.patterns, strict=True) if not any(some)]
        if pattern := next(filter(_PATTERN.search, unknown), ""):
            raise UserError(f"{flag}={path} has the pattern {pattern!r:.100}, which no label matches; correct it")
        if unknown:
            logging.getLogger(__name__).warning(
                f"{flag}={path}: {len(unknown):,} of {quantity(len(lines), 'name')} are no label: {abbreviate(unknown)}"
            )


def _match(pattern: str, rows: dict[str, list[int]]) -> list[int]:
    fits = re.compile(translate(pattern)).match
    return [row for label, some in rows.items() if fits(label) for row in some]


def _say_joined(names: Sequence[str], labels: Sequence[str | None]) -> None:
    members: dict[str | None, list[str]] = {}
    for name, new in zip(names, labels, strict=True):
        members.setdefault(new, []).append(name)
    joined = [f"{new} ({abbreviate(some)})" for new, some in members.items() if new is not None and len(some) > 1]
    if joined:
        status(
            f"labels are joined to {quantity(len(joined), 'name')}, with their highest score and their lowest "
            f"threshold: {abbreviate(joined)}"
        )


# --------------------------------------------------------------------------------------------------------------- files
def _read_lines(path: PathLike) -> list[str]:
    with damage_explained(path):
        lines = [line.strip() for line in read_text(path, MOST_NAMES).splitlines()]
    if not any(lines):
        raise UserError(f"{path} has no names; write one per line")
    return list(dict.fromkeys(filter(None, lines)))


def _read_table(path: PathLike) -> list[tuple[str, str]]:
    lines = _read_lines(path)
    in_tabs = all("\t" in line for line in lines)
    with damage_explained(path):
        cells = [line.split("\t") for line in lines] if in_tabs else list(csv.reader(lines))
    rows = [tuple(unescape_cell(cell.strip()) for cell in row) for row in cells]
    for line, row in zip(lines, rows, strict=False):
        if len(row) != 2 or not all(row):
            raise UserError(
                f"{path} has the line {line!r:.100} and should be a table of names and new names; write two names per "
                "line, with a tab or a comma between"
            )
    news: dict[str, str] = {}
    for old, new in rows:
        if news.setdefault(old, new) != new:
            raise UserError(
                f"{path} gives {old!r:.100} two new names, {news[old]!r:.100} and {new!r:.100}; give it one"
            )
    return rows
