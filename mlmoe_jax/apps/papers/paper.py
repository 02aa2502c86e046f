"""The published numbers of the papers, with the configs that reproduce them.

docs/published.md and `mlmoe reproduce` show the numbers. Each paper has a JSON file with these keys:

    name, source      the name of the paper, and where it is published
    evaluator         the definitions of most metrics, a name of `evaluation.metrics.published`
    readings          id -> how a number was derived, if the paper does not print it; such a number is uncertain
    caveats           id -> why a number cannot be compared, or may not be reproduced
    backbones         backbone -> ids of the caveats of all its numbers
    results           id of a table ("1") or figure ("fig3") -> its entry

The entry of a table or figure has these keys:

    caption           the caption
    columns           the headings of the columns with numbers
    notes             optional: ids of the readings and caveats that apply to all its numbers
    then              optional: command lines to run after the trainings; {METHOD} stands for a run folder
    side_by_side      optional: names of the blocks of columns that the paper prints side by side

Each table has a CSV file, such as tables/mlvpt.1.csv, with one line per row and these columns:

    method, backbone, dataset, resolution    the texts of the row
    overrides         config overrides KEY=VALUE
    name              the name of the backbone in this package
    config            the config with its arguments, or two configs for a row of differences; empty if this package
                      lacks the method or the backbone
    config_small      the config for the data sets in SMALL_DATASETS; if it is empty, these data sets leave the row out
    evaluator         the definitions of the metrics of this row
    metrics           COLUMN=METRIC for each column whose numbers are not the metric that its heading names
    notes             ids of the readings and caveats that apply to the row
    each of `columns` the printed number, or a dash if it cannot be read, followed by ids of readings and caveats
    ours: COLUMN      the number of this package, which docs/published.md shows
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
    """A number of a published table or figure, in the unit of its column.

    Attributes:
      value: the number; None if it could not be read from the paper.
      notes: ids of the notes (readings and caveats) of this number.
      certain: True if the paper prints the number. False if the number, its row or its table has a note of the kind
        "reading", which says how the number was derived from the paper.
    """

    value: float | None
    notes: tuple[str, ...]
    certain: bool

    def __str__(self) -> str:
        return number_text(self.value) + (UNCERTAIN if self.value is not None and not self.certain else "")


def number_text(value: float | None, *, sign: str = "") -> str:
    """Return a number with one decimal, or two if it needs them; None and nan give a dash.

    `sign` is the sign option of a format specification; "+" also shows the sign of positive numbers.
    """
    if value is None or math.isnan(value):
        return DASH
    digits = 1 if math.isclose(value, round(value, 1), abs_tol=1e-9) else 2
    return f"{value:{sign}.{digits}f}"


@dataclass(frozen=True)
class Recipe:
    """A training that is defined by the name of a config with its arguments, and by overrides of config keys."""

    reference: str  # such as vpt:backbone=dinov2_vitb14,dataset=coco2014
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of the run folder of the training, such as vpt,backbone=dinov2_vitb14,dataset=coco2014."""
        return ",".join([self.reference.replace(":", ","), *(f"{key}={text}" for key, text in self.overrides)])

    @property
    def dataset(self) -> str:
        """The value of the argument `dataset` of the config."""
        return dict(item.split("=") for item in self.reference.partition(":")[2].split(","))["dataset"]

    def with_seed(self, seed: int) -> Recipe:
        """Return the same training with another seed."""
        return Recipe(self.reference, (*self.overrides, ("seed", str(seed))))


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table: the numbers of one training, or the differences between two trainings.

    See the columns of the CSV file in the docstring of this module. `settings` are the texts of the row, such as
    {"method": "VPT", "resolution": "224"}, by which `--only` selects rows. `recipe` is None if this package lacks the
    method or the backbone, and `backbone` is "" if it lacks the backbone. `subtracted` is the training whose numbers
    are subtracted in a row of differences; otherwise None.
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
        """The texts of the row, separated by commas."""
        return ", ".join(self.settings.values())

    @property
    def names(self) -> list[str]:
        """The texts of the row and the name of its backbone, in lower case; the terms of `--only` match them."""
        return [value.lower() for value in (*self.settings.values(), self.backbone)]

    @property
    def all_notes(self) -> list[str]:
        """The ids of the notes of the row and of its numbers."""
        return list(dict.fromkeys([*self.notes, *(note for number in self.numbers.values() for note in number.notes)]))


@dataclass(frozen=True)
class PublishedTable:
    """A table or figure: its id, such as mlvpt.fig3, its rows, and the fields of its entry in the JSON file."""

    id: str
    rows: Sequence[PublishedRow]
    caption: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    then: Sequence[str] = ()
    side_by_side: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The name of the table or figure in the paper, such as "table 1", followed by the caption."""
        number = self.id.partition(".")[2]
        if number.startswith("fig"):
            return f"figure {number.removeprefix('fig')}: {self.caption}"
        return f"table {number}: {self.caption}" if number.isdigit() else self.caption


@dataclass(frozen=True)
class Paper:
    """A paper: its id, one of PAPERS, and the fields of its JSON file, see the docstring of this module."""

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
        """Id -> text of all notes of the paper: the readings, then the caveats."""
        return self.readings | self.caveats

    @property
    def numbers(self) -> dict[str, int]:
        """Id of a note -> its number in docs/published.md."""
        return {note: number for number, note in enumerate(self.notes, start=1)}

    def marks(self, notes: Iterable[str]) -> str:
        """Return the sorted numbers of the given notes (ids) as text, such as "3, 7"."""
        return ", ".join(map(str, sorted(self.numbers[note] for note in notes)))

    def tables(self) -> Iterator[PublishedTable]:
        """Yield all tables and figures."""
        yield from map(self.table, self.results)

    def table(self, number: str, dataset: str = "") -> PublishedTable:
        """Return the table or figure `number`, such as "1" or "fig3". `dataset` "" = the data set of each row."""
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
        """Return the number and notes of a cell. `certain` is whether neither the row nor the table has a reading."""
        text, *notes = cell.split()
        if text == DASH:
            return PrintedNumber(None, (*notes, UNREAD), certain=False)
        return PrintedNumber(float(text), tuple(notes), certain=certain and not self.readings.keys() & set(notes))


def _read_pairs(text: str | None) -> dict[str, str]:
    return dict(pair.split("=") for pair in (text or "").split())


def _read_configs(line: Mapping[str, str], dataset: str) -> list[str]:
    """Return the names of the configs of a row of a CSV file, with their arguments.

    A row of differences has two configs, and the numbers of the second are subtracted. A row that this package cannot
    train has none. If `dataset` is "", the configs use the data set of the row.
    """
    small = dataset in SMALL_DATASETS
    configs = [config for config in line["config_small" if small else "config"].split(MINUS) if config]
    if small:
        return [f"{config}{',' if ':' in config else ':'}dataset={dataset}" for config in configs]
    if dataset:
        return [re.sub(r"\bdataset=\w+", f"dataset={dataset}", config) for config in configs]
    return configs


@cache
def load_paper(name: str) -> Paper:
    """Return the paper with the id `name`, one of PAPERS."""
    return Paper(name, **json.loads((_FOLDER / f"{name}.json").read_text()))


def find_table(name: str, dataset: str = "") -> tuple[Paper, PublishedTable]:
    """Return the paper and table of `--table`, such as mlvpt.1 or drmoe.fig4; UserError if there is none."""
    known = [f"{paper}.{table}" for paper in PAPERS for table in load_paper(paper).results]
    if name not in known:
        raise UserError(f"--table={name} is not among {', '.join(known)}")
    paper, _, number = name.partition(".")
    return load_paper(paper), load_paper(paper).table(number, dataset)


def filter_rows(rows: Sequence[PublishedRow], only: str) -> list[PublishedRow]:
    """Return the rows that match all terms in `only`, which are separated by commas; "" = all rows.

    A term is compared with `PublishedRow.names` without regard to case, and may be a pattern such as dinov2*. Raises
    UserError if no row matches.
    """
    matches = list(rows)
    for term in only.lower().split(",") if only else ():
        matches = [row for row in matches if fnmatch.filter(row.names, term.strip())]
    if not matches:
        known = dict.fromkeys(value for row in rows for value in row.settings.values())
        raise UserError(f"no row of the table matches --only={only}; its rows have {', '.join(known)}")
    return matches
