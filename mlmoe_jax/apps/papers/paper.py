"""The published numbers of the papers, with the configs that reproduce them.

docs/results.md and `--mode=reproduce` show them. A JSON file per paper describes its tables and figures:

    name, source      of the paper
    evaluator         a name of `evaluation.metrics.published`, the definitions of most metrics
    readings          id -> how a number was read, if it is not simply printed: such a number is not certain
    caveats           id -> why a number cannot be compared, or may not be reached
    backbones         backbone -> ids of the caveats of all its numbers
    results           id of a table ("1") or figure ("fig3") -> caption, columns, and if there are any: notes, ids of
                      readings and caveats of all its numbers; then, commands after the trainings, in which {METHOD} is
                      a run folder; side_by_side, the blocks of columns of the paper

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
OURS = "ours: "  # before the name of a column with numbers of this package
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

    @property
    def label(self) -> str:
        """The texts of the row in one line."""
        return ", ".join(self.settings.values())

    @property
    def names(self) -> list[str]:
        """What `--only` compares, in lower case."""
        return [value.lower() for value in (*self.settings.values(), self.backbone)]

    @property
    def all_notes(self) -> list[str]:
        """The ids of the notes of the row and its numbers."""
        return list(dict.fromkeys([*self.notes, *(note for number in self.numbers.values() for note in number.notes)]))


@dataclass(frozen=True)
class PublishedTable:
    """A table or figure of a paper.

    Attributes:
      id: such as mlvpt.fig3.
      rows: the rows.
      caption: what it shows.
      columns: the metrics.
      notes: ids of the notes of all numbers.
      then: commands after the trainings.
      side_by_side: names of the adjacent rows that the paper prints side by side.
    """

    id: str
    rows: Sequence[PublishedRow]
    caption: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    then: Sequence[str] = ()
    side_by_side: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Its name in the paper, such as "table 1", with the caption."""
        number = self.id.partition(".")[2]
        if number.startswith("fig"):
            return f"figure {number.removeprefix('fig')}: {self.caption}"
        return f"table {number}: {self.caption}" if number.isdigit() else self.caption


@dataclass(frozen=True)
class Paper:
    """A paper, with the fields of its JSON file.

    Attributes:
      id: such as mlvpt.
      name, source, evaluator, readings, caveats, backbones, results: see above.
    """

    id: str
    name: str
    source: str
    evaluator: str
    readings: dict[str, str]
    caveats: dict[str, str]
    backbones: dict[str, list[str]]
    results: dict[str, dict[str, Any]]

    @property
    def notes(self) -> dict[str, str]:
        """The sentences of all readings and caveats by id."""
        return self.readings | self.caveats

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the notes in docs/results.md by id."""
        return {note: number for number, note in enumerate(self.notes, start=1)}

    def marks(self, notes: Iterable[str]) -> str:
        """Return the numbers of notes as text, such as "3, 7"."""
        return ", ".join(map(str, sorted(self.numbers[note] for note in notes)))

    def tables(self) -> Iterator[PublishedTable]:
        """Yield all tables and figures."""
        yield from map(self.table, self.results)

    def table(self, number: str, dataset: str = "") -> PublishedTable:
        """Return a table or figure; with `dataset`, its configs use this data set instead of their own."""
        entry = self.results[number]
        with open(_FOLDER / "tables" / f"{self.id}.{number}.csv", newline="") as file:
            lines = list(csv.DictReader(file))
        if dataset in SMALL_DATASETS:
            lines = [line for line in lines if line["config_small"] or not line["config"]]
        rows = [self._read_row(entry, line, dataset) for line in lines]
        return PublishedTable(f"{self.id}.{number}", rows, **entry)

    def _read_row(self, entry: Mapping[str, Any], line: Mapping[str, str], dataset: str) -> PublishedRow:
        overrides, notes = _read_pairs(line.get("overrides")), tuple(line["notes"].split())
        settings = {key: line[key] for key in ("method", "backbone", "dataset", "resolution")}
        settings |= {key: f"{key.rpartition('.')[2]}={text}" for key, text in overrides.items()}
        recipes = [Recipe(config, tuple(overrides.items())) for config in _read_configs(line, dataset)]
        recipe, subtracted, *_ = [*recipes, None, None]
        uncertain = self.readings.keys() & {*notes, *entry.get("notes", ())}
        return PublishedRow(
            settings,
            line["name"],
            recipe,
            subtracted,
            line["evaluator"],
            _read_pairs(line.get("metrics")),
            {column: self._read_number(line[column], certain=not uncertain) for column in entry["columns"]},
            {name.removeprefix(OURS): float(cell) if cell else None for name, cell in line.items() if OURS in name},
            notes,
        )

    def _read_number(self, cell: str, *, certain: bool) -> PrintedNumber:
        """Return the number of a cell. `certain`: no note of its row or table is a reading."""
        text, *notes = cell.split()
        if text == DASH:
            return PrintedNumber(None, (*notes, UNREAD), certain=False)
        return PrintedNumber(float(text), tuple(notes), certain=certain and not self.readings.keys() & set(notes))


def _read_pairs(text: str | None) -> dict[str, str]:
    return dict(pair.split("=") for pair in (text or "").split())


def _read_configs(line: Mapping[str, str], dataset: str) -> list[str]:
    """Return the config of a row, and the config to subtract; as many of them as the row has."""
    small = dataset in SMALL_DATASETS
    configs = [config for config in line["config_small" if small else "config"].split(MINUS) if config]
    if small:
        return [f"{config}{',' if ':' in config else ':'}dataset={dataset}" for config in configs]
    if dataset:
        return [re.sub(r"\bdataset=\w+", f"dataset={dataset}", config) for config in configs]
    return configs


@cache
def load_paper(name: str) -> Paper:
    """Return the paper with this id, one of PAPERS."""
    return Paper(name, **json.loads((_FOLDER / f"{name}.json").read_text()))


def find_table(name: str, dataset: str = "") -> tuple[Paper, PublishedTable]:
    """Return the paper and the table of `--table`, such as mlvpt.1 or drmoe.fig4; UserError for an unknown name."""
    known = [f"{paper}.{table}" for paper in PAPERS for table in load_paper(paper).results]
    if name not in known:
        raise UserError(f"--table={name} is not among {', '.join(known)}")
    paper, _, number = name.partition(".")
    return load_paper(paper), load_paper(paper).table(number, dataset)


def filter_rows(rows: Sequence[PublishedRow], only: str) -> list[PublishedRow]:
    """Return the rows that match all terms of `--only`, a list separated by commas; UserError if there are none.

    A term is a setting of a row, the name of its backbone in this package, or a pattern such as dinov2*, in any case.
    """
    matches = list(rows)
    for term in only.lower().split(",") if only else ():
        matches = [row for row in matches if fnmatch.filter(row.names, term.strip())]
    if not matches:
        known = dict.fromkeys(value for row in rows for value in row.settings.values())
        raise UserError(f"no row of the table matches --only={only}; its rows have {', '.join(known)}")
    return matches
