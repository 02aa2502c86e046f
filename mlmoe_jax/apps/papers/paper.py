"""The published numbers of the papers, with the configs that reproduce them.

docs/results.md and `--mode=reproduce` show them. A JSON file per paper describes its tables and figures:

    name, source      of the paper
    evaluator         a name of `evaluation.metrics.published`, the definitions of most metrics
    readings          id -> how a number was read, if it is not simply printed: such a number is not certain
    caveats           id -> why a number cannot be compared, or may not be reached
    backbones         backbone -> ids of the caveats of all its numbers
    results           id of a table ("1") or figure ("fig3") -> caption, columns, and if there are any: notes, ids of
                      readings and caveats of all its numbers; x, the horizontal axis of a figure; then, commands after
                      the trainings, in which {METHOD} is a run folder; side_by_side, the blocks of columns of the paper

A CSV file per table, such as tables/mlvpt.1.csv, has a line per row:

    method, backbone, dataset, resolution    of the row
    overrides         KEY=VALUE of the config
    name              the backbone in this package
    config            the config with arguments, or for a row of differences two configs; empty if this package lacks
                      the method or the backbone
    config_small      the config for a data set of SMALL_DATASETS, on which a row without it is left out
    evaluator         as above
    metrics           COLUMN=METRIC of columns whose numbers are another metric than their heading says
    notes             ids of readings and caveats
    a column each     the printed number, or a dash if it cannot be read, and ids of notes
    ours: COLUMN      the number of this package, which docs/results.md shows
"""

from __future__ import annotations

import csv
import fnmatch
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlmoe_jax.errors import UserError

PAPERS = ("mlvpt", "drmoe")
MISSING = "not reproduced here"  # instead of a number of this package
UNREAD = "unread"  # the reading of a missing number
UNCERTAIN = "?"  # after an uncertain number
DASH = "–"  # instead of a missing number
MINUS = " − "  # between the methods and the configs of a row of differences
# Small data sets with their own backbone and image size in the configs, on which a grid runs in minutes.
SMALL_DATASETS = ("digits",)
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PrintedNumber:
    """One printed number, in the unit of its column.

    Attributes:
      value: None if it could not be read.
      notes: ids of the notes of this number.
      certain: the number is simply printed: no note of the number, its row or its table is a reading.
    """

    value: float | None
    notes: tuple[str, ...]
    certain: bool

    def __str__(self) -> str:
        return number_text(self.value) + (UNCERTAIN if self.value is not None and not self.certain else "")


def number_text(value: float | None, *, sign: str = "") -> str:
    """Return a number with one or two decimals. None and nan become a dash."""
    if value is None or math.isnan(value):
        return DASH
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
        """The data set, from the arguments of the config."""
        return dict(item.split("=") for item in self.reference.partition(":")[2].split(","))["dataset"]

    def with_seed(self, seed: int) -> Recipe:
        """Return the same training with another seed."""
        return Recipe(self.reference, (*self.overrides, ("seed", str(seed))))


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table: the numbers of one training, or the differences of two.

    Attributes:
      settings: the texts of the row, by which `--only` filters, such as {"method": "VPT", "resolution": "224"}.
      backbone: its name in this package, or "".
      recipe: the training; None if this package lacks the method or the backbone.
      subtracted: the training whose numbers are subtracted; None unless the row has differences.
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
    subtracted: Recipe | None
    evaluator: str
    metrics: Mapping[str, str]
    numbers: Mapping[str, PrintedNumber]
    ours: Mapping[str, float | None]
    notes: tuple[str, ...]
    x: Any

    @property
    def label(self) -> str:
        """The texts of the row in one line."""
        return ", ".join(self.settings.values())

    @property
    def all_notes(self) -> list[str]:
        """The ids of the notes of the row and its numbers."""
        return list(dict.fromkeys([*self.notes, *(note for number in self.numbers.values() for note in number.notes)]))


@dataclass(frozen=True)
class PublishedTable:
    """A table or figure of a paper.

    Attributes:
      id: such as mlvpt.fig3.
      caption: what it shows.
      columns: the metrics.
      rows: the rows.
      notes: ids of the notes of all numbers.
      x: the horizontal axis of a figure, a config key, "method" or "label"; "" for a table.
      then: commands after the trainings.
      side_by_side: names of the adjacent rows that the paper prints side by side.
    """

    id: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    notes: tuple[str, ...]
    x: str
    then: tuple[str, ...]
    side_by_side: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its name in the paper, such as "table 1", with the caption."""
        number = self.id.partition(".")[2]
        if number.startswith("fig"):
            return f"figure {number.removeprefix('fig')}: {self.caption}"
        return f"table {number}: {self.caption}" if number.isdigit() else self.caption


class Paper:
    """A paper with its tables.

    Attributes:
      notes: id -> sentence, of all readings and caveats.
      numbers: id -> number of the note in docs/results.md.
      descriptions: table -> its entry in the JSON file.
    """

    def __init__(self, name: str):
        description = json.loads((_FOLDER / f"{name}.json").read_text())
        self.id, self.name, self.source = name, description["name"], description["source"]
        self.evaluator: str = description["evaluator"]
        self.readings, self.caveats = description["readings"], description["caveats"]
        self.notes = {**self.readings, **self.caveats}
        self.numbers = {note: number for number, note in enumerate(self.notes, start=1)}
        self.backbones: dict[str, list[str]] = description["backbones"]
        self.descriptions: dict[str, dict[str, Any]] = description["results"]

    def marks(self, notes: Iterable[str]) -> str:
        """Return the numbers of notes as text, such as "3, 7"."""
        return ", ".join(map(str, sorted(self.numbers[note] for note in notes)))

    def tables(self) -> Iterator[PublishedTable]:
        """Yield all tables and figures."""
        yield from map(self.table, self.descriptions)

    def table(self, number: str, dataset: str = "") -> PublishedTable:
        """Return a table or figure; with `dataset`, its configs use this data set instead of their own."""
        entry = self.descriptions[number]
        with open(_FOLDER / "tables" / f"{self.id}.{number}.csv", newline="") as file:
            lines = list(csv.DictReader(file))
        if dataset in SMALL_DATASETS:
            lines = [line for line in lines if line["config_small"] or not line["config"]]
        return PublishedTable(
            f"{self.id}.{number}",
            entry["caption"],
            tuple(entry["columns"]),
            tuple(self._read_row(entry, line, dataset) for line in lines),
            tuple(entry.get("notes", ())),
            entry.get("x", ""),
            tuple(entry.get("then", ())),
            tuple(entry.get("side_by_side", ())),
        )

    def _read_row(self, entry: Mapping[str, Any], line: Mapping[str, str], dataset: str) -> PublishedRow:
        overrides, notes = _read_pairs(line.get("overrides", "")), tuple(line["notes"].split())
        settings = {key: line[key] for key in ("method", "backbone", "dataset", "resolution")}
        settings |= {key: f"{key.rpartition('.')[2]}={text}" for key, text in overrides.items()}
        recipe, subtracted = _read_recipes(line, tuple(overrides.items()), dataset)
        around = {*notes, *entry.get("notes", ())}
        x = entry.get("x", "")
        return PublishedRow(
            settings,
            line["name"],
            recipe,
            subtracted,
            line["evaluator"],
            _read_pairs(line.get("metrics", "")),
            {column: self._read_number(line[column], around) for column in entry["columns"]},
            _read_own_numbers(line),
            notes,
            int(overrides[x]) if x in overrides else line["method"],
        )

    def _read_number(self, cell: str, around: set[str]) -> PrintedNumber:
        """Return the number of a cell. `around` are the notes of its row and table."""
        text, *notes = cell.split()
        if text == DASH:
            return PrintedNumber(None, (*notes, UNREAD), certain=False)
        return PrintedNumber(float(text), tuple(notes), certain=not {*notes, *around} & self.readings.keys())


def _read_pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


def _read_own_numbers(line: Mapping[str, str]) -> dict[str, float | None]:
    own = {name.removeprefix("ours: "): cell for name, cell in line.items() if name.startswith("ours: ")}
    return {column: float(cell) if cell else None for column, cell in own.items()}


def _read_recipes(
    line: Mapping[str, str], overrides: tuple[tuple[str, str], ...], dataset: str
) -> tuple[Recipe | None, Recipe | None]:
    """Return the training of a row and the one to subtract; None for what the row does not have."""
    if dataset in SMALL_DATASETS:
        configs = [_with_argument(one, f"dataset={dataset}") for one in line["config_small"].split(MINUS) if one]
    else:
        configs = [one for one in line["config"].split(MINUS) if one]
        if dataset:
            configs = [re.sub(r"\bdataset=\w+", f"dataset={dataset}", one) for one in configs]
    recipes = [Recipe(config, overrides) for config in configs]
    recipe, subtracted, *_ = [*recipes, None, None]
    return recipe, subtracted


def _with_argument(reference: str, argument: str) -> str:
    return f"{reference}{',' if ':' in reference else ':'}{argument}"


load_paper = cache(Paper)


def find_table(name: str, dataset: str = "") -> tuple[Paper, PublishedTable]:
    """Return the paper and the table of `--table`, such as mlvpt.1 or drmoe.fig4.

    A number without a table, as in mlvpt.7, means the figure. Raises UserError for an unknown name.
    """
    paper, _, number = name.partition(".")
    known = [f"{one}.{table}" for one in PAPERS for table in load_paper(one).descriptions]
    for full in (number, f"fig{number}"):
        if f"{paper}.{full}" in known:
            return load_paper(paper), load_paper(paper).table(full, dataset)
    raise UserError(f"--table={name} is not among {', '.join(known)}")


def filter_rows(rows: Sequence[PublishedRow], only: str) -> list[PublishedRow]:
    """Return the rows that match all terms of `--only`, a list separated by commas; UserError if there are none."""
    matches = list(rows)
    for term in only.lower().split(","):
        matches = _match_term(matches, term.strip())
    if not matches:
        known = dict.fromkeys(value for row in rows for value in row.settings.values())
        raise UserError(f"no row of the table matches --only={only}; its rows have {', '.join(known)}")
    return matches


def _match_term(rows: Sequence[PublishedRow], term: str) -> list[PublishedRow]:
    """Return the rows that match a term of `--only`.

    A term is compared with each setting of a row and with the name of its backbone in this package, without regard to
    case. If rows have an equal setting, only these rows match. Otherwise the term is a pattern such as `dinov2*`, or a
    part of a setting.
    """
    if not term:
        return list(rows)
    names = [[value.lower() for value in (*row.settings.values(), row.backbone)] for row in rows]
    equal = [row for row, values in zip(rows, names, strict=True) if term in values]
    pattern = term if set(term) & set("*?[") else f"*{term}*"
    return equal or [row for row, values in zip(rows, names, strict=True) if fnmatch.filter(values, pattern)]
