"""The tables and figures of a paper, as its data file has them.

A JSON file per paper in this folder has every number that the paper prints, its caveats, and the config that reproduces
it. docs/results.md and `--mode=reproduce` read it:

    name, source      of the paper
    evaluator         a name of `evaluation.metrics.published`, the definitions of the metrics; rows may differ
    readings          id -> how a number was read, if it is not simply printed: such a number is not certain
    caveats           id -> why a number cannot be compared, or may not be reached
    methods           name of a method -> its config, with arguments
    backbones         name of a backbone -> `name` in this package, notes, and the config of a method that differs
    results           id of a table ("1") or figure ("fig3") -> a result

Keys of a result:

    caption, columns, rows
    notes             ids of readings and caveats of all its numbers
    metrics           column -> the metric of its numbers, if the heading says otherwise
    arguments         arguments of all configs
    groups            heading -> further arguments, for blocks of columns that the paper prints side by side
    x                 the horizontal axis of a figure
    then              commands after the trainings, in which {METHOD} is a run folder

Keys of a row:

    method
    backbone          its name; without this key, the row stands for one per backbone, on a small data set for the first
    printed           one cell per column, or a list of cells per group. A cell is a number, null if it cannot be read,
                      or a list of a cell and ids of notes; {"cells": …, "notes": …} adds notes to all cells. Without
                      this key, no number can be read.
    over              another method, from which the numbers are differences
    small             false: left out on a small data set
    ours              the numbers of this package
    notes, arguments, overrides (of config keys), metrics, evaluator
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import UserError

PAPERS = ("mlvpt", "drmoe")
MISSING = "not reproduced here"  # instead of a number of this package
UNREAD = "unread"  # the reading of a missing number
UNCERTAIN = "?"  # after an uncertain number
# Small data sets with their own backbone and image size in the configs, on which a grid runs in minutes.
SMALL = ("digits",)


@dataclass(frozen=True)
class Number:
    """One printed number, in the unit of its column.

    Attributes:
      value: None if it could not be read.
      notes: ids of the notes of this number.
      certain: the number is simply printed: no note of the number, its row or its result is a reading.
    """

    value: float | None
    notes: tuple[str, ...]
    certain: bool

    def __str__(self) -> str:
        return as_text(self.value) + (UNCERTAIN if self.value is not None and not self.certain else "")


def as_text(value: float | None, *, sign: str = "") -> str:
    """Return a number with one or two digits, or a dash for None and nan; sign="+" gives positive numbers a sign."""
    if value is None or math.isnan(value):
        return "–"
    digits = 1 if math.isclose(value, round(value, 1), abs_tol=1e-9) else 2
    return f"{value:{sign}.{digits}f}"


@dataclass(frozen=True)
class Recipe:
    """A training: a config with arguments, and overrides of config keys."""

    reference: str  # such as vpt:backbone=dinov2_vitb14,dataset=coco2014
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of its run folder, such as vpt,backbone=dinov2_vitb14,dataset=coco2014."""
        return ",".join([self.reference.replace(":", ","), *(f"{key}={text}" for key, text in self.overrides)])

    @property
    def dataset(self) -> str:
        return dict(item.split("=") for item in self.reference.partition(":")[2].split(","))["dataset"]

    def with_seed(self, seed: int) -> Recipe:
        return Recipe(self.reference, (*self.overrides, ("seed", str(seed))))


@dataclass(frozen=True)
class Row:
    """The numbers of a run, or with `over` the differences of two runs.

    Attributes:
      settings: the texts of the row, by which `--only` filters, such as {"method": "VPT", "resolution": "224"}.
      backbone: its name in this package, or "".
      recipe: the training; None if this package lacks the method or the backbone.
      over: the training whose numbers are subtracted.
      evaluator: a name of `evaluation.metrics.published`.
      metrics: column -> metric of the evaluator.
      numbers: column -> published number.
      ours: column -> number of this package.
      notes: ids of the notes of the row.
      x: its x value in a figure.
    """

    settings: Mapping[str, str]
    backbone: str
    recipe: Recipe | None
    over: Recipe | None
    evaluator: str
    metrics: Mapping[str, str]
    numbers: Mapping[str, Number]
    ours: Mapping[str, float | None]
    notes: tuple[str, ...]
    x: Any

    @property
    def label(self) -> str:
        return ", ".join(self.settings.values())

    @property
    def all_notes(self) -> list[str]:
        """The ids of the notes of the row and its numbers."""
        return list(dict.fromkeys([*self.notes, *(note for number in self.numbers.values() for note in number.notes)]))


@dataclass(frozen=True)
class Result:
    """One table or figure of a paper. `notes` apply to all numbers, and `x` is the axis of a figure, "" for a table."""

    id: str  # such as mlvpt.fig3
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    x: str
    then: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its name in the paper, such as "table 1", with the caption."""
        number = self.id.partition(".")[2]
        kind = "figure" if number.startswith("fig") else "table" if number.isdigit() else ""
        return f"{kind} {number.removeprefix('fig')}: {self.caption}" if kind else self.caption


class Paper:
    """A paper with its results. `notes` maps ids of readings and caveats to sentences, `numbers` to their numbers."""

    def __init__(self, name: str):
        self.id, self.data = name, json.loads(Path(__file__).with_name(f"{name}.json").read_text())
        self.name, self.source = self.data["name"], self.data["source"]
        self.readings, self.caveats = self.data["readings"], self.data["caveats"]
        self.notes = {**self.readings, **self.caveats}
        self.numbers = {note: number for number, note in enumerate(self.notes, start=1)}

    def marks(self, notes: Iterable[str]) -> str:
        """Return the numbers of notes in order."""
        return ", ".join(map(str, sorted(self.numbers[note] for note in notes)))

    def results(self) -> Iterator[Result]:
        yield from map(self.result, self.data["results"])

    def result(self, name: str, dataset: str = "") -> Result:
        """Return a result; with `dataset`, its configs use this data set instead of their own."""
        entry = self.data["results"][name]
        rows = self._rows(entry["rows"], small=dataset in SMALL)
        groups = entry.get("groups", {"": {}}).items()
        return Result(
            f"{self.id}.{name}",
            entry["caption"],
            tuple(entry["columns"]),
            tuple(self._row(entry, row, group, further, dataset) for row in rows for group, further in groups),
            tuple(entry.get("notes", ())),
            entry.get("x", ""),
            tuple(entry.get("then", ())),
        )

    def _rows(self, rows: Iterable[Mapping], *, small: bool) -> Iterator[Mapping]:
        """Yield the rows of a result, each with one backbone."""
        backbones = list(self.data["backbones"])[: 1 if small else None]
        for row in rows:
            if row.get("small", True) or not small:
                names = [row["backbone"]] if "backbone" in row else backbones
                yield from ({**row, "backbone": name} for name in names)

    def _row(self, entry: Mapping, row: Mapping, group: str, further: Mapping, dataset: str) -> Row:
        method, over, backbone, columns = row["method"], row.get("over"), row["backbone"], entry["columns"]
        arguments = {**entry.get("arguments", {}), **further, **row.get("arguments", {})}
        overrides = {key: str(value) for key, value in row.get("overrides", {}).items()}
        settings = {"method": f"{method} − {over}" if over else method, "backbone": backbone}
        settings |= {key: str(arguments[key]) for key in ("dataset", "resolution")}
        settings |= {key: f"{key.rpartition('.')[2]}={text}" for key, text in overrides.items()}
        recipes = (self._recipe(one, backbone, arguments, overrides, dataset) for one in (method, over))
        printed, x = row.get("printed", [None] * len(columns)), entry.get("x", "")
        printed = printed[group] if group and isinstance(printed, dict) else printed
        cells, group_notes = (printed["cells"], printed["notes"]) if isinstance(printed, dict) else (printed, ())
        notes = (*self.data["backbones"][backbone].get("notes", ()), *row.get("notes", ()), *group_notes)
        numbers = (self._number(cell, {*notes, *entry.get("notes", ())}) for cell in cells)
        return Row(
            settings,
            self.data["backbones"][backbone].get("name", ""),
            *recipes,
            row.get("evaluator", self.data["evaluator"]),
            row.get("metrics", entry.get("metrics", {})),
            dict(zip(columns, numbers, strict=True)),
            dict(zip(columns, row["ours"], strict=True)) if "ours" in row else {},
            notes,
            row["overrides"][x] if x in overrides else method,
        )

    def _number(self, cell: Any, outer_notes: set[str]) -> Number:
        value, *notes = cell if isinstance(cell, list) else [cell]
        notes += [UNREAD] * (value is None)
        return Number(value, tuple(notes), not {*notes, *outer_notes} & self.readings.keys())

    def _recipe(
        self, method: str | None, backbone: str, arguments: Mapping, overrides: Mapping[str, str], dataset: str
    ) -> Recipe | None:
        known = self.data["backbones"][backbone]
        if method not in self.data["methods"] or "name" not in known:
            return None
        reference, extra = self.data["methods"][method], {"backbone": known["name"], **arguments}
        if dataset:
            extra["dataset"] = dataset
        if dataset in SMALL:
            del extra["backbone"], extra["resolution"]
        elif method in known:
            reference = known[method]
            del extra["backbone"]
        listed = ",".join(f"{key}={extra[key]}" for key in sorted(extra))
        return Recipe(f"{reference}{',' if ':' in reference else ':'}{listed}", tuple(overrides.items()))


load = cache(Paper)


def find(table: str, dataset: str = "") -> tuple[Paper, Result]:
    """Return the paper and the result of `--table`, such as mlvpt.1 or drmoe.fig4.

    A number without a table, as in mlvpt.7, means the figure. Raises UserError for an unknown name.
    """
    name, _, number = table.partition(".")
    known = [(paper, one) for paper in PAPERS for one in load(paper).data["results"]]
    if not (matches := [one for one in (number, f"fig{number}") if (name, one) in known]):
        raise UserError(f"--table={table} is not among {', '.join(map('.'.join, known))}")
    return load(name), load(name).result(matches[0], dataset)


def select_rows(rows: Sequence[Row], only: str) -> list[Row]:
    """Return the rows that match all terms of `--only`, a list separated by commas; UserError if there are none.

    A term is compared with each setting of a row and with the name of its backbone in this package, without regard to
    case. If rows have an equal setting, only these rows match. Otherwise the term is a pattern such as `dinov2*`, or a
    part of a setting.
    """
    matches = list(rows)
    for term in filter(None, (text.strip().lower() for text in only.split(","))):
        settings = [(row, [value.lower() for value in (*row.settings.values(), row.backbone)]) for row in matches]
        equal = [row for row, values in settings if term in values]
        pattern = term if set(term) & set("*?[") else f"*{term}*"
        matches = equal or [row for row, values in settings if any(fnmatchcase(value, pattern) for value in values)]
    if not matches:
        known = dict.fromkeys(value for row in rows for value in row.settings.values())
        raise UserError(f"no row of the table matches --only={only}; its rows have {', '.join(known)}")
    return matches


def markdown_table(rows: Sequence[Sequence[str]], rule: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table whose first row is the heading."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]
