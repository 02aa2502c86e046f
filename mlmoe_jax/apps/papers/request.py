"""The runs of `--mode=reproduce`, and the equivalent commands.

Only the data files of the papers are read, so --dry-run answers at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlmoe_jax.apps.papers.paper import SMALL, Paper, Recipe, Result, Row, find, select_rows
from mlmoe_jax.config.loading import load_config
from mlmoe_jax.errors import UserError

_PROGRAM = "python -m mlmoe_jax.main"
WORKDIR = "runs/reproduce"  # one folder for all tables: they share runs

Overrides = list[tuple[str, str]]


@dataclass(frozen=True)
class Request:
    """A table with the rows to train.

    Attributes:
      paper, result: the table.
      rows: the rows to train.
      dataset: another data set for all rows, or "".
      seeds: seeds of every run; () = the seed of its config.
      roots: data set -> folder; "" -> the folder of all data sets.
      overrides: config keys and values for every run.
    """

    paper: Paper
    result: Result
    rows: tuple[Row, ...]
    dataset: str = ""
    seeds: tuple[int, ...] = ()
    roots: Mapping[str, str] = field(default_factory=dict)
    overrides: Overrides = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its files, such as mlvpt.4, or mlvpt.4-digits with another data set."""
        return f"{self.result.id}-{self.dataset}" if self.dataset else self.result.id

    def runs_of(self, recipe: Recipe | None) -> list[Recipe]:
        """Return the runs of a recipe, one per seed; [] without a recipe."""
        return [] if recipe is None else [recipe.with_seed(seed) for seed in self.seeds] or [recipe]

    @property
    def runs(self) -> list[Recipe]:
        """All different runs of the rows, in their order."""
        recipes = [recipe for row in self.rows for recipe in (row.over, row.recipe)]
        return list(dict.fromkeys(run for recipe in recipes for run in self.runs_of(recipe)))

    def overrides_of(self, run: Recipe) -> Overrides:
        """Return all overrides of a run: of its row, of its data folder, and of the request."""
        root = self.roots.get(run.dataset, self.roots.get(""))
        return [*run.overrides, *([("data.root", root)] if root else []), *self.overrides]


def parse_request(
    table: str, *, only: str = "", dataset: str = "", root: str = "", seeds: str = "", overrides: Overrides = ()
) -> Request:
    """Return the request of the flags of `--mode=reproduce`; UserError for a wrong flag."""
    paper, result = find(table, dataset)
    rows = tuple(select_rows(result.rows, only))
    request = Request(paper, result, rows, dataset, _seeds(seeds), _roots(root), list(overrides))
    if dataset and dataset not in SMALL:
        load_config(request.runs[0].reference, [])  # refuses an unknown data set
    names = sorted({run.dataset for run in request.runs})
    known = names if len(names) > 1 else ["", *names]
    if not all(name in known and folder for name, folder in request.roots.items()):
        form = ",".join(f"{name}=FOLDER" for name in names)
        raise UserError(f"--root={root} is not {'' if len(names) > 1 else 'a folder or '}{form}, the data of {table}")
    varied = {key for run in request.runs for key, _ in run.overrides} | ({"data.root"} if request.roots else set())
    if both := varied & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by {table} itself; leave --config.{min(both)} out")
    return request


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise UserError(f"--seeds={text} is not a list of different integers, such as --seeds=0,1,2")
    return tuple(map(int, parts))


def _roots(text: str) -> dict[str, str]:
    """Return {"": FOLDER}, or the folders of DATASET=FOLDER,DATASET=FOLDER."""
    if "=" not in text:
        return {"": text} if text else {}
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip(): folder for name, _, folder in parts}


def training_command(request: Request, run: Recipe, workdir: str) -> str:
    """Return the command that trains one run into the folder of `--mode=reproduce`."""
    words = [f"--config={run.reference}", f"--workdir={workdir}/{run.name}"]
    words += [f"--config.{key}={text}" for key, text in request.overrides_of(run)]
    return f"{_PROGRAM} {shlex.join(words)}"


def commands_after(request: Request, workdir: str) -> list[str]:
    """Return the commands that show the content of a figure after the trainings, on the runs of the first seed."""
    folders = {}
    for row in request.rows:
        for method, recipe in zip(row.settings["method"].split(" − "), (row.recipe, row.over), strict=False):
            if runs := request.runs_of(recipe):
                folders[method] = f"{workdir}/{runs[0].name}"
    try:
        words = [[word.format_map(folders) for word in shlex.split(one)] for one in request.result.then]
    except KeyError:  # --only has left out a run
        return []
    return [f"{_PROGRAM} {shlex.join(one)}" for one in words]


def dry_run(request: Request, workdir: str) -> str:
    """Return all commands, one per line, as a shell script with comments."""
    runs, after = request.runs, commands_after(request, workdir)
    lines = [f"# {request.paper.name}, {request.result.title}", f"# number of runs: {len(runs)}"]
    lines += [training_command(request, run, workdir) for run in runs]
    lines += [f"# not in this package: {row.label}" for row in request.rows if row.recipe is None]
    return "\n".join([*lines, *(["# afterwards"] if after else []), *after])
